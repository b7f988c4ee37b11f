"""Reward functions by name, as recipes give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from grupo.errors import ConfigError
from grupo.names import nearest
from grupo.rewards.format import tag_format
from grupo.rewards.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_length,
)
from grupo.rewards.math import math_accuracy, number_match

REWARDS: Mapping[str, Callable[..., Callable[..., Any]]] = MappingProxyType(
    {
        "number_match": number_match,
        "math_accuracy": math_accuracy,
        "tag_format": tag_format,
        "token_length": token_length,
        "soft_overlong_punishment": get_soft_overlong_punishment,
        "cosine_scaled": get_cosine_scaled_reward,
        "repetition_penalty": get_repetition_penalty_reward,
    }
)
"""name -> factory."""


def make_reward(name: str, **arguments: Any) -> Callable[..., Any]:
    """The reward function of this name, made with `arguments`.

    Raises:
        ConfigError: an unknown name or argument, a missing argument, or a value that the factory refuses.
    """
    if name not in REWARDS:
        raise ConfigError(
            f"There is no reward named '{name}'.{nearest(name, REWARDS)} Known rewards: {', '.join(REWARDS)}."
        )
    factory = REWARDS[name]
    signature = inspect.signature(factory)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"Reward '{name}' cannot be made with ({', '.join(arguments) or 'no arguments'}): {error}. "
            f"It takes ({', '.join(str(parameter).split(':')[0] for parameter in signature.parameters.values())})."
        ) from None
    return factory(**arguments)
