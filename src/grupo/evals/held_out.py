"""Evaluation of a model on prompts that training never sees."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grupo.algo.advantages import AdvantageSettings
from grupo.data.prompts import TokenizedRow
from grupo.errors import RewardError
from grupo.evals.statistics import Interval, clustered_interval
from grupo.rollout.collector import RolloutCollector
from grupo.rollout.schedule import rank_slice
from grupo.sampling import SamplingSpec
from grupo.types import Group, group_record

FEW_PROMPTS = 20
"""Number of prompts below which the intervals, which assume a large sample of prompts, are too narrow more often than
stated (Cameron and Miller, J. Human Resources 50, 2015: few clusters are fewer than 20 to 50)."""


@dataclass(frozen=True)
class HeldOutResult:
    """Rewards of several samples for each held-out prompt."""

    groups: tuple[dict[str, Any], ...]
    """One record per prompt, as in `eval_before.json`: see `group_record`."""

    @functools.cached_property
    def scores(self) -> tuple[tuple[float, ...], ...]:
        """Total rewards: per prompt, one per sample."""
        return tuple(tuple(answer["reward"] for answer in group["completions"]) for group in self.groups)

    @functools.cached_property
    def interval(self) -> Interval:
        return clustered_interval(self.scores)

    @property
    def is_accuracy(self) -> bool:
        """Whether there is one reward and all its scores are 0 or 1; a total of 1 over several need not be right."""
        one_reward = all(len(answer["rewards"]) == 1 for group in self.groups for answer in group["completions"])
        return one_reward and all(score in (0.0, 1.0) for prompt in self.scores for score in prompt)

    @property
    def means(self) -> tuple[float | None, ...]:
        """(K,) mean score of each reward function, without its weight; None where it scored no answer."""
        by_reward = zip(
            *(answer["rewards"].values() for group in self.groups for answer in group["completions"]), strict=True
        )
        known = [[score for score in scores if score is not None] for scores in by_reward]
        return tuple(sum(scores) / len(scores) if scores else None for scores in known)

    def as_dict(self, is_accuracy: bool) -> dict[str, Any]:
        name = "accuracy" if is_accuracy else "mean_reward"
        interval = self.interval
        return {name: interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def evaluate_held_out(
    collector: RolloutCollector,
    rows: Sequence[TokenizedRow],
    *,
    samples_per_prompt: int,
    sampling: SamplingSpec,
    weights: Sequence[float] | None = None,
    completions_at_once: int | None = None,
    world_size: int = 1,
    rank: int = 0,
) -> HeldOutResult:
    """Samples `samples_per_prompt` answers to every row and scores them with the weighted sum of the run's rewards.

    Each rank answers its share of the prompts, and all ranks get the whole result. At most `completions_at_once`
    answers are sampled together; None: all.

    Random numbers depend only on the run's seed, the prompt and the index of the sample, so that two evaluations in one
    run differ only by the model.

    Raises:
        RewardError: a sample could not be scored.
    """
    prompts = [row.to_prompt(row.row) for row in rows]
    own_prompts = rank_slice(len(prompts), world_size, rank)
    result = collector.collect(
        prompts,
        [prompt * samples_per_prompt + sample for prompt in own_prompts for sample in range(samples_per_prompt)],
        group_size=samples_per_prompt,
        sampling=sampling,
        settings=AdvantageSettings(reward_weights=weights, scale_rewards="none", max_failed_reward_share=0.0),
        seed_scope="held-out",
        completions_at_once=completions_at_once,
    )
    groups = tuple(itertools.chain(*collector.all_gather(result.groups)))
    for group in groups:
        _check_scored(group)
    return HeldOutResult(tuple(group_record(group, collector.rewards.names) for group in groups))


def _check_scored(group: Group) -> None:
    if None in group.rewards:
        raise RewardError(
            "A held-out answer could not be scored because every reward function abstained: an answer to row "
            f"{group.prompt.row} of the dataset, {str(group.prompt.content)[:100]!r}. Evaluation needs a reward that "
            "applies to every held-out prompt."
        )
