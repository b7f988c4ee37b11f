"""The settings that a resumed run shares with the interrupted one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from grupo.config import GRPOConfig
from grupo.config.batch_plan import StepPlan
from grupo.runs.resume_check import IGNORED, METRIC_DRIVEN
from grupo.sampling import SAMPLING_FIELDS

METRIC_DRIVEN_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Learning rates that follow what evaluations find."""
HORIZON_FREE_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", *METRIC_DRIVEN_SCHEDULES)
"""Learning rates that do not depend on how many steps the run will have."""


def resume_fingerprint(config: GRPOConfig, plan: StepPlan) -> dict[str, Any]:
    """Name -> plain value of the settings that a resumed run shares with the interrupted one."""
    fields = (field.name for field in dataclasses.fields(config) if field.name not in IGNORED)
    sampling = config.sampling_spec()
    settings = {
        **{name: _plain_value(getattr(config, name)) for name in fields},
        **{name: getattr(sampling, name) for name in SAMPLING_FIELDS},
        "stop": [*config.stop_strings, *sampling.stop_token_ids],
        "data_seed": config.resolved_data_seed,
        "reward_weights": config.reward_weights,
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "steps_per_generation": plan.steps_per_generation,
    }
    if settings["lr_scheduler_type"] in METRIC_DRIVEN_SCHEDULES:
        settings |= {name: _plain_value(getattr(config, name)) for name in METRIC_DRIVEN}
    is_horizon_free = settings["lr_scheduler_type"] in HORIZON_FREE_SCHEDULES and not 0 < config.warmup_steps < 1
    return (
        settings
        if is_horizon_free
        else {**settings, "steps": plan.total_steps(config.num_train_epochs, config.max_steps)}
    )


def _plain_value(value: Any) -> Any:
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
