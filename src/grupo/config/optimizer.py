"""Checks of optimizer and schedule arguments: both are created for a single parameter before any model is loaded.

The base class would create them only when training starts, after the first evaluation. Only transformers and torch know
which arguments an optimizer or a schedule accepts, so the checks call them instead of listing arguments here.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from typing import Any

import torch
from transformers import SchedulerType, Trainer, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from grupo.config.fields import GRPOFields
from grupo.errors import ConfigError

_ARGUMENT_ERRORS = (TypeError, ValueError, KeyError, ArithmeticError, AttributeError, ImportError)
"""Exceptions of transformers and torch for unusable arguments and for missing packages."""

_MODEL_OPTIMIZERS = {"galore": "galore_torch", "apollo": "apollo_torch"}
"""Prefix of optimizer names that search the model for `optim_target_modules` -> the package that they need."""

_METRIC_DRIVEN = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)

_SET_BY_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


def check_schedule(config: GRPOFields) -> None:
    """Raises ConfigError where `lr_scheduler_kwargs` does not fit `lr_scheduler_type`."""
    kind = SchedulerType(config.lr_scheduler_type)
    arguments: dict[str, Any] = config.lr_scheduler_kwargs or {}  # type: ignore[assignment]  # text was parsed
    what = f"lr_scheduler_kwargs={arguments!r}" if arguments else "Without lr_scheduler_kwargs,"
    if arguments and kind in (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP):
        raise ConfigError(f"{what} has no effect: lr_scheduler_type={kind.value!r} has no arguments. Leave it out.")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    try:
        schedule = get_scheduler(
            kind,
            optimizer,
            num_warmup_steps=0,
            num_training_steps=config.max_steps if config.max_steps > 0 else 1000,
            scheduler_specific_kwargs=dict(arguments),
        )
        if kind not in _METRIC_DRIVEN:
            for _ in range(2):  # arguments are read only when the rate is computed
                optimizer.step()
                schedule.step()
    except _ARGUMENT_ERRORS as error:
        factory: Any = TYPE_TO_SCHEDULER_FUNCTION[kind]
        accepted = [
            name
            for name, parameter in inspect.signature(factory).parameters.items()
            if name not in _SET_BY_TRAINER and parameter.kind is not parameter.VAR_KEYWORD
        ]
        accepts = f" It accepts {', '.join(accepted)}." if accepted else ""
        raise ConfigError(
            f"{what} lr_scheduler_type={kind.value!r} cannot be created: {_first_line(error)}.{accepts}"
        ) from error


def check_optimizer_arguments(config: GRPOFields, model: Any = None) -> None:
    """Raises ConfigError where `optim` cannot be created with its arguments, or would not read them.

    Args:
        model: needed by optimizers that search it for modules; without one their arguments are not checked.
    """
    name = str(getattr(config.optim, "value", config.optim))
    package = _MODEL_OPTIMIZERS.get(name.partition("_")[0])
    needs_model = package is not None
    if config.optim_target_modules is not None and not needs_model:
        raise ConfigError(
            f"optim_target_modules={config.optim_target_modules!r} has no effect with optim={name!r}: it is read "
            "only by GaLore and APOLLO. Leave it out."
        )
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(f"optim={name!r} needs the package {package}, which is not installed.")
    if needs_model and config.optim_target_modules is None:
        raise ConfigError(f"optim={name!r} needs optim_target_modules, for example 'all-linear'.")
    if needs_model and model is None:
        return
    pairs = _pairs(config.optim_args)
    try:
        optimizer_class: Any
        optimizer_class, arguments = Trainer.get_optimizer_cls_and_kwargs(config, model)
        if not needs_model and inspect.isclass(optimizer_class):
            optimizer_class([torch.nn.Parameter(torch.zeros(1))], **arguments)  # type: ignore[call-arg]
    except _ARGUMENT_ERRORS as error:
        suffix = f" with optim_args={config.optim_args!r}" if pairs else ""
        raise ConfigError(f"optim={name!r} cannot be created{suffix}: {_first_line(error)}.") from error
    for key in pairs:
        if not _is_read(key, pairs, config, model):
            raise ConfigError(
                f"optim_args={config.optim_args!r}: optim={name!r} does not read {key!r}, so it would have no effect. "
                "Leave it out; learning_rate, weight_decay and the adam_ settings are separate fields."
            )


def _pairs(text: str | None) -> dict[str, str]:
    """Keys and values of `optim_args`, as transformers parses them."""
    parts = (text or "").replace(" ", "")
    pairs = [part.split("=") for part in parts.split(",")] if parts else []
    if any(len(pair) != 2 or not pair[0] for pair in pairs):
        raise ConfigError(f"optim_args={text!r}: expected key=value pairs separated by commas, such as 'a=1,b=2'.")
    return {pair[0]: pair[1] for pair in pairs}


def _is_read(key: str, pairs: dict[str, str], config: GRPOFields, model: Any) -> bool:
    """Whether a meaningless value of the key changes the optimizer."""

    def created_with(pairs: dict[str, str]) -> Any:
        changed = copy.copy(config)
        changed.optim_args = ",".join(f"{name}={value}" for name, value in pairs.items())
        arguments = Trainer.get_optimizer_cls_and_kwargs(changed, model)[1]
        groups = arguments.pop("params", [])
        return arguments, [{name: value for name, value in group.items() if name != "params"} for group in groups]

    try:
        return bool(
            created_with({**pairs, key: "no-value"})
            != created_with({name: pairs[name] for name in pairs if name != key})
        )
    except _ARGUMENT_ERRORS:
        return True


def _first_line(error: Exception) -> str:
    """First line of an error message of transformers or torch, without a full stop."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{line} is missing" if isinstance(error, KeyError) else line
