"""What must not pass in silence: settings that changed before a resumption, foreign optimizers, second adapters."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from datetime import date
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from grupo import GRPOConfig, GRPOTrainer
from grupo.config.batch_plan import StepPlan
from grupo.config.field_support import FIELD_ENTRIES, FieldSupport
from grupo.errors import ConfigError, DataError, UnsupportedError
from grupo.runs.resume_check import IGNORED, LOCKED, METRIC_DRIVEN, OVERRIDABLE, parse_accepted_changes
from grupo.trainer.resume_fingerprint import resume_fingerprint
from tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"say {index}"} for index in range(8)]
LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")


def by_length(completions, **_):
    return [float(len(text)) for text in completions]


def make(
    folder: Path,
    *,
    model=None,
    rows=ROWS,
    rewards=by_length,
    tokenizer=None,
    peft_config=None,
    optimizers=(None, None),
    **config,
):
    settings = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 6, "max_steps": 4, "save_steps": 1, "learning_rate": 1e-3, "report_to": [],
        "lr_scheduler_type": "constant", "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    return GRPOTrainer(
        model or tiny_model(),
        rewards,
        GRPOConfig(output_dir=str(folder), **{**settings, **config}),
        rows,
        processing_class=tokenizer or tiny_tokenizer(),
        peft_config=peft_config,
        optimizers=optimizers,
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_generations": 2}, "num_generations was 4 and is 2"),
        ({"temperature": 0.5}, "temperature was 1.0 and is 0.5"),
        ({"beta": 0.1}, "beta was 0.0 and is 0.1"),
        ({"seed": 7}, "seed was 42 and is 7"),
        ({"steps_per_generation": 8}, "steps_per_generation was 4 and is 8"),
    ],
)
def test_a_run_with_other_settings_is_not_resumed(changed, said, tmp_path):
    make(tmp_path, max_steps=1, steps_per_generation=4).train()
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, **{"steps_per_generation": 4, **changed}).train(resume_from_checkpoint=True)


def lora(**changes):
    return LoraConfig(task_type="CAUSAL_LM", **{"r": 2, "target_modules": "all-linear", **changes})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"peft_config": lora(r=4)}, "lora.r was 2 and is 4"),
        ({"peft_config": lora(lora_alpha=1)}, "lora.lora_alpha was 8 and is 1"),
        (
            {"peft_config": lora(target_modules=["q_proj"])},
            r"lora.target_modules was \['model.* \.\.\. and is \['q_proj'\]",
        ),
        ({"peft_config": None}, "adapter was LoraConfig and is none"),
        (
            {"model": tiny_model(intermediate_size=32), "peft_config": lora()},
            r"settings: parameters was 28832 and is 22304; trainable",
        ),
        ({"peft_config": lora(), "optim": "sgd"}, "optim was adamw_torch_fused and is sgd"),
    ],
)
def test_a_run_with_another_adapter_model_or_optimizer_is_not_resumed(changed, said, tmp_path):
    make(tmp_path, max_steps=1, peft_config=lora(), optim="adamw_torch_fused").train()
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, **{"optim": "adamw_torch_fused", **changed}).train(resume_from_checkpoint=True)


def test_a_resumed_run_can_be_resumed(tmp_path):
    for steps in (1, 2, 3):
        trainer = make(tmp_path, max_steps=steps, peft_config=lora())
        trainer.train(resume_from_checkpoint=steps > 1)
        assert trainer.state.global_step == steps


def by_half_length(completions, **_):
    return [len(text) / 2 for text in completions]


def times(factor):
    def scaled(completions, **_):
        return [factor * len(text) for text in completions]

    return scaled


DATA = [{"prompt": f"say {index}", "answer": index} for index in range(8)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": [{**DATA[0], "prompt": "say nothing"}, *DATA[1:]]}, "dataset was"),
        ({"rows": [{**row, "answer": row["answer"] + 1} for row in DATA]}, "dataset was"),
        ({"rows": DATA[::-1]}, "dataset was"),
        ({"rows": [*DATA, DATA[0]]}, "prompts was 8 and is 9"),
        ({"model": lambda: tiny_model(seed=1)}, "model was"),
        ({"learning_rate": 1e-4}, "learning_rate was 0.001 and is 0.0001"),
        ({"num_iterations": 2}, "num_iterations was 1 and is 2"),
        ({"shuffle_dataset": False}, "shuffle_dataset was True and is False"),
    ],
)
def test_what_a_checkpoint_depends_on_cannot_change(changed, said, tmp_path):
    def other(**settings):
        kept = {"peft_config": lora(), "rows": DATA, "model": tiny_model}
        settings = {**kept, **settings}
        return make(tmp_path, **{**settings, "model": settings["model"]()})

    other(max_steps=1).train()
    with pytest.raises(ConfigError, match=said) as raised:
        other(**changed).train(resume_from_checkpoint=True)
    assert "To train with the new values, start a new run" in str(raised.value)
    name = said.split()[0]
    with pytest.raises(ConfigError, match=f"'{name}', which cannot change during a run"):
        other(**changed).train(resume_from_checkpoint=True, accept_changes=[name])


@pytest.mark.parametrize(
    ("before", "changed", "name"),
    [
        ({"lr_scheduler_type": "linear"}, {"max_steps": 4}, "steps"),
        ({"lr_scheduler_type": "linear", "max_steps": -1, "num_train_epochs": 1}, {"num_train_epochs": 2}, "steps"),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}, {"max_steps": 4}, "steps"),
        ({}, {"rewards": by_half_length}, "rewards"),
        ({"rewards": times(1)}, {"rewards": times(2)}, "rewards"),
        ({}, {"reward_weights": [2.0]}, "reward_weights"),
        ({}, {"max_grad_norm": 0.5}, "max_grad_norm"),
        ({}, {"generation_kwargs": {"top_p": 0.8}}, "top_p"),
    ],
)
def test_what_makes_it_another_run_is_accepted_by_name(before, changed, name, tmp_path, caplog):
    make(tmp_path, **{"max_steps": 2, **before}).train()
    settings = {"max_steps": 3, **before, **changed}
    with pytest.raises(ConfigError, match=rf"{name} was .* and is .*accept_changes=\['{name}'\]"):
        make(tmp_path, **settings).train(resume_from_checkpoint=True)
    make(tmp_path, **settings).train(resume_from_checkpoint=True, accept_changes=name)
    assert f"Continuing with changed settings, as accepted: {name} was" in caplog.text
    # What comes after is that other run.
    make(tmp_path, **settings).train(resume_from_checkpoint=True)


def test_a_misspelt_change_is_not_taken_for_one(tmp_path):
    make(tmp_path, max_steps=1).train()
    for accepted, said in (
        (["reward"], r"'reward', which cannot change during a run\. Did you mean 'rewards'"),
        (["save_steps"], "save_steps, which may always change: remove it"),
        (True, r"accept_changes=True must be a list of setting names, such as accept_changes=\['steps'"),
    ):
        with pytest.raises(ConfigError, match=said):
            make(tmp_path).train(resume_from_checkpoint=True, accept_changes=accepted)
    assert parse_accepted_changes("steps, rewards,") == ["steps", "rewards"]


def test_what_changes_no_number_needs_no_word(tmp_path):
    """More steps at a learning rate that does not depend on them; other logs, evaluations and checkpoints."""
    make(tmp_path, max_steps=2, rewards=times(3)).train()
    trainer = make(
        tmp_path, max_steps=6, rewards=times(3), logging_steps=3, save_steps=2, save_total_limit=2, run_name="again",
        reward_timeout=5.0, micro_batch_tokens=200, log_completions=True, num_completions_to_print=1,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    logs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logs if "loss" in line] == [1, 2, 3, 6], "as set now, not as in the checkpoint"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_every_setting_is_free_asked_for_or_fixed():
    """Who adds a field says in `same_run` what becomes of it when a run is resumed."""
    honoured = {name for name, row in FIELD_ENTRIES.items() if row.support is FieldSupport.HONOURED}
    assert honoured | {"steps", "rewards", "stop"} == IGNORED | OVERRIDABLE | LOCKED
    # A free field with a compared entry of its name is compared as resolved, or where something depends on it.
    assert METRIC_DRIVEN | {"reward_weights"} == IGNORED & OVERRIDABLE
    assert not LOCKED & (IGNORED | OVERRIDABLE)


def test_settings_of_evaluations_are_compared_where_the_learning_rate_follows_them(tmp_path):
    watching = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "reward", "eval_strategy": "steps",
        "eval_steps": 2,
    }  # fmt: skip
    for settings in (watching, {**watching, "lr_scheduler_type": "constant"}):
        config = GRPOConfig(str(tmp_path), report_to=[], **settings)
        compared = resume_fingerprint(config, StepPlan.from_config(config, num_prompts=8))
        assert METRIC_DRIVEN & compared.keys() == (METRIC_DRIVEN if settings is watching else set())


def test_the_same_sampling_by_another_field_is_the_same_run(tmp_path):
    make(tmp_path, max_steps=1, top_p=0.9).train()
    make(tmp_path, generation_kwargs={"top_p": 0.9}, max_steps=2).train(resume_from_checkpoint=True)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="would never move"):
        make(tmp_path, model=model, peft_config=LORA, optimizers=(optimizer, None))
    make(tmp_path, model=model, optimizers=(torch.optim.AdamW(tiny_model_parameters(model)), None))


def tiny_model_parameters(model):
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.parameters()


def test_a_second_adapter_is_refused_however_the_first_came(tmp_path):
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    tiny_model().save_pretrained(base)
    from transformers import AutoModelForCausalLM

    get_peft_model(AutoModelForCausalLM.from_pretrained(base), LORA).save_pretrained(adapter)
    for model in (get_peft_model(tiny_model(), LORA), str(adapter)):
        with pytest.raises(ConfigError, match="has an adapter already"):
            make(tmp_path / "run", model=model, peft_config=LORA)


def test_prompt_tuning_is_refused(tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedError, match="virtual tokens"):
        make(tmp_path, peft_config=config)
    with pytest.raises(UnsupportedError, match="virtual tokens"):
        make(tmp_path, model=get_peft_model(tiny_model(), config))


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([{"prompt": "a", "image": "x"}], UnsupportedError, "column 'image'"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]}],
            UnsupportedError,
            "image",
        ),
        ([{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}], DataError, "not text"),
        ([{"prompt": [{"role": "user", "content": None}]}], DataError, "NoneType"),
    ],
)
def test_what_is_no_text_is_refused(rows, error, said, tmp_path):
    with pytest.raises(error, match=said):
        make(tmp_path, rows=rows * 8)


def test_tokens_without_an_embedding(tmp_path):
    tokenizer = tiny_tokenizer(pad=None)
    tokenizer.add_tokens([f"<new{index}>" for index in range(60)])
    with pytest.raises(DataError, match="resize_token_embeddings"):
        make(tmp_path, rows=[{"prompt": "a<new55>b"}] * 8, tokenizer=tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id >= 128
    make(tmp_path, tokenizer=tokenizer, max_steps=1).train()


def test_a_reward_cannot_move_the_run(tmp_path):
    def meddling(completions, trainer_state, **_):
        trainer_state.global_step = 7
        trainer_state.max_steps = 1
        return by_length(completions)

    trainer = make(tmp_path, rewards=meddling)
    trainer.train()
    assert trainer.state.global_step == 4


def test_the_table_keeps_its_columns(tmp_path):
    def completion(completions, log_extra, **_):
        log_extra("prompt", ["mine"] * len(completions))
        return by_length(completions)

    make(tmp_path, rewards=completion, log_completions=True, max_steps=1, num_completions_to_print=1).train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert list(table.columns) == ["step", "prompt", "completion", "reward/completion", "extra/prompt", "advantage"]
    assert table["prompt"].str.startswith("say").all() and set(table["extra/prompt"]) == {"mine"}


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([1, "a", None, 2.5], ["1", "a", None, "2.5"]),
        ([True, 1, "b", None], ["True", "1", "b", None]),
        ([{"a": 1}, "x", [2], 3], ["{'a': 1}", "x", "[2]", "3"]),
        ([{}, {}, {}, {}], ["{}"] * 4),
        ([date(2020, 1, 2), 1, None, 2], ["2020-01-02", "1", None, "2"]),
        ([2**70, 1, 2, 3], [str(2**70), "1", "2", "3"]),
        (["\ud800", "a", "b", "c"], ["\\ud800", "a", "b", "c"]),
        ([1, 2.5, 3, 4], [1.0, 2.5, 3.0, 4.0]),
    ],
)
def test_logged_columns_of_mixed_types_do_not_end_the_run(values, written, tmp_path, caplog):
    def logs(completions, log_extra, **_):
        log_extra("found", values * 2)
        return by_length(completions)

    make(tmp_path, rewards=logs, log_completions=True, max_steps=2, num_completions_to_print=1).train()
    for step in (1, 2):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert [None if value is pd.NA or value != value else value for value in table["found"]] == written * 2
    said = [line for line in caplog.messages if "'found', from log_extra" in line]
    assert len(said) == (0 if written[0] == 1.0 else 1)


def test_weights_of_zero_reward_nothing(tmp_path):
    with pytest.raises(ConfigError, match="nothing is rewarded"):
        make(tmp_path, reward_weights=[0.0])


def test_target_modules_of_an_optimizer_that_the_model_lacks(tmp_path, monkeypatch):
    """Optimizers that look for modules can be checked with the model alone; that is before the first evaluation."""

    def looks_for_modules(config, model):
        raise ValueError(f"No target modules found for {config.optim} ({config.optim_target_modules}).")

    monkeypatch.setitem(sys.modules, "galore_torch", types.ModuleType("galore_torch"))
    sys.modules["galore_torch"].__spec__ = importlib.machinery.ModuleSpec("galore_torch", None)
    monkeypatch.setattr("grupo.config.optimizer.Trainer.get_optimizer_cls_and_kwargs", looks_for_modules)
    with pytest.raises(ConfigError, match="cannot be created: No target modules found"):
        make(tmp_path, optim="galore_adamw", optim_target_modules=["nowhere"])
