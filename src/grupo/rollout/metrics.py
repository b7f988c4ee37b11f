"""Metrics of a rollout: rewards, lengths and groups of all sampled completions of all ranks (docs/metrics.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from grupo.algo.advantages import Advantages
from grupo.errors import RewardError
from grupo.metrics import STEP_METRICS, MetricAccumulator
from grupo.rollout.groups import CompletionStats, RolloutGroups, known_rewards
from grupo.types import RewardStatus


def rollout_metrics(
    stats: Sequence[CompletionStats], advantages: Advantages, reward_names: Sequence[str]
) -> MetricAccumulator:
    """Metrics of rewards and completions; `advantages` are those of `stats`, in the same order."""
    metrics = MetricAccumulator()
    _add_lengths(metrics, stats)
    _add_scores(metrics, stats, reward_names)
    _add_rewards(metrics, stats, advantages)
    return metrics


def add_dynamic_sampling_metrics(metrics: MetricAccumulator, groups: RolloutGroups) -> None:
    trained, sampled = len(groups.prompts), len(groups.sampled_prompts)
    metrics.add("dynamic_sampling/rounds", float(len(groups.rounds)))
    metrics.add("dynamic_sampling/groups", float(sampled))
    metrics.add_sum("dynamic_sampling/kept_share", float(trained), float(sampled))
    metrics.add("dynamic_sampling/zero_variance_share", len(groups.zero_variance_groups()) / trained, trained)


def add_logged_metrics(metrics: MetricAccumulator, logged: MetricAccumulator) -> None:
    """Adds what reward functions logged with `log_metric`.

    Raises:
        RewardError: a name is already taken by a metric of the trainer.
    """
    taken = STEP_METRICS | metrics.means().keys()
    for name in logged.sums:
        if name in taken:
            raise RewardError(
                f"A reward function called log_metric('{name}', ...), but the trainer logs a metric of this name. "
                f"Choose another, for example 'mine/{name}'."
            )
    metrics.merge(logged)


def _add_lengths(metrics: MetricAccumulator, stats: Sequence[CompletionStats]) -> None:
    terminated = [one.completion_tokens for one in stats if not one.truncated]
    _add_distribution(metrics, "completions/{}_length", [one.completion_tokens for one in stats])
    _add_distribution(metrics, "completions/{}_terminated_length", terminated)
    metrics.add("completions/clipped_ratio", sum(one.truncated for one in stats) / len(stats), len(stats))


def _add_scores(metrics: MetricAccumulator, stats: Sequence[CompletionStats], reward_names: Sequence[str]) -> None:
    for position, name in enumerate(reward_names):
        scores = [score for one in stats if (score := one.scores[position]) is not None]
        _add_mean_and_std(metrics, f"rewards/{name}/mean", f"rewards/{name}/std", scores)
        for status, label in ((RewardStatus.FAILED, "failed"), (RewardStatus.ABSTAINED, "abstained")):
            share = sum(one.statuses[position] is status for one in stats) / len(stats)
            metrics.add(f"rewards/{name}/{label}_share", share, len(stats))


def _add_rewards(metrics: MetricAccumulator, stats: Sequence[CompletionStats], advantages: Advantages) -> None:
    rewards = [reward for reward in known_rewards(advantages) if reward is not None]
    _add_mean_and_std(metrics, "reward", "reward_std", rewards)
    prompt_ids = [one.prompt_id for one in stats]
    has_signal = dict(zip(prompt_ids, advantages.has_signal.tolist(), strict=True))
    metrics.add("frac_reward_zero_std", 1.0 - sum(has_signal.values()) / len(has_signal), len(has_signal))
    stds = dict(zip(prompt_ids, advantages.group_std.tolist(), strict=True))
    known = [std for std in stds.values() if not math.isnan(std)]
    if known:
        metrics.add("reward_within_group_std", sum(known) / len(known), len(known))


def _add_distribution(metrics: MetricAccumulator, pattern: str, values: Sequence[int]) -> None:
    if values:
        metrics.add(pattern.format("mean"), sum(values) / len(values), len(values))
        metrics.add_min(pattern.format("min"), float(min(values)))
        metrics.add_max(pattern.format("max"), float(max(values)))


def _add_mean_and_std(metrics: MetricAccumulator, mean: str, std: str, values: Sequence[float]) -> None:
    """The standard deviation has Bessel's correction, and is 0 for a single value."""
    if values:
        deviation = float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
        metrics.add(mean, sum(values) / len(values), len(values))
        metrics.add(std, deviation, len(values))
