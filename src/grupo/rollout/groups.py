"""The groups of one rollout: their completions and advantages, and which completions are trained on.

A rollout of P prompts and G completions per prompt has the completion indices 0 .. P*G - 1 over all ranks, group after
group. Every rank has the statistics (scores, lengths) of all completions, so that all ranks make the same decisions;
texts and token ids stay on the rank that sampled them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grupo.algo.advantages import Advantages, AdvantageSettings, compute_advantages
from grupo.algo.selection import max_variance_subset
from grupo.metrics import MetricAccumulator
from grupo.rewards.execution.results import RewardFailure
from grupo.types import Group, Prompt, RewardStatus, Rollout, TrainingSample, group_by_prompt


@dataclass(frozen=True)
class DynamicSampling:
    """Replacement of zero-variance groups by groups of new prompts (DAPO, arXiv:2503.14476)."""

    draw: Callable[[int], Sequence[Prompt]]
    """Returns the given number of new prompts, the same ones on every rank."""
    max_rounds: int
    """Maximum number of additional rounds."""


@dataclass(frozen=True)
class CompletionStats:
    """Numbers of one completion, exchanged between ranks."""

    index: int
    prompt_id: int
    prompt_tokens: int
    completion_tokens: int
    truncated: bool
    scores: tuple[float | None, ...]
    statuses: tuple[RewardStatus, ...]

    @property
    def failed(self) -> bool:
        return RewardStatus.FAILED in self.statuses


@dataclass(frozen=True)
class SamplingRound:
    """Completions that were sampled and scored together."""

    rollouts: dict[int, Rollout]
    """Completion index -> rollout, of this rank."""
    extras: dict[str, list[Any]]
    """Columns from the reward functions' `log_extra`, one value per entry of `rollouts`."""
    stats: dict[int, CompletionStats]
    """Completion index -> statistics, of all ranks, in ascending order."""
    logged: MetricAccumulator
    """Numbers from the reward functions' `log_metric`, of all ranks."""
    failures: list[RewardFailure]
    """Failures of reward functions, of all ranks."""
    seconds_generating: float
    seconds_rewarding: float


class RolloutGroups:
    """The current groups of one rollout. A group can be replaced by another one, which takes its completion indices.

    Advantages are always computed over the current groups.
    """

    def __init__(self, prompts: Sequence[Prompt], *, group_size: int, settings: AdvantageSettings) -> None:
        self.prompts = list(prompts)
        """(P,) prompts of the current groups."""
        self.sampled_prompts = list(prompts)
        """Prompts of the current and of the replaced groups."""
        self.group_size = group_size
        self.settings = settings
        self.rounds: list[SamplingRound] = []
        self.replaced: list[Group] = []
        """This rank's completions of replaced groups, with the advantages that they had before."""
        self._rollouts: dict[int, Rollout] = {}
        self._stats: dict[int, CompletionStats] = {}

    def add(self, sampled: SamplingRound) -> None:
        self.rounds.append(sampled)
        # The order of the first round, which has every index, remains: later rounds only replace values.
        self._rollouts.update(sampled.rollouts)
        self._stats.update(sampled.stats)
        result = group_advantages(list(self._stats.values()), self.settings)
        self._rewards = dict(zip(self._stats, known_rewards(result), strict=True))
        self._advantages = dict(zip(self._stats, result.advantages.tolist(), strict=True))
        self._has_signal = dict(zip(self._stats, result.has_signal.tolist(), strict=True))
        self._in_loss = self._indices_in_loss()

    def zero_variance_groups(self) -> list[int]:
        """Positions of the groups without any advantage other than 0 among their completions in the loss."""
        with_advantage = {index // self.group_size for index in self._in_loss if self._advantages[index] != 0.0}
        return [position for position in range(len(self.prompts)) if position not in with_advantage]

    def replace(self, positions: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Puts new prompts in place of the groups at `positions`, whose completions are added in the next round."""
        leaving = {index: one for index, one in self._rollouts.items() if index // self.group_size in positions}
        self.replaced += self._groups(leaving)
        self.sampled_prompts += prompts
        for position, prompt in zip(positions, prompts, strict=True):
            self.prompts[position] = prompt

    def samples(self) -> dict[int, TrainingSample]:
        """Completion index -> training sample, of this rank."""
        return {
            index: TrainingSample(
                prompt_ids=rollout.prompt.token_ids,
                completion_ids=rollout.completion.token_ids,
                advantage=self._advantages[index],
                has_loss=index in self._in_loss,
                group_has_signal=self._has_signal[index],
                behavior_logprobs=rollout.completion.behavior_logprobs,
                entropies=rollout.completion.entropies,
            )
            for index, rollout in self._rollouts.items()
        }

    def groups(self) -> tuple[Group, ...]:
        """This rank's completions by prompt."""
        return self._groups(self._rollouts)

    def extras(self) -> dict[str, list[Any]]:
        """Columns from `log_extra`: one value per completion of `groups`, None where the round did not log any."""
        names = dict.fromkeys(itertools.chain.from_iterable(one.extras for one in self.rounds))
        latest: dict[str, dict[int, Any]] = {name: {} for name in names}
        for one in self.rounds:
            for name, values in latest.items():
                values.update(zip(one.rollouts, one.extras.get(name, [None] * len(one.rollouts)), strict=True))
        return {name: list(values.values()) for name, values in latest.items()}

    def all_completions(self) -> list[CompletionStats]:
        """Statistics of all completions of all ranks, replaced groups included."""
        return list(itertools.chain.from_iterable(one.stats.values() for one in self.rounds))

    def _indices_in_loss(self) -> set[int]:
        """Completions of all ranks with a known reward, not masked, and selected by `num_generations_trained`."""
        candidates: dict[int, list[int]] = {}
        for index, stats in self._stats.items():
            if self._rewards[index] is not None and not (self.settings.mask_truncated_completions and stats.truncated):
                candidates.setdefault(index // self.group_size, []).append(index)
        if self.settings.num_generations_trained is None:
            return set(itertools.chain.from_iterable(candidates.values()))
        selected: set[int] = set()
        for indices in candidates.values():
            advantages = [self._advantages[index] for index in indices]
            selected.update(indices[n] for n in max_variance_subset(advantages, self.settings.num_generations_trained))
        return selected

    def _groups(self, rollouts: Mapping[int, Rollout]) -> tuple[Group, ...]:
        indices, members = list(rollouts), list(rollouts.values())
        return tuple(
            Group(
                prompt=members[positions[0]].prompt,
                rollouts=tuple(members[position] for position in positions),
                rewards=tuple(self._rewards[indices[position]] for position in positions),
                advantages=tuple(self._advantages[indices[position]] for position in positions),
            )
            for positions in group_by_prompt(members).values()
        )


def group_advantages(stats: Sequence[CompletionStats], settings: AdvantageSettings) -> Advantages:
    """Rewards and advantages of completions, over the groups that their prompt ids form."""
    scores = [[float("nan") if score is None else score for score in one.scores] for one in stats]
    return compute_advantages(
        torch.tensor(scores, dtype=torch.float64),
        [one.prompt_id for one in stats],
        weights=settings.reward_weights,
        scale=settings.scale_rewards,
        aggregation=settings.multi_objective_aggregation,
        failed=torch.tensor([one.failed for one in stats]),
    )


def known_rewards(advantages: Advantages) -> list[float | None]:
    """(B,) total rewards, None where the total is unknown."""
    rewards, scored = advantages.rewards.tolist(), advantages.scored.tolist()
    return [reward if known else None for reward, known in zip(rewards, scored, strict=True)]
