"""The checks that GRPOConfig makes before any model is loaded, beyond the values of single fields: names, and what goes
with what. Tables, and one function per kind of rule."""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from grupo.algo.registry import LOSSES, losses_reading
from grupo.config.constraints import check_choice
from grupo.config.field_support import (
    COMPOUND_FIELDS,
    DROPPED_FIELDS,
    FIELD_ROWS,
    IGNORED_FIELDS,
    RENAMED_FIELDS,
    Treatment,
    field_default,
)
from grupo.config.renames import translate_compound
from grupo.errors import ConfigError, UnsupportedError
from grupo.utils.messages import did_you_mean

if TYPE_CHECKING:
    from grupo.config.batch_plan import StepPlan
    from grupo.config.grpo_config import GRPOConfig

logger = logging.getLogger("grupo")

# ---- names -----------------------------------------------------------------------------------------------------------


def defaults_of(config_class: type[GRPOConfig]) -> dict[str, Any]:
    return {field.name: field_default(field) for field in dataclasses.fields(config_class) if field.init}


def translate_old_names(keywords: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords under today's names. One line per old name; ConfigError for a name that was never one."""
    translated = {name: value for name, value in keywords.items() if name in defaults}
    for name, value in keywords.items():
        if name in defaults:
            continue
        if name in RENAMED_FIELDS:
            _rename(name, value, translated, defaults)
        elif name in IGNORED_FIELDS:
            logger.warning("%s=%r has no effect any more: %s.", name, value, IGNORED_FIELDS[name])
        elif name in DROPPED_FIELDS:
            if value:
                raise UnsupportedError(f"{name}={value!r} is not supported: {DROPPED_FIELDS[name]}.")
            logger.warning("%s=%r has no effect: %s.", name, value, DROPPED_FIELDS[name])
        elif name not in COMPOUND_FIELDS:
            hint = did_you_mean(name, defaults) or " docs/config.md lists every field."
            raise ConfigError(f"GRPOConfig has no field {name!r}.{hint}")
    # Last, as they are compared with what the fields say.
    for name in COMPOUND_FIELDS:
        if keywords.get(name) is not None:
            translate_compound(name, keywords[name], translated, defaults)
    return translated


def _rename(old: str, value: Any, translated: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    new = RENAMED_FIELDS[old]
    if value is not None and value != defaults[new]:
        _refuse_untreated(new, value, defaults[new], label=f"{old} (now {new})")
    if old == "warmup_ratio" and isinstance(value, numbers.Real) and not 0 <= float(value) < 1:
        raise ConfigError(
            f"warmup_ratio={value!r}: a share of all optimizer steps is at least 0 and below 1. For a number of steps, "
            "set warmup_steps."
        )
    if value is not None:
        current = translated.get(new, defaults[new])
        if current not in (defaults[new], value):
            raise ConfigError(f"{old}={value!r} and {new}={current!r} are one setting: keep {new} and remove {old}.")
        translated[new] = value
    logger.warning("%s is now called %s: %s=%r.", old, new, new, translated.get(new, defaults[new]))


# ---- fields that nothing here would read -----------------------------------------------------------------------------


def check_unsupported_fields(config: GRPOConfig) -> None:
    """Fields that are refused, or without effect, may only have their default."""
    for name, default in defaults_of(type(config)).items():
        value = getattr(config, name)
        if value != default:
            _refuse_untreated(name, value, default, label=name)


def _refuse_untreated(name: str, value: Any, default: Any, label: str) -> None:
    # A newer transformers may have fields that the table does not know: they are the base class's business.
    row = FIELD_ROWS.get(name)
    if row is None or row.treatment is Treatment.HONOURED:
        return
    way_out = f"Leave it at its default, {default!r}."
    if row.treatment is Treatment.REFUSED:
        raise UnsupportedError(f"{label}={value!r} is not supported: {row.phrase}. {way_out}")
    raise ConfigError(f"{label}={value!r} has no effect: {row.phrase}. {way_out}")


_LAUNCHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher() -> None:
    """`accelerate launch` chooses engines through the environment, past the fields that are refused."""
    for variable, engine in _LAUNCHER_ENGINES.items():
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise UnsupportedError(
                f"accelerate launch asks for {engine} ({variable} is set), which is not part of this version. Launch "
                "with a plain multi-GPU or multi-CPU configuration (DDP)."
            )


# ---- options without effect under the others -------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldCondition:
    """Fields that are read only under a condition on other fields."""

    fields: tuple[str, ...]
    is_read: Callable[[GRPOConfig], bool]
    depends_on: tuple[str, ...]
    """Fields that the condition reads, for the message."""
    when: str
    """The condition in words, after "it is read only"."""


def _loss_reads(name: str) -> Callable[[GRPOConfig], bool]:
    return lambda config: name in LOSSES[config.loss_type].reads


def field_conditions() -> Iterator[FieldCondition]:
    """The conditions of the losses, from their registry, followed by `CONDITIONS`."""
    for name in sorted(frozenset().union(*(spec.reads for spec in LOSSES.values()))):
        when = f"with loss_type {', '.join(map(repr, losses_reading(name)))}"
        yield FieldCondition((name,), _loss_reads(name), ("loss_type",), when)
    yield from CONDITIONS


CONDITIONS: tuple[FieldCondition, ...] = (
    FieldCondition(
        ("scale_rewards",),
        lambda config: config.multi_objective_aggregation == "sum_then_normalize",
        ("multi_objective_aggregation",),
        "with 'sum_then_normalize'; the other one always scales each reward by its group and the sum by the batch",
    ),
    FieldCondition(
        ("use_bias_correction_kl", "kl_on_dead_groups", "sync_ref_model", "reference_policy"),
        lambda config: config.beta != 0,
        ("beta",),
        "with beta above 0",
    ),
    FieldCondition(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        lambda config: config.sync_ref_model,
        ("sync_ref_model",),
        "with sync_ref_model=True",
    ),
    FieldCondition(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        lambda config: config.use_adaptive_entropy,
        ("use_adaptive_entropy",),
        "with use_adaptive_entropy=True",
    ),
    FieldCondition(
        ("dynamic_sampling_max_rounds",),
        lambda config: config.dynamic_sampling,
        ("dynamic_sampling",),
        "with dynamic_sampling=True",
    ),
    FieldCondition(
        ("curriculum_threshold", "curriculum_window", "curriculum_success_reward"),
        lambda config: config.curriculum_column is not None,
        ("curriculum_column",),
        "with a curriculum_column",
    ),
    FieldCondition(
        ("shuffle_dataset",),
        lambda config: config.curriculum_column is None,
        ("curriculum_column",),
        "without a curriculum, whose unlocked prompts are always drawn in a random order",
    ),
    FieldCondition(
        ("overlong_prompts",),
        lambda config: config.max_prompt_length is not None,
        ("max_prompt_length",),
        "with a max_prompt_length",
    ),
    FieldCondition(
        ("num_completions_to_print", "log_unique_prompts"),
        lambda config: config.log_completions,
        ("log_completions",),
        "with log_completions=True",
    ),
    FieldCondition(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        lambda config: config.gradient_checkpointing is not False and config.activation_checkpointing is not False,
        ("gradient_checkpointing",),
        "with gradient checkpointing",
    ),
)


def check_unused_fields(config: GRPOConfig) -> None:
    """A field that nothing would read must have its default."""
    defaults = defaults_of(type(config))
    for condition in field_conditions():
        if condition.is_read(config):
            continue
        given = " and ".join(f"{name}={getattr(config, name)!r}" for name in condition.depends_on)
        for name in condition.fields:
            value = getattr(config, name)
            if value != defaults[name]:
                raise ConfigError(
                    f"{name}={value!r} has no effect with {given}: it is read only {condition.when}. Leave it at its "
                    f"default, {defaults[name]!r}, or change what it depends on."
                )


# ---- pairs -----------------------------------------------------------------------------------------------------------


def check_conflicts(config: GRPOConfig) -> None:
    """Settings that contradict each other."""
    _check_order(config, "entropy_coef_min", "entropy_coef_max")
    _check_order(config, "logprob_gap_warn", "logprob_gap_stop")
    loss, level = LOSSES[config.loss_type], config.importance_sampling_level
    if loss.level not in (None, level) and "importance_sampling_level" in config.explicit_fields:
        raise ConfigError(
            f"loss_type={config.loss_type!r} is {loss.note} and always has importance_sampling_level={loss.level!r}, "
            f"but importance_sampling_level={level!r} was set. Remove it, or choose another loss_type."
        )
    if config.scoring_dropout and config.disable_dropout:
        raise ConfigError("scoring_dropout=True and disable_dropout=True contradict each other: set one of them.")
    if config.sync_ref_model and config.reference_policy != "start":
        raise ConfigError(
            f"sync_ref_model=True moves the reference towards the policy, and "
            f"reference_policy={config.reference_policy!r} keeps it where it is. Leave one of them out."
        )
    if config.output_dir is not None and not str(config.output_dir).strip():
        raise ConfigError(
            f"output_dir={config.output_dir!r} would scatter the files of the run over the working directory. Name a "
            "folder, or '.' if that is meant."
        )
    if config.max_steps != -1 and config.max_steps < 1:
        raise ConfigError(f"max_steps={config.max_steps}: must be at least 1, or -1 to count by num_train_epochs.")
    if config.warmup_steps >= 1 and config.warmup_steps != int(config.warmup_steps):
        raise ConfigError(f"warmup_steps={config.warmup_steps}: from 1 on it counts steps and must be a whole number.")
    if config.metric_for_best_model is None and config.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ConfigError(
            f"lr_scheduler_type={str(config.lr_scheduler_type)!r} watches metric_for_best_model, and the loss of GRPO "
            "says nothing about progress. Set metric_for_best_model='reward' and lr_scheduler_kwargs={'mode': 'max'}."
        )


_HAVE_NO_PACKAGE_CHECK = ("azure_ml", "flyte")


def check_trackers(names: Collection[str]) -> None:
    """The base class would fail when it makes the callback, after the model was loaded."""
    available = get_available_reporting_integrations()
    for name in names:
        check_choice("report_to", name, tuple(INTEGRATION_TO_CALLBACK))
        if name not in (*available, *_HAVE_NO_PACKAGE_CHECK):
            raise ConfigError(
                f"report_to={name!r} needs a package that is not installed. Install it (pip install {name}), or set "
                f"report_to to {' or '.join(map(repr, (*available, 'none')))}; metrics.jsonl has every metric anyway."
            )


def check_trained_subset(config: GRPOConfig, plan: StepPlan) -> None:
    """The completions that are trained on are chosen per group, and each optimizer step must have its share of them."""
    trained, group = config.num_generations_trained, config.num_generations
    if trained is None:
        return
    if trained >= group:
        raise ConfigError(
            f"num_generations_trained={trained} leaves nothing out of the num_generations={group} completions of a "
            f"prompt. Set it below {group}, or leave it unset to train on all of them."
        )
    if plan.completions_per_step % group:
        raise ConfigError(
            f"num_generations_trained={trained} chooses among the {group} completions of a prompt, and an optimizer "
            f"step of {plan.completions_per_step} completions takes a part of a group, which may hold any number of "
            f"the chosen ones. Make the step a multiple of {group} completions (per_device_train_batch_size x "
            "gradient_accumulation_steps x processes), or leave num_generations_trained unset."
        )


def _check_order(config: GRPOConfig, low: str, high: str) -> None:
    if getattr(config, low) > getattr(config, high):
        raise ConfigError(f"{low}={getattr(config, low)} is above {high}={getattr(config, high)}.")


def check_reward_weights(weights: Any) -> None:
    if weights is None:
        return
    is_list = isinstance(weights, list | tuple)
    for weight in weights if is_list else ():
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(float(weight)):
            raise ConfigError(f"reward_weights={weights!r}: {weight!r} is not a finite number.")
    if not is_list:
        raise ConfigError(f"reward_weights={weights!r}: expected a list with one number per reward function.")


def check_accelerator_config(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """The keys about loaders and accumulation would change nothing: the loader yields step numbers."""
    for name, value in values.items():
        if name != "use_configured_state" and value != defaults[name]:
            raise ConfigError(
                f"accelerator_config: {name}={value!r} has no effect: {FIELD_ROWS['dataloader_drop_last'].phrase}. "
                f"Leave it at its default, {defaults[name]!r}."
            )


# ---- advice ----------------------------------------------------------------------------------------------------------


def warn_unusual(config: GRPOConfig) -> None:
    """Warns about combinations that work but are rarely intended."""
    level = config.importance_sampling_level
    caution = LOSSES[config.loss_type].cautions.get(level)
    if caution is not None:
        logger.warning("loss_type=%r with importance_sampling_level=%r: %s.", config.loss_type, level, caution)


# ---- generation_kwargs -----------------------------------------------------------------------------------------------

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GENERATION_KEYS = (*SAMPLING_FIELDS, "stop_token_ids", "stop")

_INSTEAD = {
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), "set max_completion_length; the loss reads it too"),
    "eos_token_id": "the model's own end tokens always end a completion; stop_token_ids adds others",
    "stop_strings": "set stop",
    "seed": "set seed, from which every completion gets its own",
    "n": "set num_generations",
    "num_return_sequences": "set num_generations",
    "do_sample": "training always samples",
}


def merged_sampling(config: GRPOConfig) -> dict[str, Any]:
    """The sampling fields with generation_kwargs on top. Unknown keys and contradictions: ConfigError."""
    sampling = {name: getattr(config, name) for name in SAMPLING_FIELDS}
    defaults = defaults_of(type(config))
    given = config.generation_kwargs or {}
    if not isinstance(given, dict):
        raise ConfigError(f"generation_kwargs={given!r}: expected a dict with keys among {', '.join(GENERATION_KEYS)}.")
    for name, value in given.items():
        if name == "stop_token_ids":
            sampling[name] = tuple(value) if isinstance(value, list | tuple | set) else (value,)
        elif name == "stop":
            stop_texts(config)
        elif name in SAMPLING_FIELDS:
            if sampling[name] not in (defaults[name], value):
                raise ConfigError(
                    f"{name}={sampling[name]!r} and generation_kwargs[{name!r}]={value!r} contradict each other: set "
                    "one of them."
                )
            sampling[name] = value
        else:
            instead = _INSTEAD.get(name)
            hint = f" Instead, {instead}." if instead else did_you_mean(name, GENERATION_KEYS)
            raise ConfigError(f"generation_kwargs has no key {name!r} ({', '.join(GENERATION_KEYS)}).{hint}")
    return sampling


def stop_texts(config: GRPOConfig) -> tuple[str, ...]:
    """generation_kwargs["stop"]: one text or several."""
    given = config.generation_kwargs or {}
    value = given.get("stop") if isinstance(given, dict) else None
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"generation_kwargs['stop']={value!r}: expected a text, or a list of texts.")
    return texts
