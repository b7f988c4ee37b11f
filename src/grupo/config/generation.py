"""Sampling settings of training: the sampling fields of GRPOConfig combined with `generation_kwargs`."""

from __future__ import annotations

from typing import Any

from grupo.config.fields import GRPOFields
from grupo.errors import ConfigError
from grupo.sampling import SAMPLING_FIELDS
from grupo.utils.messages import did_you_mean

GENERATION_KEYS = (*SAMPLING_FIELDS, "stop_token_ids", "stop")

_ALTERNATIVES = {
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), "set max_completion_length; the loss uses it too"),
    "eos_token_id": "set stop_token_ids; they are added to the end-of-sequence tokens of the model",
    "stop_strings": "set stop",
    "seed": "set seed, from which the seed of every completion is derived",
    "n": "set num_generations",
    "num_return_sequences": "set num_generations",
    "do_sample": "leave it out; training always samples",
}


def sampling_settings(config: GRPOFields) -> dict[str, Any]:
    """The sampling fields, updated by `generation_kwargs`; arguments of SamplingSpec.

    Raises ConfigError for unknown keys and for values that contradict a field.
    """
    settings = {name: getattr(config, name) for name in SAMPLING_FIELDS}
    given = config.generation_kwargs or {}
    if not isinstance(given, dict):
        raise ConfigError(f"generation_kwargs={given!r}: expected a dict with keys from {', '.join(GENERATION_KEYS)}.")
    for name, value in given.items():
        if name == "stop_token_ids":
            settings[name] = tuple(value) if isinstance(value, list | tuple | set) else (value,)
        elif name == "stop":
            stop_strings(config)
        elif name in SAMPLING_FIELDS:
            if settings[name] not in (getattr(type(config), name), value):
                raise ConfigError(
                    f"{name}={settings[name]!r} and generation_kwargs[{name!r}]={value!r} contradict each other: set "
                    "only one of them."
                )
            settings[name] = value
        else:
            alternative = _ALTERNATIVES.get(name)
            hint = f" Instead, {alternative}." if alternative else did_you_mean(name, GENERATION_KEYS)
            raise ConfigError(
                f"generation_kwargs: {name!r} is not one of its keys ({', '.join(GENERATION_KEYS)}).{hint}"
            )
    return settings


def stop_strings(config: GRPOFields) -> tuple[str, ...]:
    """`generation_kwargs["stop"]`, one string or several, as a tuple."""
    given = config.generation_kwargs or {}
    value = given.get("stop") if isinstance(given, dict) else None
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"generation_kwargs['stop']={value!r}: expected a string or a list of strings.")
    return strings
