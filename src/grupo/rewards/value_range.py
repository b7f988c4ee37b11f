"""The attribute `value_range` of a reward: its (lowest, highest) score, -inf or inf where unbounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

from grupo.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def checked_range(reward: str, **scores: float) -> tuple[float, float]:
    """(lowest, highest) of the scores that a reward can return.

    Raises:
        ConfigError: a score is not a finite number.
    """
    for name, score in scores.items():
        if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
            raise ConfigError(f"{reward}({name}={score!r}) is not a score: give a finite number.")
    return float(min(scores.values())), float(max(scores.values()))


def declare_range(lowest: float, highest: float) -> Callable[[_Function], _Function]:
    """Decorator that declares the range of a reward that is a plain function."""

    def decorate(function: _Function) -> _Function:
        vars(function)["value_range"] = (lowest, highest)
        return function

    return decorate
