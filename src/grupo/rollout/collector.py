"""One rollout: prompts -> completions -> rewards -> advantages -> samples, over all ranks.

Each rank samples and scores the completions that it will train on; only numbers (scores, lengths) travel between ranks,
and `RolloutGroups` computes advantages from all of them on every rank.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from grupo.algo.advantages import AdvantageSettings
from grupo.data.prompts import Outcome, reward_columns
from grupo.errors import RewardError, TrainingError
from grupo.metrics import STEP_METRICS, AllGather, MetricAccumulator, merge_metrics
from grupo.rewards.execution.results import RewardFailure, RewardTable
from grupo.rewards.execution.runner import RewardRunner
from grupo.rollout.engine import Engine, GenerationRequest, completion_seed
from grupo.rollout.groups import DynamicSampling, Earnings, RolloutGroups, Round, Row
from grupo.sampling import SamplingSpec
from grupo.types import Completion, Group, Prompt, RewardStatus, Rollout, TrainingSample

logger = logging.getLogger("grupo")

Result = TypeVar("Result")


@dataclass(frozen=True)
class RolloutResult:
    """What one rank keeps of a rollout."""

    samples: dict[int, TrainingSample]
    """This rank's samples by completion number."""
    groups: tuple[Group, ...]
    """This rank's completions by prompt, for people to read."""
    dropped: tuple[Group, ...]
    """The same of groups that had no signal and were replaced."""
    extras: dict[str, list[Any]]
    """Columns that reward functions logged with `log_extra`, one value per completion of `groups`."""
    outcomes: list[Outcome]
    """Of every prompt that was sampled, replaced ones included; of all ranks, the same on each."""
    metrics: MetricAccumulator
    """Of all ranks, the same on each. Rewards and completions are those of everything that was sampled."""
    tokens: int
    """Sampled by all ranks, and those of the prompts, which count once per completion."""
    seconds_generating: float
    seconds_rewarding: float
    """In which nothing else was done."""


@dataclass(frozen=True)
class _Sampled:
    """What one rank sampled."""

    numbers: tuple[int, ...]
    prompts: list[Prompt]
    """One for each of `completions`."""
    completions: list[Completion]
    seconds: float


@dataclass
class _Aside:
    """What is done while rewards are awaited: its time is not theirs, and neither is what it raises."""

    work: Callable[[], None]
    seconds: float = 0.0
    error: Exception | None = None

    def __call__(self) -> None:
        started = time.perf_counter()
        _, self.error = _attempt(self.work)
        self.seconds = time.perf_counter() - started


@dataclass(frozen=True)
class _Part:
    """What one rank sampled, and what was said about it."""

    rollouts: dict[int, Rollout]
    """By completion number."""
    table: RewardTable
    seconds_generating: float
    seconds_rewarding: float


class RolloutCollector:
    """Samples completions, has them scored, and turns scores into advantages.

    Args:
        engine: what continues prompts.
        rewards: what scores completions.
        prompt_text: the rendered prompt, handed to reward functions that ask for `prompt_texts`.
        all_gather: one object from each rank, in rank order; called the same number of times on every rank.
        run_seed: together with the prompt's draw it decides what is sampled.
        is_main_rank: says what failed, on all ranks; one of them should.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        rewards: RewardRunner,
        prompt_text: Callable[[Prompt], str],
        all_gather: AllGather,
        run_seed: int,
        is_main_rank: bool = True,
    ) -> None:
        self.engine = engine
        self.rewards = rewards
        self.prompt_text = prompt_text
        self.all_gather = all_gather
        self.run_seed = run_seed
        self.is_main_rank = is_main_rank
        self._told_about_abstentions = False

    def collect(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        *,
        group_size: int,
        sampling: SamplingSpec,
        settings: AdvantageSettings,
        trainer_state: Any = None,
        seed_scope: str = "train",
        rows_at_once: int | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        meanwhile: Callable[[dict[int, TrainingSample]], None] | None = None,
    ) -> RolloutResult:
        """Collects one rollout.

        Args:
            prompts: (P,) all prompts of the rollout, the same on every rank.
            numbers: the completions of this rank, out of range(P * group_size).
            seed_scope: keeps the random numbers of training and evaluation apart.
            rows_at_once: most completions that the engine samples together; None: all of them.
            dynamic_sampling: replaces groups without a signal, in their slots; None: they stay.
            meanwhile: called once on every rank while rewards are awaited, with its samples by completion number; it
                may use collectives. Not together with `dynamic_sampling`.

        Raises:
            RewardError: on every rank, if a reward function broke the contract on any of them, or failed too often.
            TrainingError: sampling or scoring raised something else on another rank; here it is raised as it is.
        """
        slots = RolloutGroups(prompts, group_size=group_size, settings=settings)

        def sample(own: Sequence[int]) -> None:
            def generate() -> _Sampled:
                return self._sampled(slots.prompts, own, group_size, sampling, seed_scope, rows_at_once)

            slots.add(self._round(generate, meanwhile, settings, trainer_state))
            _check_failures(slots.rounds, settings)

        sample(numbers)
        while (
            dynamic_sampling is not None
            and len(slots.rounds) <= dynamic_sampling.max_rounds
            and (dead := slots.zero_variance_groups())
        ):
            slots.replace(dead, dynamic_sampling.draw(len(dead)))
            sample([number for number in numbers if number // group_size in dead])
        rows, earnings = slots.all_completions()
        metrics = _metrics(rows, earnings, self.rewards.names)
        if dynamic_sampling is not None:
            _refill_metrics(metrics, slots, sampled=len(rows) // group_size)
        logged = merge_metrics(one.logged for one in slots.rounds)
        _refuse_clashes(logged, metrics)
        metrics.merge(logged)
        return RolloutResult(
            samples=slots.samples(),
            groups=slots.groups(),
            dropped=tuple(slots.dropped),
            extras=slots.extras(),
            outcomes=_outcomes(slots.drawn, rows, earnings),
            metrics=metrics,
            tokens=sum(row.prompt_tokens + row.completion_tokens for row in rows),
            seconds_generating=sum(one.seconds_generating for one in slots.rounds),
            seconds_rewarding=sum(one.seconds_rewarding for one in slots.rounds),
        )

    def _round(
        self,
        generate: Callable[[], _Sampled],
        meanwhile: Callable[[dict[int, TrainingSample]], None] | None,
        settings: AdvantageSettings,
        trainer_state: Any,
    ) -> Round:
        """Samples and scores this rank's completions; every rank enters, with or without any."""
        part: _Part | None = None
        sampled, error = _attempt(generate)
        if meanwhile is not None:
            # It has collectives of its own: all ranks begin it, or none.
            _raise_any(self.all_gather(_as_message(error)), error)
        if sampled is not None:
            aside = meanwhile and _Aside(functools.partial(meanwhile, _before_rewards(sampled, settings)))
            part, error = _attempt(functools.partial(self._part, sampled, aside, trainer_state))
            if aside is not None and aside.error is not None:
                raise aside.error
        rows, logged, failures = self._exchange(part, error)
        assert part is not None
        if self.is_main_rank:
            self._tell(rows, failures)
        return Round(
            part.rollouts, part.table.extras, rows, logged, failures, part.seconds_generating, part.seconds_rewarding
        )

    def _sampled(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        group_size: int,
        sampling: SamplingSpec,
        seed_scope: str,
        rows_at_once: int | None,
    ) -> _Sampled:
        started = time.perf_counter()
        chunk = rows_at_once or max(len(numbers), 1)
        completions = [
            completion
            for start in range(0, len(numbers), chunk)
            for completion in self._generate(prompts, numbers[start : start + chunk], group_size, sampling, seed_scope)
        ]
        own_prompts = [prompts[number // group_size] for number in numbers]
        return _Sampled(tuple(numbers), own_prompts, completions, time.perf_counter() - started)

    def _part(self, sampled: _Sampled, aside: _Aside | None, trainer_state: Any) -> _Part:
        started = time.perf_counter()
        table = self._score(sampled.prompts, sampled.completions, trainer_state, aside)
        rollouts = {
            number: Rollout(prompt, completion, scores, statuses)
            for number, prompt, completion, scores, statuses in zip(
                sampled.numbers, sampled.prompts, sampled.completions, table.scores, table.statuses, strict=True
            )
        }
        seconds = time.perf_counter() - started - (0.0 if aside is None else aside.seconds)
        return _Part(rollouts, table, sampled.seconds, seconds)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        group_size: int,
        sampling: SamplingSpec,
        seed_scope: str,
    ) -> list[Completion]:
        """This rank's completions, in the order of `numbers`."""
        numbers_of_prompt: dict[int, list[int]] = {}
        for number in numbers:
            numbers_of_prompt.setdefault(number // group_size, []).append(number)
        requests = []
        for index, members in numbers_of_prompt.items():
            prompt, group_indices = prompts[index], tuple(number % group_size for number in members)
            seeds = tuple(completion_seed(self.run_seed, seed_scope, prompt.id, place) for place in group_indices)
            requests.append(GenerationRequest(prompt, seeds, group_indices))
        completions: dict[int, Completion] = {}
        for members, group in zip(numbers_of_prompt.values(), self.engine.generate(requests, sampling), strict=True):
            completions.update(zip(members, group, strict=True))
        return [completions[number] for number in numbers]

    def _score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        trainer_state: Any,
        meanwhile: Callable[[], None] | None,
    ) -> RewardTable:
        answers = [
            [{"role": "assistant", "content": completion.text}] if prompt.is_conversational else completion.text
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return self.rewards.score(
            prompts=[prompt.content for prompt in prompts],
            completions=answers,
            completion_ids=[list(completion.token_ids) for completion in completions],
            columns=reward_columns(prompts),
            trainer_state=trainer_state,
            prompt_texts=[self.prompt_text(prompt) for prompt in prompts],
            meanwhile=meanwhile,
        )

    def _tell(self, rows: Mapping[int, Row], failures: Sequence[RewardFailure]) -> None:
        """Says which completions, of all ranks, will be missing from the loss, and why."""
        count = len(rows)
        for failure in failures:
            logger.warning(
                "Reward function %s: its reward failed on %d of %d completions, which are left out of the loss.%s",
                failure.message, len(failure.rows), count, f"\n{failure.traceback}" if failure.traceback else "",
            )  # fmt: skip
        abstained = sum(set(row.statuses) == {RewardStatus.ABSTAINED} for row in rows.values())
        if abstained and not self._told_about_abstentions:
            self._told_about_abstentions = True
            logger.warning(
                "All reward functions abstained on %d of %d completions, which are left out of the loss. This is said "
                "once; rewards/<name>/abstained_share counts it.", abstained, count,
            )  # fmt: skip

    def _exchange(
        self, part: _Part | None, error: Exception | None
    ) -> tuple[dict[int, Row], MetricAccumulator, list[RewardFailure]]:
        """Of all ranks: the rows by completion number, what reward functions logged, and how some of them failed.

        Raises:
            Exception: `error`, or on the ranks without one of their own RewardError or TrainingError with its message.
        """
        own_rows = [
            Row(
                number=number,
                prompt_id=rollout.prompt.id,
                prompt_tokens=len(rollout.prompt.token_ids),
                completion_tokens=len(rollout.completion.token_ids),
                truncated=rollout.completion.is_truncated,
                scores=rollout.scores,
                statuses=rollout.statuses,
            )
            for number, rollout in (part.rollouts.items() if part else ())
        ]
        metrics, failures = (part.table.metrics, part.table.failures) if part else ({}, ())
        # One collective that every rank enters whatever happened on it: no rank can be left waiting.
        gathered = self.all_gather((own_rows, metrics, failures, _as_message(error)))
        rank_rows, rank_metrics, rank_failures, messages = zip(*gathered, strict=True)
        _raise_any(messages, error)
        logged = MetricAccumulator()
        for metrics in rank_metrics:
            for name, values in metrics.items():
                for value in values:
                    logged.add(name, value)
        rows = sorted(itertools.chain(*rank_rows), key=lambda row: row.number)
        return {row.number: row for row in rows}, logged, list(itertools.chain(*rank_failures))


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What `work` returns, or what it raises: the other ranks must hear of that before it goes on its way."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _before_rewards(sampled: _Sampled, settings: AdvantageSettings) -> dict[int, TrainingSample]:
    """Samples by completion number, without advantages; in the loss are those that only a reward can take out of it."""
    return {
        number: TrainingSample(
            prompt_ids=prompt.token_ids,
            completion_ids=completion.token_ids,
            advantage=0.0,
            has_loss=not (settings.mask_truncated_completions and completion.is_truncated),
            group_has_signal=False,
            behavior_logprobs=completion.behavior_logprobs,
            entropies=completion.entropies,
        )
        for number, prompt, completion in zip(sampled.numbers, sampled.prompts, sampled.completions, strict=True)
    }


def _raise_any(messages: Sequence[tuple[bool, str] | None], error: Exception | None) -> None:
    """Raises `error`, or the first that another rank reports."""
    for rank, message in enumerate(messages):
        if message is not None:
            raise error or _error_of(rank, message)


def _as_message(error: Exception | None) -> tuple[bool, str] | None:
    """What other ranks are told: whether it is a RewardError, and the text."""
    if error is None:
        return None
    is_reward_error = isinstance(error, RewardError)
    return is_reward_error, str(error) if is_reward_error else f"{type(error).__name__}: {error}"


def _error_of(rank: int, message: tuple[bool, str]) -> Exception:
    is_reward_error, text = message
    if is_reward_error:
        return RewardError(text)
    return TrainingError(f"Process {rank} could not sample or score its completions: {text}")


def _check_failures(rounds: Sequence[Round], settings: AdvantageSettings) -> None:
    """Counts over all rounds: in one of a few completions a single failure would be a large share."""
    rows = [row for one in rounds for row in one.rows.values()]
    failed = sum(row.failed for row in rows)
    if failed > settings.max_failed_reward_share * len(rows):
        failures = [failure for one in rounds for failure in one.failures]
        raise RewardError(_too_many_failures(failed, len(rows), settings.max_failed_reward_share, failures))


def _outcomes(prompts: Sequence[Prompt], rows: Sequence[Row], earnings: Earnings) -> list[Outcome]:
    rewards: dict[int, list[float | None]] = {prompt.id: [] for prompt in prompts}
    for row, reward in zip(rows, earnings.rewards, strict=True):
        rewards[row.prompt_id].append(reward)
    return [(prompt, tuple(rewards[prompt.id])) for prompt in prompts]


def _metrics(rows: Sequence[Row], earnings: Earnings, names: Sequence[str]) -> MetricAccumulator:
    metrics = MetricAccumulator()
    _length_metrics(metrics, rows)
    _reward_metrics(metrics, rows, earnings, names)
    _signal_metrics(metrics, rows, earnings)
    return metrics


def _refuse_clashes(user_metrics: MetricAccumulator, own: MetricAccumulator) -> None:
    taken = STEP_METRICS | own.means().keys()
    for name in user_metrics.sums:
        if name in taken:
            raise RewardError(
                f"A reward function called log_metric('{name}', ...), but the trainer logs a metric of this name. "
                f"Choose another, for example 'mine/{name}'."
            )


def _length_metrics(metrics: MetricAccumulator, rows: Sequence[Row]) -> None:
    lengths = [row.completion_tokens for row in rows]
    _add_distribution(metrics, "completions/{}_length", lengths)
    _add_distribution(
        metrics, "completions/{}_terminated_length", [row.completion_tokens for row in rows if not row.truncated]
    )
    metrics.add("completions/clipped_ratio", sum(row.truncated for row in rows) / len(rows), len(rows))


def _reward_metrics(metrics: MetricAccumulator, rows: Sequence[Row], earnings: Earnings, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        scores = [score for row in rows if (score := row.scores[index]) is not None]
        if scores:
            metrics.add(f"rewards/{name}/mean", sum(scores) / len(scores), len(scores))
            metrics.add(f"rewards/{name}/std", _std(scores), len(scores))
        for status, label in ((RewardStatus.FAILED, "failed"), (RewardStatus.ABSTAINED, "abstained")):
            share = sum(row.statuses[index] is status for row in rows) / len(rows)
            metrics.add(f"rewards/{name}/{label}_share", share, len(rows))
    totals = [reward for reward in earnings.rewards if reward is not None]
    if totals:
        metrics.add("reward", sum(totals) / len(totals), len(totals))
        metrics.add("reward_std", _std(totals), len(totals))


def _signal_metrics(metrics: MetricAccumulator, rows: Sequence[Row], earnings: Earnings) -> None:
    live_of_group = {row.prompt_id: live for row, live in zip(rows, earnings.live, strict=True)}
    stds = zip(rows, earnings.group_std, strict=True)
    std_of_group = {row.prompt_id: std for row, std in stds if not math.isnan(std)}
    count = len(live_of_group)
    live_share = sum(live_of_group.values()) / count
    metrics.add("frac_reward_zero_std", 1.0 - live_share, count)
    metrics.add("live_group_share", live_share, count)
    if std_of_group:
        metrics.add("reward_within_group_std", sum(std_of_group.values()) / len(std_of_group), len(std_of_group))


def _refill_metrics(metrics: MetricAccumulator, slots: RolloutGroups, *, sampled: int) -> None:
    count, dead = len(slots.prompts), len(slots.zero_variance_groups())
    metrics.add("dynamic_sampling/rounds", float(len(slots.rounds)))
    metrics.add("dynamic_sampling/groups", float(sampled))
    metrics.add_sum("dynamic_sampling/kept_share", float(count), float(sampled))
    metrics.add("dynamic_sampling/live_share", 1.0 - dead / count, count)


def _add_distribution(metrics: MetricAccumulator, pattern: str, values: Sequence[int]) -> None:
    if values:
        metrics.add(pattern.format("mean"), sum(values) / len(values), len(values))
        metrics.add_min(pattern.format("min"), float(min(values)))
        metrics.add_max(pattern.format("max"), float(max(values)))


def _std(values: Sequence[float]) -> float:
    """Bessel's standard deviation, 0 for a single value."""
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0


def _too_many_failures(failed: int, count: int, limit: float, failures: Sequence[RewardFailure]) -> str:
    calls = "; ".join(f"{failure.name}: {failure.kind}, {failure.message}" for failure in failures[:3])
    return (
        f"{failed} of {count} completions have a failed reward ({failed / count:.0%}), more than "
        f"max_failed_reward_share={limit:.0%}. {calls}. Mend the reward function, let it return "
        "None where it does not apply, or raise max_failed_reward_share."
    )
