"""What a reward declares in `value_range`: the (lowest, highest) score it can give, -inf or inf where unbounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

from grupo.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def score_range(reward: str, **scores: float) -> tuple[float, float]:
    """(lowest, highest) of the scores that a reward pays.

    Raises:
        ConfigError: one of them is not a finite number.
    """
    for name, score in scores.items():
        if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
            raise ConfigError(f"{reward}({name}={score!r}) is no score: give a finite number.")
    return float(min(scores.values())), float(max(scores.values()))


def with_range(lowest: float, highest: float) -> Callable[[_Function], _Function]:
    """A decorator that says the range of a reward that is a plain function."""

    def say(function: _Function) -> _Function:
        vars(function)["value_range"] = (lowest, highest)
        return function

    return say
