"""Allowed values of single fields of GRPOConfig: choices, types and ranges.

The checks take the fields as a mapping, name -> value, and raise ConfigError.
"""

from __future__ import annotations

import math
import numbers
import os
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import SchedulerType
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from grupo.algo.registry import LOSSES
from grupo.errors import ConfigError
from grupo.utils.messages import did_you_mean

CHOICES: dict[str, Collection[str]] = {
    "loss_type": LOSSES.keys(),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "overlong_prompts": ("filter", "refuse", "truncate_left"),
    "reference_policy": ("start", "base"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "optim": tuple(name.value for name in OptimizerNames),
    "lr_scheduler_type": tuple(name.value for name in SchedulerType),
    "eval_strategy": tuple(name.value for name in IntervalStrategy),
    "logging_strategy": tuple(name.value for name in IntervalStrategy),
    "save_strategy": tuple(name.value for name in SaveStrategy),
    "hub_strategy": tuple(name.value for name in HubStrategy),
}

_MAX_LISTED = 12

_TYPE_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None"}


def check_choices(fields: Mapping[str, Any]) -> None:
    for name, options in CHOICES.items():
        check_choice(name, fields[name], options)


def check_choice(name: str, value: Any, options: Collection[str]) -> None:
    if isinstance(value, str) and value in options:
        return
    hint = did_you_mean(value, options)
    if hint and len(options) > _MAX_LISTED:
        raise ConfigError(f"{name}={value!r} is not an option of transformers.{hint}")
    raise ConfigError(f"{name}={value!r} is not one of {_listed(options)}.{hint}")


def _listed(options: Collection[str]) -> str:
    return ", ".join(repr(option) for option in options)


def simple_field_types(config_class: type[Any]) -> dict[str, tuple[type, ...]]:
    """Field name -> alternative types, for fields of bool, int, float, str and None only."""
    simple: dict[str, tuple[type, ...]] = {}
    for name, hint in typing.get_type_hints(config_class).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        alternatives = typing.get_args(hint) if is_union else (hint,)
        if all(alternative in _TYPE_WORDS for alternative in alternatives):
            simple[name] = alternatives
    # For the user's own script, where True is as common as a path.
    del simple["resume_from_checkpoint"]
    return simple


def check_types(fields: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    """Refuses text in place of flags and numbers, and NaN."""
    for name, allowed in types.items():
        value = fields[name]
        if any(_has_type(value, one) for one in allowed):
            continue
        words = " or ".join(_TYPE_WORDS[one] for one in allowed)
        raise ConfigError(f"{name}={value!r}: expected {words}.{_type_hint(value)}")


def _has_type(value: Any, wanted: type) -> bool:
    if wanted is bool or isinstance(value, bool):
        return wanted is bool and isinstance(value, bool)
    if wanted is int:
        return isinstance(value, numbers.Integral)
    if wanted is float:
        return isinstance(value, numbers.Real) and not math.isnan(float(value))
    if wanted is str:
        return isinstance(value, str | os.PathLike)
    return value is None


def _type_hint(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    if value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return " Any text counts as true; write true or false without quotes."
    return " Write it without quotes."


@dataclass(frozen=True)
class Range:
    """Allowed range of a number."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    may_be_infinite: bool = False
    why: str = ""

    def contains(self, value: float) -> bool:
        return (
            (math.isfinite(value) or (self.may_be_infinite and value > 0))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        text = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        return text + (f" ({self.why})" if self.why else "")


_POSITIVE = Range(above=0)
_NOT_NEGATIVE = Range(at_least=0)
_COUNT = Range(at_least=1)
_MOMENT = Range(at_least=0, below=1)

RANGES: dict[str, Range] = {
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "num_train_epochs": _POSITIVE,
    "seed": Range(at_least=0, at_most=2**32 - 1, why="the range of numpy and torch"),
    "learning_rate": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _MOMENT,
    "adam_beta2": _MOMENT,
    "adam_epsilon": _POSITIVE,
    "max_grad_norm": Range(at_least=0, may_be_infinite=True, why="0 turns clipping off"),
    "num_generations": Range(at_least=2, why="advantages compare the completions of one prompt"),
    "num_generations_eval": _COUNT,
    "max_completion_length": _COUNT,
    "max_prompt_length": _COUNT,
    "micro_batch_tokens": _COUNT,
    "generation_batch_size": _COUNT,
    "steps_per_generation": _COUNT,
    "num_iterations": _COUNT,
    "temperature": Range(above=0, why="0 is greedy: all completions of a group would be the same"),
    "beta": Range(at_least=0, why="a negative coefficient would push the policy away from the reference"),
    "epsilon": _NOT_NEGATIVE,
    "epsilon_high": _NOT_NEGATIVE,
    "delta": Range(above=1, why="it bounds the ratio, which is 1 before the first update"),
    "sapo_temperature_neg": _POSITIVE,
    "sapo_temperature_pos": _POSITIVE,
    "vespo_k_pos": _NOT_NEGATIVE,
    "vespo_lambda_pos": _NOT_NEGATIVE,
    "vespo_k_neg": _NOT_NEGATIVE,
    "vespo_lambda_neg": _NOT_NEGATIVE,
    "ref_model_mixup_alpha": Range(above=0, at_most=1),
    "ref_model_sync_steps": _COUNT,
    "top_entropy_quantile": Range(at_least=0, at_most=1),
    "entropy_coef_delta": _POSITIVE,
    "entropy_target": _NOT_NEGATIVE,
    "off_policy_mask_threshold": _POSITIVE,
    "num_completions_to_print": _COUNT,
    "max_failed_reward_share": Range(at_least=0, at_most=1),
    "reward_timeout": Range(above=0, why="seconds"),
    "max_nonfinite_steps": _COUNT,
    "logprob_gap_warn": Range(above=0, may_be_infinite=True, why="nats"),
    "logprob_gap_stop": Range(above=0, may_be_infinite=True, why="nats"),
    "dynamic_sampling_max_rounds": _COUNT,
    "num_generations_trained": Range(at_least=2, why="a single completion has no reward difference"),
    "curriculum_threshold": Range(above=0, at_most=1, why="a share of completions"),
    "curriculum_window": _COUNT,
}
"""None is allowed where the field's type allows it. SamplingSpec checks top_p, top_k, min_p and repetition_penalty."""


def check_ranges(fields: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    for name, alternatives in types.items():
        value, allowed = fields[name], RANGES.get(name)
        if value is None:
            continue
        if allowed is not None and not allowed.contains(value):
            raise ConfigError(f"{name}={value!r}: must be {allowed}.")
        if allowed is None and float in alternatives and not math.isfinite(value):
            raise ConfigError(f"{name}={value!r}: must be a finite number.")
