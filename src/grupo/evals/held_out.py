"""How good a model is on prompts that training never sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grupo.data.prompts import TokenizedRow
from grupo.errors import RewardError
from grupo.evals.statistics import Interval, clustered_interval
from grupo.records import Group
from grupo.rollout.collect import RolloutCollector
from grupo.rollout.slots import AdvantageSettings
from grupo.sampling import SamplingSpec


@dataclass(frozen=True)
class HeldOutResult:
    """Scores of several samples for each held-out prompt."""

    groups: tuple[Group, ...]
    scores: tuple[tuple[float, ...], ...]
    """Per prompt, one score per sample."""
    interval: Interval
    is_accuracy: bool
    """All scores are 0 or 1."""

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
    rows_at_once: int | None = None,
) -> HeldOutResult:
    """Samples `samples_per_prompt` answers to every row and scores them with the weighted sum of the run's rewards.

    At most `rows_at_once` of them are sampled together; None: all.

    The random numbers depend on the run's seed, the prompt and the place of the sample only, so that two evaluations in
    one run differ by the model alone.

    Raises:
        RewardError: a sample could not be scored.
    """
    prompts = [row.draw(row.row) for row in rows]
    result = collector.collect(
        prompts,
        range(len(prompts) * samples_per_prompt),
        group_size=samples_per_prompt,
        sampling=sampling,
        settings=AdvantageSettings(
            weights=None if weights is None else tuple(weights),
            scale="none",
            aggregation="sum_then_normalize",
            max_failed_share=0.0,
        ),
        purpose="held-out",
        rows_at_once=rows_at_once,
    )
    scores = tuple(tuple(_known(reward) for reward in group.rewards) for group in result.groups)
    flat = [score for prompt in scores for score in prompt]
    return HeldOutResult(
        groups=result.groups,
        scores=scores,
        interval=clustered_interval(scores),
        is_accuracy=all(score in (0.0, 1.0) for score in flat),
    )


def _known(reward: float | None) -> float:
    if reward is None:
        raise RewardError(
            "A held-out answer could not be scored: every reward function abstained. Evaluation needs a reward that "
            "applies to each held-out prompt."
        )
    return reward
