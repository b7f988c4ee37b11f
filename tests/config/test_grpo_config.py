"""GRPOConfig: TRL's fields and defaults, and every setting that cannot work refused before a model is loaded."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import logging
import math
import pickle
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from grupo.algo.registry import LOSSES
from grupo.config import GRPOConfig
from grupo.config.constraints import CHOICES, RANGES, simple_field_types
from grupo.config.field_support import (
    FIELD_ENTRIES,
    GRUPO_FIELDS,
    TRL_FIELDS,
    FieldSupport,
    field_default,
    field_tables,
    page_with_tables,
)
from grupo.config.fields import GRPOFields
from grupo.config.renames import COMPOUND_FIELDS, DROPPED_FIELDS, IGNORED_FIELDS, RENAMED_FIELDS
from grupo.config.validation import CONDITIONS
from grupo.errors import ConfigError, UnsupportedError
from grupo.sampling import SamplingSpec

DOCS = Path(__file__).parents[2] / "docs" / "config.md"
FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}
NEEDS_CPU_ONLY = pytest.mark.skipif(torch.accelerator.is_available(), reason="states what happens without accelerator")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What was said, one entry per line; grows."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("grupo")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def refused(**keywords: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        GRPOConfig(**keywords)
    return str(refusal.value)


# ---- names and defaults ----------------------------------------------------------------------------------------------


def test_every_field_of_trl_has_its_default() -> None:
    trl = pytest.importorskip("trl")
    differs = {
        field.name: (field_default(field), field_default(FIELDS[field.name]))
        for field in dataclasses.fields(trl.GRPOConfig)
        if field_default(field) != field_default(FIELDS[field.name])
    }
    assert differs == {
        # A NaN loss is shown.
        "logging_nan_inf_filter": (True, False),
        # None tells unset from set; it resolves to True.
        "gradient_checkpointing": (True, None),
    }
    assert {field.name for field in dataclasses.fields(trl.GRPOConfig)} == FIELDS.keys() - GRUPO_FIELDS.keys()


def test_every_declared_field_has_a_docstring() -> None:
    source = inspect.getsource(GRPOFields)
    declared = re.findall(r"\n    (\w+): [^\n]+ = [^\n]+\n( {4}\"\"\")?", source)
    assert {name for name, _ in declared} >= GRUPO_FIELDS.keys() | TRL_FIELDS.keys()
    assert [name for name, docstring in declared if not docstring] == []


def test_unknown_name_gets_the_nearest_field() -> None:
    assert "learning_rate" in refused(learnign_rate=1e-5)
    assert "docs/config.md" in refused(qqqq=1)
    assert inspect.signature(GRPOConfig).parameters.keys() == FIELDS.keys()


# ---- the table of fields ---------------------------------------------------------------------------------------------


def test_every_field_has_a_row_in_the_table() -> None:
    assert FIELD_ENTRIES.keys() == FIELDS.keys()
    assert all(row.phrase for row in FIELD_ENTRIES.values())


def test_docs_hold_the_table() -> None:
    page = DOCS.read_text()
    assert page == page_with_tables(page, field_tables(dataclasses.fields(GRPOConfig))), (
        "run: python -m grupo.config.field_support docs/config.md"
    )
    assert all(f"| `{name}` |" in page for name in FIELDS)


def test_docs_name_every_old_name() -> None:
    page = DOCS.read_text()
    assert [
        name
        for name in (*RENAMED_FIELDS, *IGNORED_FIELDS, *DROPPED_FIELDS, *COMPOUND_FIELDS)
        if f"`{name}`" not in page
    ] == []


def away_from(name: str) -> Any:
    default = field_default(FIELDS[name])
    if name in CHOICES:
        return next(option for option in CHOICES[name] if option != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return f"{default}x" if isinstance(default, str) else "x"


NOT_HONOURED = [name for name, row in FIELD_ENTRIES.items() if row.support is not FieldSupport.HONOURED]


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_a_field_that_is_not_honoured_keeps_its_default(name: str) -> None:
    expected = UnsupportedError if FIELD_ENTRIES[name].support is FieldSupport.REFUSED else ConfigError
    with pytest.raises(ConfigError, match=rf"\b{name}\b") as refusal:
        GRPOConfig(**{name: away_from(name)})
    assert type(refusal.value) is expected
    GRPOConfig(**{name: field_default(FIELDS[name])})


# ---- old names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("warmup_ratio", 0.1, "warmup_steps"),
        ("evaluation_strategy", "steps", "eval_strategy"),
        ("no_cuda", True, "use_cpu"),
        ("scoring_dropout", True, "logprob_dropout"),
    ],
)
def test_renamed_fields_are_translated_with_one_line(old: str, value: Any, new: str, lines: list[str]) -> None:
    config = GRPOConfig(**{old: value})
    assert getattr(config, new) == value
    assert new in config.explicit_fields
    assert len(lines) == 1 and old in lines[0] and new in lines[0]
    lines.clear()
    assert GRPOConfig(wandb_log_unique_prompts=True, log_completions=True).log_unique_prompts and len(lines) == 1


def test_warmup_ratio_keeps_its_meaning() -> None:
    assert GRPOConfig(warmup_ratio=0.1).get_warmup_steps(250) == 25
    assert "number of steps" in refused(warmup_ratio=1.0)
    assert "same setting" in refused(warmup_ratio=0.1, warmup_steps=5)
    # A dump of an older config carries the default beside it.
    assert GRPOConfig(warmup_ratio=0.1, warmup_steps=0).warmup_steps == 0.1
    assert GRPOConfig(warmup_ratio=None, warmup_steps=5).warmup_steps == 5


@pytest.mark.parametrize("name", IGNORED_FIELDS)
@pytest.mark.parametrize("value", [True, False, "folder"])
def test_fields_that_say_nothing_any_more_are_accepted_with_one_line(name: str, value: Any, lines: list[str]) -> None:
    GRPOConfig(**{name: value})
    assert len(lines) == 1 and name in lines[0]


@pytest.mark.parametrize("name", DROPPED_FIELDS)
def test_fields_that_were_dropped_are_refused_when_switched_on(name: str, lines: list[str]) -> None:
    assert name in refused(**{name: "x"})
    GRPOConfig(**{name: None})
    assert len(lines) == 1 and name in lines[0]


@pytest.mark.parametrize(
    ("old", "value"),
    [("use_liger_loss", True), ("vllm_guided_decoding_regex", "a+"), ("vllm_max_model_len", 2048)],
)
def test_old_names_of_refused_fields_get_the_refusal(old: str, value: Any, lines: list[str]) -> None:
    message = refused(**{old: value})
    assert old in message and RENAMED_FIELDS[old] in message
    assert lines == []


# ---- copies, parsers, files ------------------------------------------------------------------------------------------


def loaded_config() -> GRPOConfig:
    """One with many fields that transformers rewrites."""
    return GRPOConfig(
        "out",
        loss_type="gspo",
        use_cpu=True,
        gradient_checkpointing=False,
        eval_strategy="steps",
        report_to="none",
        reward_weights=[1.0, 0.5],
        generation_kwargs={"top_p": 0.9},
        steps_per_generation=2,
        learning_rate=2e-5,
    )


def test_copies_keep_everything() -> None:
    config = loaded_config()
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        assert other.explicit_fields == config.explicit_fields
    other = copy.copy(config)
    other.gradient_accumulation_steps = 4
    assert config.gradient_accumulation_steps == 1


def test_replace_changes_what_was_named_and_nothing_else(lines: list[str]) -> None:
    config = loaded_config()
    changed = dataclasses.replace(config, seed=7)
    differs = {name for name in FIELDS if getattr(changed, name) != getattr(config, name)}
    assert differs == {"seed"}
    assert dataclasses.replace(GRPOConfig(), loss_type="gspo").loss_type == "gspo"
    assert lines == []


def test_a_dump_builds_the_same_config() -> None:
    config = loaded_config()
    text = config.to_json_string()
    assert json.loads(text)["loss_type"] == "gspo"
    again = GRPOConfig(**config.to_dict())
    assert again.to_json_string() == text


def test_command_line_parser() -> None:
    parser = HfArgumentParser(GRPOConfig)  # type: ignore[arg-type]
    arguments = ["--output_dir", "out", "--loss_type", "gspo", "--generation_kwargs", '{"top_p": 0.9}']
    arguments += ["--pad_to_multiple_of", "64", "--scale_rewards", "batch", "--gradient_checkpointing", "false"]
    (config,) = parser.parse_args_into_dataclasses(arguments)
    assert config.sampling_spec().top_p == 0.9
    assert config.resolved_pad_to_multiple_of == 64
    assert not config.activation_checkpointing
    assert "importance_sampling_level" not in config.explicit_fields


def test_derived_dataclass() -> None:
    @dataclasses.dataclass
    class Derived(GRPOConfig):
        extra: int = 1

    config = Derived(extra=2, loss_type="gspo")
    assert config.explicit_fields == {"extra", "loss_type"}
    with pytest.raises(ConfigError, match="top_p"):
        Derived(top_p=2.0)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CHOICES if FIELD_ENTRIES[name].support is FieldSupport.HONOURED])
def test_text_options_are_spelt_right(name: str) -> None:
    *_, option = CHOICES[name]
    message = refused(**{name: option[:-1] + "q"})
    assert name in message and f"Did you mean {option!r}?" in message
    assert name in refused(**{name: None})


def test_scale_rewards_takes_its_older_values() -> None:
    assert GRPOConfig(scale_rewards=True).scale_rewards == "group"  # type: ignore[arg-type]
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"  # type: ignore[arg-type]


OUT_OF_RANGE: dict[str, list[Any]] = {
    "num_generations": [1, 0, -1, 2.5, None],
    "num_generations_eval": [0],
    "max_completion_length": [0, None],
    "max_prompt_length": [0],
    "temperature": [0.0, -1.0],
    "top_p": [0.0, 1.1],
    "top_k": [-1, None],
    "min_p": [-0.1, 1.5],
    "repetition_penalty": [0.0],
    "epsilon": [-0.1],
    "epsilon_high": [-0.1],
    "delta": [1.0, 0.0],
    "beta": [-0.04],
    "num_iterations": [0],
    "top_entropy_quantile": [-0.1, 1.1],
    "max_steps": [0, -2],
    "warmup_steps": [-1, 2.5],
    "num_train_epochs": [0],
    "per_device_train_batch_size": [0],
    "gradient_accumulation_steps": [0],
    "pad_to_multiple_of": [0, "x", -8],
    "reward_weights": [[math.nan], [math.inf], ["1"], 1.0, [True]],
    "off_policy_mask_threshold": [0.0],
    "max_failed_reward_share": [-0.1, 1.1],
    "reward_timeout": [0.0, math.inf],
    "max_nonfinite_steps": [0],
    "logprob_gap_warn": [0.0, 0.6],
    "logprob_gap_stop": [0.01],
    "dynamic_sampling_max_rounds": [0],
    "num_generations_trained": [1, 8],
    "curriculum_threshold": [0.0, 1.1],
    "curriculum_window": [0],
    "curriculum_success_reward": [math.inf],
    "entropy_coef": [math.inf],
    "adam_beta2": [1.0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]
)
def test_numbers_are_in_their_range(name: str, value: Any) -> None:
    assert name in refused(**{name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if isinstance(field.default, float)])
def test_no_number_is_nan(name: str) -> None:
    assert name in refused(**{name: math.nan})


def test_edges_of_the_ranges_are_allowed() -> None:
    assert RANGES.keys() <= simple_field_types(GRPOConfig).keys()
    GRPOConfig(eval_strategy="steps", per_device_eval_batch_size=4, num_generations_eval=3, learning_rate=0.0)
    GRPOConfig(top_p=1.0, min_p=0.0, epsilon=0.0, top_entropy_quantile=0.0, num_generations=2, max_grad_norm=math.inf)
    GRPOConfig(num_generations_eval=1, max_failed_reward_share=0.0, logprob_gap_warn=0.5, logprob_gap_stop=math.inf)
    GRPOConfig(reward_weights=[0.0, -1.0], entropy_coef=-0.01)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("log_completions", "false", "Any text counts as true"),
        ("learning_rate", "1e-6", "Write it without quotes"),
        ("gradient_checkpointing", "no", "write true or false without quotes"),
        ("max_steps", "10", "a whole number"),
        ("num_generations", 8.0, "a whole number"),
        ("mask_truncated_completions", 1, "True or False"),
        ("generation_kwargs", "top_p", "a dict"),
    ],
)
def test_types(name: str, value: Any, hint: str) -> None:
    message = refused(**{name: value})
    assert name in message and hint in message


def test_paths_are_text(tmp_path: Path) -> None:
    assert GRPOConfig(tmp_path).output_dir == str(tmp_path)  # type: ignore[arg-type]
    assert GRPOConfig(resume_from_checkpoint=True).resume_from_checkpoint is True  # type: ignore[arg-type]


# ---- options without effect ------------------------------------------------------------------------------------------

LEVEL_AND_NUMBERS = sorted(frozenset().union(*(spec.reads for spec in LOSSES.values())))
WITH_KL = {"beta": 0.1}
# field -> (a value away from its default, where nothing reads it, where it is read)
EFFECT_CASES: dict[str, tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "scale_rewards": ("batch", [{"multi_objective_aggregation": "normalize_then_sum"}], [{}]),
    "use_bias_correction_kl": (False, [{}], [WITH_KL]),
    "kl_on_dead_groups": (False, [{}], [WITH_KL]),
    "sync_ref_model": (True, [{}], [WITH_KL]),
    "reference_policy": ("base", [{}], [WITH_KL]),
    "ref_model_mixup_alpha": (0.9, [WITH_KL], [{"sync_ref_model": True, **WITH_KL}]),
    "ref_model_sync_steps": (64, [{}], [{"sync_ref_model": True, **WITH_KL}]),
    "entropy_coef_min": (0.1, [{}, {"entropy_coef": 0.1}], [{"use_adaptive_entropy": True}]),
    "entropy_coef_max": (0.1, [{"entropy_coef": 0.1}], [{"use_adaptive_entropy": True}]),
    "entropy_coef_delta": (0.1, [{}], [{"use_adaptive_entropy": True}]),
    "entropy_target": (0.1, [{}], [{"use_adaptive_entropy": True}]),
    "dynamic_sampling_max_rounds": (5, [{}], [{"dynamic_sampling": True}]),
    "curriculum_threshold": (0.5, [{}], [{"curriculum_column": "level"}]),
    "curriculum_window": (16, [{}], [{"curriculum_column": "level"}]),
    "curriculum_success_reward": (0.5, [{}], [{"curriculum_column": "level"}]),
    "shuffle_dataset": (False, [{"curriculum_column": "level"}], [{}]),
    "overlong_prompts": ("refuse", [{}], [{"max_prompt_length": 64}]),
    "num_completions_to_print": (3, [{}], [{"log_completions": True}]),
    "log_unique_prompts": (True, [{}], [{"log_completions": True}]),
    "gradient_checkpointing_kwargs": ({"use_reentrant": False}, [{"gradient_checkpointing": False}], [{}]),
    "activation_checkpointing_kwargs": ({"use_reentrant": False}, [{"activation_checkpointing": False}], [{}]),
}


def test_a_loss_takes_the_settings_that_its_entry_lists() -> None:
    changed = {name: "sequence" if name == "importance_sampling_level" else 1.5 for name in LEVEL_AND_NUMBERS}
    for loss_type, spec in LOSSES.items():
        for name, value in changed.items():
            if name in spec.reads:
                assert getattr(GRPOConfig(loss_type=loss_type, **{name: value}), name) == value
            else:
                assert f"{name}={value!r} has no effect with loss_type='{loss_type}'" in refused(
                    loss_type=loss_type, **{name: value}
                )


def test_every_condition_has_a_case() -> None:
    assert {name for condition in CONDITIONS for name in condition.fields} == EFFECT_CASES.keys()


@pytest.mark.parametrize("name", EFFECT_CASES)
def test_an_option_that_nothing_reads_is_refused(name: str) -> None:
    value, without, with_effect = EFFECT_CASES[name]
    for context in without:
        message = refused(**{name: value}, **context)
        assert name in message and "no effect" in message
        GRPOConfig(**{name: field_default(FIELDS[name])}, **context)
    for context in with_effect:
        assert getattr(GRPOConfig(**{name: value}, **context), name) == value


def test_seldom_meant_combinations_warn(lines: list[str]) -> None:
    GRPOConfig(loss_type="luspo", importance_sampling_level="sequence")
    GRPOConfig(loss_type="grpo", importance_sampling_level="sequence")
    assert lines == []
    GRPOConfig(loss_type="luspo")
    GRPOConfig(loss_type="dapo", importance_sampling_level="sequence")
    assert len(lines) == 2


# ---- resolved values -------------------------------------------------------------------------------------------------


def test_seed_of_the_prompt_order() -> None:
    assert GRPOConfig(seed=3).resolved_data_seed == 3 and GRPOConfig(seed=3, data_seed=0).resolved_data_seed == 0


def test_the_best_checkpoint_is_the_one_with_the_best_reward(lines: list[str]) -> None:
    config = GRPOConfig(load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", save_steps=10)
    assert (config.metric_for_best_model, config.greater_is_better) == ("reward", True)
    assert len(lines) == 1
    with_loss = GRPOConfig(
        load_best_model_at_end=True, eval_strategy="steps", save_steps=10, metric_for_best_model="loss"
    )
    assert (with_loss.metric_for_best_model, with_loss.greater_is_better) == ("loss", False)


@pytest.mark.parametrize("suffix", ["", "_kwargs"])
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_has_two_names(name: str, suffix: str, recwarn: pytest.WarningsRecorder) -> None:
    value = {"use_reentrant": True} if suffix else False
    config = GRPOConfig(**{name + suffix: value})
    assert getattr(config, "gradient_checkpointing" + suffix) == value
    assert getattr(config, "activation_checkpointing" + suffix) == value
    assert [str(warning.message) for warning in recwarn if "checkpointing" in str(warning.message)] == []
    assert GRPOConfig().gradient_checkpointing is True and GRPOConfig().activation_checkpointing is True


@NEEDS_CPU_ONLY
def test_precision_on_the_cpu(lines: list[str]) -> None:
    assert GRPOConfig().bf16 is False
    assert GRPOConfig(use_cpu=True).bf16 is False
    assert GRPOConfig(bf16=True, use_cpu=True).bf16 is True
    assert lines == []
    assert GRPOConfig(bf16=True).bf16 is False
    assert len(lines) == 1 and "bf16=True" in lines[0]
    assert "bf16=True and use_cpu=True" in refused(fp16=True)
    assert "fp16" in refused(fp16=True, use_cpu=True)


def test_precision_on_an_accelerator(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(TrainingArguments, "_validate_args", lambda self: None)
    monkeypatch.setattr("grupo.config.grpo_config.is_torch_bf16_gpu_available", lambda: True)
    assert GRPOConfig().bf16 is True
    assert GRPOConfig(bf16=True).bf16 is True
    assert GRPOConfig(bf16=False).bf16 is False
    assert GRPOConfig(fp16=True).bf16 is False
    assert GRPOConfig(use_cpu=True).bf16 is False
    assert lines == []
    monkeypatch.setattr("grupo.config.grpo_config.is_torch_bf16_gpu_available", lambda: False)
    assert GRPOConfig().bf16 is False
    assert len(lines) == 1 and "not support bfloat16" in lines[0]


def test_8_bit_adamw_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr("grupo.config.grpo_config.is_bitsandbytes_available", lambda: True)
    assert GRPOConfig(optim="adamw_8bit").optim == "adamw_8bit"
    assert lines == []
    monkeypatch.setattr("grupo.config.grpo_config.is_bitsandbytes_available", lambda: False)
    assert GRPOConfig(optim="adamw_8bit").optim == TrainingArguments.default_optim
    assert len(lines) == 1 and "pip install bitsandbytes" in lines[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 2}}, "It accepts num_cycles."),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "two"}}, "cannot be created"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "Without lr_scheduler_kwargs, lr_scheduler_type="),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-8}, "lr_end"),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"power": 2}}, "has no effect"),
        (
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "metric_for_best_model": "reward",
                "eval_strategy": "steps",
                "lr_scheduler_kwargs": {"mode": "biggest"},
            },
            "biggest",
        ),
        ({"optim": "sgd", "optim_args": "momentum"}, "expected key=value pairs"),
        ({"optim": "sgd", "optim_args": "momentum=much"}, "could not convert string to float: 'much'"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "does not read 'momentun'"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "Nesterov momentum requires a momentum"),
        ({"optim": "adamw_torch", "optim_args": "beta1=0.5"}, "does not read 'beta1'"),
        ({"optim": "adamw_torch", "optim_target_modules": ["q_proj"]}, "optim_target_modules=['q_proj'] has no effect"),
        ({"optim": "adamw_torch_xla"}, "optim='adamw_torch_xla' cannot be created"),
        ({"optim": "stable_adamw"}, "torch-optimi"),
        ({"optim": "galore_adamw", "optim_target_modules": "all-linear"}, "the package galore_torch"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "--load_best_model_at_end requires"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"seed": 2**32}, "at most 4.29497e+09"),
        ({"report_to": "wandb"}, "report_to='wandb' needs a package that is not installed"),
        ({"report_to": ["tensorbord"]}, "Did you mean 'tensorboard'?"),
        ({"output_dir": ""}, "output_dir='' would scatter"),
        ({"loss_type": "gspo", "importance_sampling_level": "token"}, "importance_sampling_level='token' was set"),
        ({"logprob_dropout": True, "disable_dropout": True}, "disable_dropout"),
        ({"entropy_coef_min": 0.5, "entropy_coef_max": 0.1, "use_adaptive_entropy": True}, "entropy_coef_min"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "metric_for_best_model"),
        ({"gradient_checkpointing": False, "activation_checkpointing": True}, "one setting"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches"),
        ({"optim": "lomo"}, "lomo"),
        ({"optim": "galore_adamw_layerwise"}, "galore_adamw_layerwise"),
        ({"generation_kwargs": {"topp": 0.9}}, "top_p"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams"),
        ({"generation_kwargs": {"max_new_tokens": 5}}, "max_completion_length"),
        ({"generation_kwargs": {"eos_token_id": 5}}, "stop_token_ids"),
        ({"generation_kwargs": {"temperature": 0}}, "greedy"),
        ({"generation_kwargs": {"top_p": 0.0}}, "top_p"),
        ({"generation_kwargs": {"stop_token_ids": ["</s>"]}}, "stop_token_ids"),
        ({"generation_kwargs": {"stop": [3]}}, "list of strings"),
        ({"generation_kwargs": {"top_p": 0.9}, "top_p": 0.8}, "contradict"),
        ({"vllm_sampling_params": {"min_p": 0.1}, "min_p": 0.2}, "contradict"),
        ({"vllm_sampling_params": {"n": 4}, "num_generations": 8}, "num_generations=4"),
        ({"vllm_sampling_params": {"max_tokens": 64}}, "max_completion_length=64"),
        ({"vllm_sampling_params": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"vllm_sampling_params": {"stop": "x"}, "generation_kwargs": {"stop": "y"}}, "generation_kwargs"),
        ({"vllm_sampling_params": 3}, "SamplingParams"),
        ({"max_seq_length": 512}, "leaves no room"),
        ({"max_seq_length": 600, "max_prompt_length": 100}, "max_prompt_length=88"),
        ({"max_seq_length": "1k"}, "number of tokens"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base class would find many of them only after the model was loaded, or after the first evaluation."""
    for package in ("optimi", "galore_torch"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("grupo.config.validation.get_available_reporting_integrations", lambda: ["tensorboard"])
    assert said in refused(**settings)


def test_settings_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "max_steps": 3},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}, "warmup_steps": 7},
        {"optim": "sgd", "optim_args": "momentum=0, nesterov=no"},
        {"optim": "rmsprop", "optim_args": "centered=true,alpha=0.9"},
        {"optim": "adafactor"},
        {"accelerator_config": {"even_batches": True}},
    ):
        GRPOConfig(**settings)
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "true")
            assert variable in refused()


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_generation_kwargs_are_merged() -> None:
    config = GRPOConfig(max_completion_length=64, generation_kwargs={"temperature": 0.7, "stop_token_ids": [3, 4]})
    assert config.sampling_spec() == SamplingSpec(temperature=0.7, max_new_tokens=64, stop_token_ids=(3, 4))
    assert GRPOConfig().sampling_spec() == SamplingSpec(1.0, 1.0, 0, None, 1.0, 512, ())
    assert config.training_temperature == 0.7
    assert GRPOConfig(top_p=0.9, generation_kwargs={"top_p": 0.9}).sampling_spec().top_p == 0.9
    assert GRPOConfig(generation_kwargs='{"top_k": 5}').sampling_spec().top_k == 5


def test_greedy_is_a_sampling_spec_but_no_training() -> None:
    assert SamplingSpec(temperature=0).is_greedy
    with pytest.raises(ConfigError, match="temperature"):
        SamplingSpec(temperature=-0.5)
    with pytest.raises(ConfigError, match="temperature"):
        SamplingSpec(temperature=math.nan)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_batches_that_do_not_fit_are_refused_at_once() -> None:
    start = time.perf_counter()
    message = refused(per_device_train_batch_size=5, num_generations=6, gradient_accumulation_steps=1)
    assert time.perf_counter() - start < 2
    assert "5 completions" in message and "num_generations=6" in message and "per_device_train_batch_size=6" in message
    assert "at least 2" in refused(num_generations=1)
    assert "set one of them" in refused(steps_per_generation=2, generation_batch_size=16)


def test_the_numbers_stay_those_of_the_user() -> None:
    config = GRPOConfig(per_device_train_batch_size=1, gradient_accumulation_steps=1, num_generations=8)
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == (1, None)
    assert config.generation_batch_size is None


# ---- Unsloth's fields ------------------------------------------------------------------------------------------------


def test_sampling_params_become_fields(lines: list[str]) -> None:
    from grupo import SamplingParams

    params = SamplingParams(min_p=0.1, top_p=1.0, top_k=-1, seed=3407, stop=["</s>"], include_stop_str_in_output=True)
    config = GRPOConfig("anywhere", vllm_sampling_params=params, temperature=0.9)
    assert config.sampling_spec() == SamplingSpec(temperature=0.9, min_p=0.1, max_new_tokens=512)
    assert config.stop_strings == ("</s>",) and config.generation_kwargs == {"stop": ["</s>"]}
    (line,) = lines
    assert line.startswith("vllm_sampling_params sets min_p=0.1, stop=['</s>'].") and "seed" in line
    copied = dataclasses.replace(config)
    assert (copied.min_p, copied.stop_strings) == (0.1, ("</s>",))
    assert GRPOConfig(vllm_sampling_params={"top_k": -1}).top_k == 0, "vLLM's -1 keeps all tokens, as 0 does here"


def test_max_seq_length_is_prompt_and_completion(lines: list[str]) -> None:
    config = GRPOConfig("anywhere", max_seq_length=1024, max_completion_length=200)
    assert config.max_prompt_length == 824 and len(lines) == 1
    assert GRPOConfig("anywhere", max_seq_length=1024, max_prompt_length=256).max_prompt_length == 256
