"""The slots of a rollout: which group stands where, what it earned, and which completions are trained on.

The completions of a rollout are numbered 0 .. P*G - 1 over all ranks, group after group. Every rank knows the numbers
(scores, lengths) of all completions, so that all ranks decide alike; texts and token ids stay where they were sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grupo.algo.advantages import AdvantageSettings, compute_advantages
from grupo.algo.selection import max_variance_subset
from grupo.metrics import MetricAccumulator
from grupo.rewards.execution.results import RewardFailure
from grupo.types import Group, Prompt, RewardStatus, Rollout, TrainingSample, group_by_prompt


@dataclass(frozen=True)
class DynamicSampling:
    """Where groups without a signal are replaced from (dynamic sampling, DAPO, arXiv 2503.14476)."""

    draw: Callable[[int], Sequence[Prompt]]
    """So many new prompts, the same on every rank."""
    max_rounds: int
    """Additional rounds at most."""


@dataclass(frozen=True)
class Row:
    """The numbers of one completion that travel between ranks."""

    number: int
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
class Earnings:
    """What rows earned, in their order."""

    rewards: list[float | None]
    advantages: list[float]
    live: list[bool]
    group_std: list[float]


@dataclass(frozen=True)
class Round:
    """Completions that were sampled together."""

    rollouts: dict[int, Rollout]
    """This rank's, by completion number."""
    extras: dict[str, list[Any]]
    """Columns that reward functions logged with `log_extra`, one value for each of `rollouts`."""
    rows: dict[int, Row]
    """Of all ranks, by completion number, in order."""
    logged: MetricAccumulator
    """What reward functions logged as numbers, of all ranks."""
    failures: list[RewardFailure]
    """How some reward functions failed, of all ranks."""
    seconds_generating: float
    seconds_rewarding: float


class RolloutGroups:
    """The groups of one rollout. A group may leave its slot, and with it its completion numbers, to another one.

    Advantages are always those over the groups that stand in the slots now.
    """

    def __init__(self, prompts: Sequence[Prompt], *, group_size: int, settings: AdvantageSettings) -> None:
        self.prompts = list(prompts)
        """(P,) what stands in each slot."""
        self.drawn = list(prompts)
        """Everything that ever did."""
        self.group_size = group_size
        self.settings = settings
        self.rounds: list[Round] = []
        self.dropped: list[Group] = []
        """This rank's completions of groups that left their slots, with the advantages that they had there."""
        self._rollouts: dict[int, Rollout] = {}
        self._rows: dict[int, Row] = {}

    def add(self, sampled: Round) -> None:
        self.rounds.append(sampled)
        # In order of their numbers: a later round only replaces what the first one has put in.
        self._rollouts.update(sampled.rollouts)
        self._rows.update(sampled.rows)
        self._earnings = group_advantages(list(self._rows.values()), self.settings)
        self._position = {number: position for position, number in enumerate(self._rows)}
        self._in_loss = self._numbers_in_loss()

    def zero_variance_groups(self) -> list[int]:
        """Slots whose group pulls the policy nowhere: none of its completions in the loss has an advantage."""
        pulling = {n // self.group_size for n in self._in_loss if self._earnings.advantages[self._position[n]] != 0.0}
        return [slot for slot in range(len(self.prompts)) if slot not in pulling]

    def replace(self, slots: Sequence[int], prompts: Sequence[Prompt]) -> None:
        leaving = set(slots)
        self.dropped += self._groups({n: one for n, one in self._rollouts.items() if n // self.group_size in leaving})
        self.drawn += prompts
        for slot, prompt in zip(slots, prompts, strict=True):
            self.prompts[slot] = prompt

    def samples(self) -> dict[int, TrainingSample]:
        """This rank's samples by completion number."""
        return {
            number: TrainingSample(
                prompt_ids=rollout.prompt.token_ids,
                completion_ids=rollout.completion.token_ids,
                advantage=self._earnings.advantages[self._position[number]],
                has_loss=number in self._in_loss,
                group_has_signal=self._earnings.live[self._position[number]],
                behavior_logprobs=rollout.completion.behavior_logprobs,
                entropies=rollout.completion.entropies,
            )
            for number, rollout in self._rollouts.items()
        }

    def groups(self) -> tuple[Group, ...]:
        """This rank's completions by prompt."""
        return self._groups(self._rollouts)

    def extras(self) -> dict[str, list[Any]]:
        """What reward functions logged with `log_extra`: one value per completion of `groups`, None where a round
        logged none."""
        names = dict.fromkeys(itertools.chain.from_iterable(one.extras for one in self.rounds))
        latest: dict[str, dict[int, Any]] = {name: {} for name in names}
        for one in self.rounds:
            for name, values in latest.items():
                values.update(zip(one.rollouts, one.extras.get(name, [None] * len(one.rollouts)), strict=True))
        return {name: list(values.values()) for name, values in latest.items()}

    def all_completions(self) -> tuple[list[Row], Earnings]:
        """All completions, those of dropped groups included; rewards and liveness count here, not the advantages."""
        rows = list(itertools.chain.from_iterable(one.rows.values() for one in self.rounds))
        return rows, self._earnings if len(self.rounds) == 1 else group_advantages(rows, self.settings)

    def _numbers_in_loss(self) -> set[int]:
        """Of all ranks: known reward, not masked, and among the chosen ones of its group."""
        by_slot: dict[int, list[int]] = {}
        for (number, row), reward in zip(self._rows.items(), self._earnings.rewards, strict=True):
            if reward is not None and not (self.settings.mask_truncated_completions and row.truncated):
                by_slot.setdefault(number // self.group_size, []).append(number)
        if self.settings.num_generations_trained is None:
            return set(itertools.chain.from_iterable(by_slot.values()))
        chosen = set()
        for numbers in by_slot.values():
            advantages = [self._earnings.advantages[self._position[number]] for number in numbers]
            chosen |= {
                numbers[index] for index in max_variance_subset(advantages, self.settings.num_generations_trained)
            }
        return chosen

    def _groups(self, rollouts: Mapping[int, Rollout]) -> tuple[Group, ...]:
        numbers, members = list(rollouts), list(rollouts.values())
        positions = [self._position[number] for number in numbers]
        return tuple(
            Group(
                prompt=members[indices[0]].prompt,
                rollouts=tuple(members[index] for index in indices),
                rewards=tuple(self._earnings.rewards[positions[index]] for index in indices),
                advantages=tuple(self._earnings.advantages[positions[index]] for index in indices),
            )
            for indices in group_by_prompt(members).values()
        )


def group_advantages(rows: Sequence[Row], settings: AdvantageSettings) -> Earnings:
    scores = torch.tensor(
        [[float("nan") if score is None else score for score in row.scores] for row in rows], dtype=torch.float64
    )
    result = compute_advantages(
        scores,
        [row.prompt_id for row in rows],
        weights=settings.reward_weights,
        scale=settings.scale_rewards,
        aggregation=settings.multi_objective_aggregation,
        failed=torch.tensor([row.failed for row in rows]),
    )
    rewards = [
        value if scored else None for value, scored in zip(result.rewards.tolist(), result.scored.tolist(), strict=True)
    ]
    return Earnings(rewards, result.advantages.tolist(), result.has_signal.tolist(), result.group_std.tolist())
