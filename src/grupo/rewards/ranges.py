"""What a reward declares in `value_range`: the (lowest, highest) score it can give, -inf or inf where unbounded."""

from __future__ import annotations

import math
from numbers import Real

from grupo.errors import ConfigError


def score_range(reward: str, **scores: float) -> tuple[float, float]:
    """(lowest, highest) of the scores that a reward pays.

    Raises:
        ConfigError: one of them is not a finite number.
    """
    for name, score in scores.items():
        if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
            raise ConfigError(f"{reward}({name}={score!r}) is no score: give a finite number.")
    return float(min(scores.values())), float(max(scores.values()))
