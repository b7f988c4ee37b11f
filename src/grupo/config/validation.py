"""Checks of GRPOConfig beyond single values: unsupported fields, fields without effect, and contradictions.

They run before any model is loaded.
"""

from __future__ import annotations

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
from grupo.config.field_support import FIELD_ENTRIES, defaults_of, refuse_unsupported
from grupo.config.fields import GRPOFields
from grupo.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from grupo.config.batch_plan import StepPlan

logger = logging.getLogger("grupo")


def check_unsupported_fields(config: GRPOFields) -> None:
    """Fields that are not supported, or have no effect here, must have their default."""
    for name, default in defaults_of(type(config)).items():
        value = getattr(config, name)
        if value != default:
            refuse_unsupported(name, value, default)


_LAUNCHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher() -> None:
    """Refuses engines that `accelerate launch` selects through environment variables."""
    for variable, engine in _LAUNCHER_ENGINES.items():
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise UnsupportedError(
                f"accelerate launch selects {engine} ({variable} is set), which is not supported in this version. Use "
                "a plain multi-GPU or multi-CPU configuration (DDP)."
            )


@dataclass(frozen=True)
class FieldCondition:
    """Fields that are read only under a condition on other fields."""

    fields: tuple[str, ...]
    is_read: Callable[[GRPOFields], bool]
    depends_on: tuple[str, ...]
    """Fields that the condition reads, for the message."""
    when: str
    """The condition in words, after "it is read only"."""


def _loss_reads(name: str) -> Callable[[GRPOFields], bool]:
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
        "with 'sum_then_normalize'; the other method always normalizes each reward by group and the sum by batch",
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
        "without a curriculum, which always draws unlocked prompts in random order",
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


def check_unused_fields(config: GRPOFields) -> None:
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


def check_conflicts(config: GRPOFields, explicit_fields: Collection[str]) -> None:
    """Settings that contradict each other. `explicit_fields`: names of the fields that the user set."""
    _check_order(config, "entropy_coef_min", "entropy_coef_max")
    _check_order(config, "logprob_gap_warn", "logprob_gap_stop")
    loss, level = LOSSES[config.loss_type], config.importance_sampling_level
    if loss.level not in (None, level) and "importance_sampling_level" in explicit_fields:
        raise ConfigError(
            f"loss_type={config.loss_type!r} is {loss.note} and always has importance_sampling_level={loss.level!r}, "
            f"but importance_sampling_level={level!r} was set. Remove it, or choose another loss_type."
        )
    if config.logprob_dropout and config.disable_dropout:
        raise ConfigError("logprob_dropout=True and disable_dropout=True contradict each other: set only one of them.")
    if config.sync_ref_model and config.reference_policy != "start":
        raise ConfigError(
            "sync_ref_model=True moves the reference towards the policy, but "
            f"reference_policy={config.reference_policy!r} keeps it fixed. Leave one of them out."
        )
    if config.output_dir is not None and not str(config.output_dir).strip():
        raise ConfigError(
            f"output_dir={config.output_dir!r} would scatter the files of the run over the working directory. Set it "
            "to a folder, or to '.' if that is intended."
        )
    if config.max_steps != -1 and config.max_steps < 1:
        raise ConfigError(f"max_steps={config.max_steps}: must be at least 1, or -1 to use num_train_epochs.")
    if config.warmup_steps >= 1 and config.warmup_steps != int(config.warmup_steps):
        raise ConfigError(
            f"warmup_steps={config.warmup_steps}: values from 1 are a number of steps and must be whole numbers."
        )
    if config.metric_for_best_model is None and config.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ConfigError(
            f"lr_scheduler_type={str(config.lr_scheduler_type)!r} depends on metric_for_best_model, but GRPO's loss "
            "does not measure progress. Set metric_for_best_model='reward' and lr_scheduler_kwargs={'mode': 'max'}."
        )


_HAVE_NO_PACKAGE_CHECK = ("azure_ml", "flyte")


def check_trackers(names: Collection[str]) -> None:
    """Raises ConfigError here; the base class would fail only after the model was loaded."""
    available = get_available_reporting_integrations()
    for name in names:
        check_choice("report_to", name, tuple(INTEGRATION_TO_CALLBACK))
        if name not in (*available, *_HAVE_NO_PACKAGE_CHECK):
            raise ConfigError(
                f"report_to={name!r} needs a package that is not installed. Install it (pip install {name}), or set "
                f"report_to to {' or '.join(map(repr, (*available, 'none')))}; metrics.jsonl has all metrics anyway."
            )


def check_trained_subset(config: GRPOFields, plan: StepPlan) -> None:
    """`num_generations_trained` selects completions by group, so every optimizer step must have whole groups."""
    trained, group = config.num_generations_trained, config.num_generations
    if trained is None:
        return
    if trained >= group:
        raise ConfigError(
            f"num_generations_trained={trained} excludes none of the num_generations={group} completions per prompt. "
            f"Set it below {group}, or leave it unset to train on all of them."
        )
    if plan.completions_per_step % group:
        raise ConfigError(
            f"num_generations_trained={trained} selects from the {group} completions of a prompt, but an optimizer "
            f"step of {plan.completions_per_step} completions contains a partial group, with an unknown number of "
            f"selected ones. Make the step a multiple of {group} completions (per_device_train_batch_size x "
            "gradient_accumulation_steps x processes), or leave num_generations_trained unset."
        )


def _check_order(config: GRPOFields, low: str, high: str) -> None:
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
    """Keys about data loaders and accumulation have no effect: the loader yields step indices."""
    for name, value in values.items():
        if name != "use_configured_state" and value != defaults[name]:
            raise ConfigError(
                f"accelerator_config: {name}={value!r} has no effect: {FIELD_ENTRIES['dataloader_drop_last'].phrase}. "
                f"Leave it at its default, {defaults[name]!r}."
            )


def warn_unusual(config: GRPOFields) -> None:
    """Warns about combinations that work but are rarely intended."""
    level = config.importance_sampling_level
    caution = LOSSES[config.loss_type].cautions.get(level)
    if caution is not None:
        logger.warning("loss_type=%r with importance_sampling_level=%r: %s.", config.loss_type, level, caution)
