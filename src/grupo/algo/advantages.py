"""Rewards of a group to advantages.

Legend: B completions in any order, K reward functions, N groups. NaN in `scores` is an abstention (None from the reward
function). All arithmetic is float64, because the difference of two rewards decides the sign of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL_REWARDS_TOLERANCE = 4 * torch.finfo(torch.float32).eps
"""Rewards of a group are equal where their range is at most this share of their size. Reward functions compute in
float32 or add up several terms; the remaining 1e-7 is not a preference, but divided by its own standard deviation it
would become one (NVIDIA-NeMo/RL #4158)."""


@dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages, and which completions are in the loss. The names are those of `GRPOConfig`."""

    reward_weights: Sequence[float] | None = None
    """One weight per reward function; None: 1 each."""
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False
    max_failed_reward_share: float = 1.0
    """Share of a rollout, in [0, 1], whose reward functions may fail; above it the rollout is refused."""
    num_generations_trained: int | None = None
    """Completions of a group in the loss, those whose advantages vary most; None: all."""


@dataclass(frozen=True)
class Advantages:
    """Result of `compute_advantages` for each completion, in float64."""

    advantages: Tensor
    """(B,) exactly 0 for completions without a known reward and for groups of equal rewards."""
    rewards: Tensor
    """(B,) weighted total rewards; NaN where the total is unknown."""
    scored: Tensor
    """(B,) bool, True where the total is known: no reward function failed and at least one did not abstain."""
    has_signal: Tensor
    """(B,) bool, True where the group has at least one non-zero advantage."""
    group_mean: Tensor
    """(B,) mean of `rewards` over the group; NaN where no reward of the group is known."""
    group_std: Tensor
    """(B,) standard deviation of `rewards` over the group, with Bessel's correction; 0 where all are equal, NaN where
    fewer than two are known."""


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
    """Advantages of completions relative to their group.

    A group is all completions with one id; groups have any size and their completions any order. A completion alone in
    its group, or the only one with a known reward, has nothing to compare with: its advantage is 0.

    Args:
        scores: (B, K) values of the reward functions, NaN where one abstained.
        group_ids: (B,) id of each completion's prompt.
        weights: (K,) weights of the reward functions; None: 1 each.
        scale: divisor of reward differences. "group": standard deviation of the group (GRPO, arXiv 2402.03300);
            "batch": standard deviation of all known rewards of this call (arXiv 2508.08221); "none": 1 (Dr. GRPO, arXiv
            2503.20783).
        aggregation: "sum_then_normalize": sum the weighted scores, then normalize by group. "normalize_then_sum":
            normalize each reward function by group, then sum and normalize by batch (GDPO, arXiv 2601.05242); `scale`
            has no effect then.
        failed: (B,) bool, completions for which a reward function failed. Their total is unknown and in no statistic.
        epsilon: added to every standard deviation; 1e-4 as in TRL.

    Raises ValueError for unknown option names, mismatched shapes and infinite scores.
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
        has_signal=groups.any(advantages != 0),
        group_mean=totals.group.mean,
        group_std=totals.group.std,
    )


@dataclass(frozen=True)
class _Statistics:
    """Statistics of the known (not NaN) values of each completion's group; all (B,)."""

    mean: Tensor
    std: Tensor
    """Standard deviation with Bessel's correction; 0 where all are equal, NaN for fewer than two known values."""
    all_equal: Tensor
    """bool, True where the known values are equal up to rounding; also for one value and for none."""


@dataclass(frozen=True)
class _Totals:
    """(B,) weighted total rewards, and their statistics by group."""

    rewards: Tensor
    group: _Statistics


class _Groups:
    """Assignment of completions to groups."""

    def __init__(self, ids: Tensor) -> None:
        distinct, self._group_index = torch.unique(ids, return_inverse=True)
        self._count = distinct.numel()

    def statistics(self, values: Tensor, magnitude: Tensor) -> _Statistics:
        """Statistics of `values` (B,), NaN where unknown; their rounding errors are relative to `magnitude` (B,)."""
        known = ~values.isnan()

        def total(each: Tensor) -> Tensor:
            return each.new_zeros(self._count).index_add(0, self._group_index, each.masked_fill(~known, 0.0))

        def largest(each: Tensor) -> Tensor:
            start = each.new_full((self._count,), -torch.inf)
            return start.scatter_reduce(0, self._group_index, each.masked_fill(~known, -torch.inf), "amax")

        count = total(torch.ones_like(values))
        mean = total(values) / count
        # Two passes: the mean of squares minus the square of the mean can come out negative.
        variance = total((values - mean[self._group_index]) ** 2) / (count - 1)
        spread = largest(values) + largest(-values)
        all_equal = spread <= EQUAL_REWARDS_TOLERANCE * largest(magnitude)
        std = variance.sqrt().masked_fill(all_equal, 0.0).masked_fill(count < 2, torch.nan)
        return _Statistics(*(of_group[self._group_index] for of_group in (mean, std, all_equal)))

    def any(self, flags: Tensor) -> Tensor:
        """(B,) bool, True where any completion of the group has its flag set."""
        hits = flags.new_zeros(self._count, dtype=torch.int64).index_add(0, self._group_index, flags.to(torch.int64))
        return (hits > 0)[self._group_index]


def _sum_then_normalize(
    totals: _Totals, scores: Tensor, weighting: Tensor, groups: _Groups, scale: str, epsilon: float
) -> Tensor:
    """(B,) distance of the total reward from its group mean, divided by the standard deviation that `scale` names."""
    spread = SCALES[scale](totals.rewards, totals.group, epsilon)
    return _zero_if_equal((totals.rewards - totals.group.mean) / spread, totals.group)


def _normalize_then_sum(
    totals: _Totals, scores: Tensor, weighting: Tensor, groups: _Groups, scale: str, epsilon: float
) -> Tensor:
    """(B,) rewards normalized within the group one function at a time, summed, then normalized over the batch."""
    columns = []
    for column in scores.unbind(dim=1):
        own = groups.statistics(column, column.abs())
        normalized = _zero_if_equal((column - own.mean) / (own.std + epsilon), own)
        columns.append(normalized.masked_fill(column.isnan(), torch.nan))
    sums, magnitude = _weighted_sum(torch.stack(columns, dim=1), weighting)
    return _zero_if_equal((sums - sums.nanmean()) / (_batch_std(sums) + epsilon), groups.statistics(sums, magnitude))


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
    """(B,) sum of the known scores of (B, K), NaN where none is known, and (B,) sum of their absolute values.

    The second is the scale of the rounding errors: 0.7 - 0.7 leaves a residue that is large relative to the sum.
    """
    weighted = scores * weighting
    none_known = scores.isnan().all(dim=1)
    return weighted.nansum(dim=1).masked_fill(none_known, torch.nan), weighted.abs().nansum(dim=1)


def _batch_std(values: Tensor) -> Tensor:
    """() standard deviation of the known values with Bessel's correction; NaN for fewer than two."""
    known = values[~values.isnan()]
    return known.std() if known.numel() > 1 else values.new_tensor(torch.nan)


def _zero_if_equal(advantages: Tensor, group: _Statistics) -> Tensor:
    """`advantages` (B,), exactly 0 where all values of the group are equal and where the own value is unknown."""
    return advantages.masked_fill(group.all_equal | advantages.isnan(), 0.0)


def _check(scores: Tensor, ids: Tensor, weighting: Tensor, scale: str, aggregation: str) -> None:
    for name, value, known in (("scale", scale, SCALES), ("aggregation", aggregation, AGGREGATIONS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(sorted(known))}.")
    if scores.ndim != 2 or ids.shape != scores.shape[:1]:
        raise ValueError(
            f"scores must be (B, K) with B group ids; their shapes are {tuple(scores.shape)} and {tuple(ids.shape)}."
        )
    if weighting.shape != scores.shape[1:]:
        raise ValueError(
            f"There are {scores.shape[1]} reward functions and {weighting.numel()} weights: give one per function."
        )
    if scores.isinf().any():
        raise ValueError("A score is infinite. Mark the completion as failed, or use NaN for an abstention.")
