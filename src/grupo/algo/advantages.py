"""Rewards of a group to advantages.

Legend: B completions in any order, K reward functions, N groups. NaN in `scores` is an abstention (None from the reward
function). All arithmetic is float64: a difference of two rewards decides the sign of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL_REWARDS_TOLERANCE = 4 * torch.finfo(torch.float32).eps
"""Rewards of a group whose spread is within this share of their size are equal. Reward functions compute in float32 or
add up several terms; the 1e-7 that this leaves is no preference, and divided by its own standard deviation it would
become one (NVIDIA-NeMo/RL #4158)."""


@dataclass(frozen=True)
class Advantages:
    """What `compute_advantages` found, row by row. Numbers are float64."""

    advantages: Tensor
    """(B,) exactly 0 for rows without a known reward and for groups of equal rewards."""
    rewards: Tensor
    """(B,) weighted totals as the reward functions gave them; NaN where the total is unknown."""
    scored: Tensor
    """(B,) bool, the total is known: no reward failed and at least one did not abstain."""
    live: Tensor
    """(B,) bool, the row's group has at least one non-zero advantage."""
    group_mean: Tensor
    """(B,) mean of `rewards` over the row's group; NaN where the group has no scored row."""
    group_std: Tensor
    """(B,) standard deviation of `rewards` over the row's group, with Bessel's correction; 0 where all are equal, NaN
    where fewer than two rows are scored."""


def compute_advantages(
    scores: Tensor,
    group_ids: Sequence[int] | Tensor,
    *,
    weights: Sequence[float] | None = None,
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
    failed: Tensor | None = None,
    epsilon: float = 1e-4,
) -> Advantages:
    """Advantages of completions over the others of their group.

    Groups are the rows with one id, of any size and in any order. A row alone in its group, or alone with a known
    reward, has nothing to be better than: its advantage is 0.

    Args:
        scores: (B, K) of the reward functions, NaN where one abstained.
        group_ids: (B,) id of each row's prompt.
        weights: (K,) of the reward functions; None: 1 each.
        scale: what a difference of rewards is divided by. "group": standard deviation of the group (GRPO, arXiv
            2402.03300); "batch": of all scored rows of this call (arXiv 2508.08221); "none": nothing (Dr. GRPO, arXiv
            2503.20783).
        aggregation: "sum_then_normalize": add up the weighted scores, then compare. "normalize_then_sum": compare each
            reward function for itself, then add up and bring the result to the scale of the batch (GDPO, arXiv
            2601.05242); `scale` has no effect then.
        failed: (B,) bool, rows on which a reward function failed. Their total is unknown and enters no statistic.
        epsilon: added to every standard deviation; TRL's value is 1e-4.

    Raises ValueError for unknown option names, shapes that do not fit and infinite scores.
    """
    scores = scores.detach().to(torch.float64)
    ids = torch.as_tensor(group_ids, device=scores.device)
    weighting = scores.new_ones(scores.shape[-1]) if weights is None else scores.new_tensor(weights)
    _check(scores, ids, weighting, scale, aggregation)
    if failed is not None:
        scores = scores.masked_fill(failed.to(scores.device).unsqueeze(1), torch.nan)

    groups = _Groups(ids)
    rewards, magnitude = _weighted_sum(scores, weighting)
    totals = _Totals(rewards, groups.statistics(rewards, magnitude))
    advantages = AGGREGATIONS[aggregation](totals, scores, weighting, groups, scale, epsilon)
    return Advantages(
        advantages=advantages,
        rewards=rewards,
        scored=~rewards.isnan(),
        live=groups.any(advantages != 0),
        group_mean=totals.group.mean,
        group_std=totals.group.std,
    )


@dataclass(frozen=True)
class _Statistics:
    """Of one value per row, over the known (not NaN) values of the row's group; all (B,)."""

    mean: Tensor
    std: Tensor
    """With Bessel's correction; 0 where all are equal, NaN below two known values."""
    all_equal: Tensor
    """bool, the known values of the group are equal up to rounding; a single one is, and so is none."""


@dataclass(frozen=True)
class _Totals:
    """The weighted totals of the rows, (B,), and their statistics by group."""

    rewards: Tensor
    group: _Statistics


class _Groups:
    """Which rows belong together."""

    def __init__(self, ids: Tensor) -> None:
        distinct, self._group_of_row = torch.unique(ids, return_inverse=True)
        self._count = distinct.numel()

    def statistics(self, values: Tensor, magnitude: Tensor) -> _Statistics:
        """`values` (B,), NaN where unknown; `magnitude` (B,) the size that their rounding errors are relative to."""
        known = ~values.isnan()

        def total(rows: Tensor) -> Tensor:
            return rows.new_zeros(self._count).index_add(0, self._group_of_row, rows.masked_fill(~known, 0.0))

        def largest(rows: Tensor) -> Tensor:
            start = rows.new_full((self._count,), -torch.inf)
            return start.scatter_reduce(0, self._group_of_row, rows.masked_fill(~known, -torch.inf), "amax")

        count = total(torch.ones_like(values))
        mean = total(values) / count
        # Two passes: the mean of squares minus the square of the mean can come out negative.
        variance = total((values - mean[self._group_of_row]) ** 2) / (count - 1)
        spread = largest(values) + largest(-values)
        all_equal = spread <= EQUAL_REWARDS_TOLERANCE * largest(magnitude)
        std = variance.sqrt().masked_fill(all_equal, 0.0).masked_fill(count < 2, torch.nan)
        return _Statistics(*(of_group[self._group_of_row] for of_group in (mean, std, all_equal)))

    def any(self, flags: Tensor) -> Tensor:
        """(B,) bool, some row of the row's group has its flag set."""
        hits = flags.new_zeros(self._count, dtype=torch.int64).index_add(0, self._group_of_row, flags.to(torch.int64))
        return (hits > 0)[self._group_of_row]


def _sum_then_normalize(
    totals: _Totals, scores: Tensor, weighting: Tensor, groups: _Groups, scale: str, epsilon: float
) -> Tensor:
    """(B,) the total reward's distance from its group's mean, over the spread that `scale` names."""
    spread = SCALES[scale](totals.rewards, totals.group, epsilon)
    return _signal((totals.rewards - totals.group.mean) / spread, totals.group)


def _normalize_then_sum(
    totals: _Totals, scores: Tensor, weighting: Tensor, groups: _Groups, scale: str, epsilon: float
) -> Tensor:
    """(B,) every reward function on its own scale within the group, added up, then on the scale of the batch."""
    columns = []
    for column in scores.unbind(dim=1):
        own = groups.statistics(column, column.abs())
        normalized = _signal((column - own.mean) / (own.std + epsilon), own)
        columns.append(normalized.masked_fill(column.isnan(), torch.nan))
    sums, magnitude = _weighted_sum(torch.stack(columns, dim=1), weighting)
    return _signal((sums - sums.nanmean()) / (_batch_std(sums) + epsilon), groups.statistics(sums, magnitude))


AGGREGATIONS: dict[str, Callable[[_Totals, Tensor, Tensor, _Groups, str, float], Tensor]] = {
    "sum_then_normalize": _sum_then_normalize,
    "normalize_then_sum": _normalize_then_sum,
}

SCALES: dict[str, Callable[[Tensor, _Statistics, float], Tensor]] = {
    "group": lambda rewards, group, epsilon: group.std + epsilon,
    "batch": lambda rewards, group, epsilon: _batch_std(rewards) + epsilon,
    "none": lambda rewards, group, epsilon: torch.ones_like(rewards),
}


def _weighted_sum(scores: Tensor, weighting: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) sum over the known scores of (B, K), NaN where none is known, and (B,) the size of what was added up.

    The size is not that of the sum: 0.7 - 0.7 leaves a residue that is large beside the sum.
    """
    weighted = scores * weighting
    none_known = scores.isnan().all(dim=1)
    return weighted.nansum(dim=1).masked_fill(none_known, torch.nan), weighted.abs().nansum(dim=1)


def _batch_std(values: Tensor) -> Tensor:
    """() standard deviation of the known values with Bessel's correction; NaN below two of them."""
    known = values[~values.isnan()]
    return known.std() if known.numel() > 1 else values.new_tensor(torch.nan)


def _signal(advantages: Tensor, group: _Statistics) -> Tensor:
    """`advantages` (B,), exactly 0 where the group's values are all equal and where the row's own is unknown."""
    return advantages.masked_fill(group.all_equal | advantages.isnan(), 0.0)


def _check(scores: Tensor, ids: Tensor, weighting: Tensor, scale: str, aggregation: str) -> None:
    for name, value, known in (("scale", scale, SCALES), ("aggregation", aggregation, AGGREGATIONS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(sorted(known))}.")
    if scores.ndim != 2 or ids.shape != scores.shape[:1]:
        raise ValueError(
            f"scores must be (B, K) with one group id per row; got {tuple(scores.shape)} and {tuple(ids.shape)}."
        )
    if weighting.shape != scores.shape[1:]:
        raise ValueError(f"{scores.shape[1]} reward functions and {weighting.numel()} weights: give one weight each.")
    if scores.isinf().any():
        raise ValueError("A score is infinite. Pass the row as failed, or NaN for an abstention.")
