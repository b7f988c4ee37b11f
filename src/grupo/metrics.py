"""Metrics that stay correct under gradient accumulation, several ranks and unequal logging intervals.

Every value carries its weight (tokens, completions or steps). The log has the weighted mean, the minimum or the maximum
since the last log line. Nothing is averaged before it is weighted (huggingface/trl #7047, #6380).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

AllGather = Callable[[Any], list[Any]]

STEP_METRICS = frozenset(
    {
        *("loss", "policy_loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens"),
        *("entropy", "entropy_coef", "kl"),
        *("clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max"),
        *("clip_ratio/region_mean", "cispo_clip_ratio", "vespo/phi_seq_mean", "ratio/mean", "off_policy/kept_mean"),
        *(
            "effective_tokens",
            "computed_tokens",
            "padding_share",
            "nonfinite_step_share",
            "sampling/logprob_gap",
            "tokens_per_second",
        ),
        *("step_time", "time/generating", "time/rewarding", "time/logprobs", "time/updating"),
        *("dynamic_sampling/rounds", "dynamic_sampling/groups", "dynamic_sampling/kept_share"),
        *("dynamic_sampling/zero_variance_share", "curriculum/level", "curriculum/success_rate"),
    }
)
"""Metric names of a training step; those of rollouts, reward functions and the end of a run are not included."""


@dataclass
class MetricAccumulator:
    """Weighted sums and extremes over any number of micro-batches, steps and ranks."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Metric name -> (sum of value x weight, sum of weights)."""
    minima: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds `value`, a mean over `weight` tokens, completions or steps. Weight 0 adds nothing."""
        if weight:
            self.add_sum(name, value * weight, weight)

    def add_sum(self, name: str, numerator: float, denominator: float) -> None:
        old_numerator, old_denominator = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_numerator + numerator, old_denominator + denominator)

    def add_min(self, name: str, value: float) -> None:
        self.minima[name] = min(self.minima.get(name, math.inf), value)

    def add_max(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, -math.inf), value)

    def merge(self, other: MetricAccumulator) -> None:
        for name, (numerator, denominator) in other.sums.items():
            self.add_sum(name, numerator, denominator)
        for name, value in other.minima.items():
            self.add_min(name, value)
        for name, value in other.maxima.items():
            self.add_max(name, value)

    def means(self) -> dict[str, float]:
        """Values to log. A metric without any weight is absent, rather than 0 or NaN."""
        values = {name: numerator / weight for name, (numerator, weight) in self.sums.items() if weight}
        return {**values, **self.minima, **self.maxima}

    def clear(self) -> None:
        self.sums.clear()
        self.minima.clear()
        self.maxima.clear()


def merge_metrics(parts: Iterable[MetricAccumulator]) -> MetricAccumulator:
    total = MetricAccumulator()
    for part in parts:
        total.merge(part)
    return total
