"""One rollout: prompts -> completions -> scores -> advantages -> training samples, over all ranks.

Each rank samples and scores the completions that it will train on. Only numbers (scores, lengths) travel between ranks;
`RolloutGroups` computes the advantages from all of them on every rank.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grupo.algo.advantages import AdvantageSettings
from grupo.data.prompts import PromptOutcome, reward_columns
from grupo.errors import RewardError, TrainingError
from grupo.metrics import AllGather, MetricAccumulator, merge_metrics
from grupo.rewards.execution.results import RewardFailure, RewardTable
from grupo.rewards.execution.runner import RewardRunner
from grupo.rollout.engine import Engine, GenerationRequest, completion_seed
from grupo.rollout.groups import (
    CompletionStats,
    DynamicSampling,
    RolloutGroups,
    SamplingRound,
    group_advantages,
    known_rewards,
)
from grupo.rollout.metrics import add_dynamic_sampling_metrics, add_logged_metrics, rollout_metrics
from grupo.sampling import SamplingSpec
from grupo.types import Completion, Group, Prompt, RewardStatus, Rollout, TrainingSample

logger = logging.getLogger("grupo")

Result = TypeVar("Result")


@dataclass(frozen=True)
class RolloutResult:
    """One rank's result of a rollout."""

    samples: dict[int, TrainingSample]
    """Completion index -> training sample, of this rank."""
    groups: tuple[Group, ...]
    """This rank's completions by prompt, for logs and files."""
    replaced: tuple[Group, ...]
    """This rank's completions of groups that dynamic sampling replaced."""
    extras: dict[str, list[Any]]
    """Columns from the reward functions' `log_extra`, one value per completion of `groups`."""
    outcomes: list[PromptOutcome]
    """Every sampled prompt of all ranks, replaced ones included, with its rewards; the same on each rank."""
    metrics: MetricAccumulator
    """Metrics of all ranks, the same on each; they cover all sampled completions, replaced ones included."""
    tokens: int
    """Tokens of the completions of all ranks and of their prompts, which count once per completion."""
    seconds_generating: float
    seconds_rewarding: float
    """Seconds spent on rewards alone, without overlapped work."""


class RolloutCollector:
    """Samples completions, scores them, and turns the scores into advantages.

    Args:
        engine: samples completions.
        rewards: scores completions.
        prompt_text: returns the rendered prompt, for reward functions with a parameter `prompt_texts`.
        all_gather: returns one object from each rank, in rank order; called equally often on every rank.
        run_seed: seed of the run, from which the seed of each completion is derived.
        is_main_rank: whether this rank logs the failures of all ranks.
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
        self._logged_abstentions = False

    def collect(
        self,
        prompts: Sequence[Prompt],
        completion_indices: Sequence[int],
        *,
        group_size: int,
        sampling: SamplingSpec,
        settings: AdvantageSettings,
        trainer_state: Any = None,
        seed_scope: str = "train",
        completions_at_once: int | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        while_waiting: Callable[[dict[int, TrainingSample]], None] | None = None,
    ) -> RolloutResult:
        """Collects one rollout.

        Args:
            prompts: (P,) all prompts of the rollout, the same on every rank.
            completion_indices: this rank's completions, from range(P * group_size).
            trainer_state: passed to the reward functions.
            seed_scope: part of every completion's seed; separates training from evaluation.
            completions_at_once: maximum number of completions per call of the engine; None: no limit.
            dynamic_sampling: replaces zero-variance groups; None: they stay.
            while_waiting: called once on every rank while rewards are pending, with this rank's samples by completion
                index, their advantages still unknown. It may use collectives. Cannot be combined with
                `dynamic_sampling`.

        Raises:
            RewardError: a reward function broke its contract, or failed too often, on any rank; raised on all ranks.
            TrainingError: generating or scoring raised another exception on another rank; the failing rank raises its
                own exception.
        """
        groups = RolloutGroups(prompts, group_size=group_size, settings=settings)

        def sample(indices: Sequence[int]) -> None:
            generate = functools.partial(
                self._generate, groups.prompts, indices, group_size, sampling, seed_scope, completions_at_once
            )
            own_prompts = [groups.prompts[index // group_size] for index in indices]
            groups.add(self._sampling_round(indices, own_prompts, generate, settings, trainer_state, while_waiting))
            _check_failures(groups.rounds, settings.max_failed_reward_share)

        sample(completion_indices)
        if dynamic_sampling is not None:
            while len(groups.rounds) <= dynamic_sampling.max_rounds and (replaced := groups.zero_variance_groups()):
                groups.replace(replaced, dynamic_sampling.draw(len(replaced)))
                sample([index for index in completion_indices if index // group_size in replaced])

        stats = groups.all_completions()
        advantages = group_advantages(stats, settings)
        metrics = rollout_metrics(stats, advantages, self.rewards.names)
        if dynamic_sampling is not None:
            add_dynamic_sampling_metrics(metrics, groups)
        add_logged_metrics(metrics, merge_metrics(one.logged for one in groups.rounds))
        rewards: dict[int, list[float | None]] = {prompt.id: [] for prompt in groups.sampled_prompts}
        for one, reward in zip(stats, known_rewards(advantages), strict=True):
            rewards[one.prompt_id].append(reward)
        return RolloutResult(
            samples=groups.samples(),
            groups=groups.groups(),
            replaced=tuple(groups.replaced),
            extras=groups.extras(),
            outcomes=[PromptOutcome(prompt, tuple(rewards[prompt.id])) for prompt in groups.sampled_prompts],
            metrics=metrics,
            tokens=sum(one.prompt_tokens + one.completion_tokens for one in stats),
            seconds_generating=sum(one.seconds_generating for one in groups.rounds),
            seconds_rewarding=sum(one.seconds_rewarding for one in groups.rounds),
        )

    def _sampling_round(
        self,
        indices: Sequence[int],
        prompts: Sequence[Prompt],
        generate: Callable[[], list[Completion]],
        settings: AdvantageSettings,
        trainer_state: Any,
        while_waiting: Callable[[dict[int, TrainingSample]], None] | None,
    ) -> SamplingRound:
        """Samples and scores this rank's completions, one prompt each; all ranks take part, even without any."""
        started = time.perf_counter()
        completions, error = _catch(generate)
        seconds_generating = time.perf_counter() - started
        overlapped = _OverlappedWork()
        if while_waiting is not None:
            # The work has collectives of its own: either all ranks start it, or none.
            _raise_first(self.all_gather(_as_message(error)), error)
            assert completions is not None
            samples = _samples_without_rewards(
                indices, prompts, completions, mask_truncated=settings.mask_truncated_completions
            )
            overlapped = _OverlappedWork(functools.partial(while_waiting, samples))
        table: RewardTable | None = None
        rollouts: dict[int, Rollout] = {}
        started = time.perf_counter()
        if completions is not None:
            table, error = _catch(functools.partial(self._score, prompts, completions, trainer_state, overlapped))
            if overlapped.error is not None:
                raise overlapped.error
        if completions is not None and table is not None:
            rollouts = {
                index: Rollout(prompt, completion, scores, statuses)
                for index, prompt, completion, scores, statuses in zip(
                    indices, prompts, completions, table.scores, table.statuses, strict=True
                )
            }
        seconds_rewarding = time.perf_counter() - started - overlapped.seconds
        stats, logged, failures = self._exchange(rollouts, table, error)
        assert table is not None
        if self.is_main_rank:
            self._log_failures(stats, failures)
        return SamplingRound(rollouts, table.extras, stats, logged, failures, seconds_generating, seconds_rewarding)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        indices: Sequence[int],
        group_size: int,
        sampling: SamplingSpec,
        seed_scope: str,
        completions_at_once: int | None,
    ) -> list[Completion]:
        """This rank's completions, in the order of `indices`."""
        completions: dict[int, Completion] = {}
        chunk = completions_at_once or max(len(indices), 1)
        for start in range(0, len(indices), chunk):
            by_prompt: dict[int, list[int]] = {}
            for index in indices[start : start + chunk]:
                by_prompt.setdefault(index // group_size, []).append(index)
            requests = []
            for position, members in by_prompt.items():
                prompt, group_indices = prompts[position], tuple(index % group_size for index in members)
                seeds = tuple(completion_seed(self.run_seed, seed_scope, prompt.id, index) for index in group_indices)
                requests.append(GenerationRequest(prompt, seeds, group_indices))
            for members, group in zip(by_prompt.values(), self.engine.generate(requests, sampling), strict=True):
                completions.update(zip(members, group, strict=True))
        return [completions[index] for index in indices]

    def _score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        trainer_state: Any,
        overlapped: Callable[[], None],
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
            while_waiting=overlapped,
        )

    def _exchange(
        self, rollouts: Mapping[int, Rollout], table: RewardTable | None, error: Exception | None
    ) -> tuple[dict[int, CompletionStats], MetricAccumulator, list[RewardFailure]]:
        """Statistics by completion index, `log_metric` values and failures of all ranks.

        Raises:
            Exception: `error`; on ranks without an error of their own, RewardError or TrainingError with its message.
        """
        own_stats = [
            CompletionStats(
                index=index,
                prompt_id=rollout.prompt.id,
                prompt_tokens=len(rollout.prompt.token_ids),
                completion_tokens=len(rollout.completion.token_ids),
                truncated=rollout.completion.is_truncated,
                scores=rollout.scores,
                statuses=rollout.statuses,
            )
            for index, rollout in rollouts.items()
        ]
        own_metrics, own_failures = (table.metrics, table.failures) if table else ({}, ())
        # One collective that every rank enters, whatever happened on it: no rank can be left waiting.
        gathered = self.all_gather((own_stats, own_metrics, own_failures, _as_message(error)))
        rank_stats, rank_metrics, rank_failures, messages = zip(*gathered, strict=True)
        _raise_first(messages, error)
        logged = MetricAccumulator()
        for metrics in rank_metrics:
            for name, values in metrics.items():
                for value in values:
                    logged.add(name, value)
        stats = sorted(itertools.chain(*rank_stats), key=lambda one: one.index)
        return {one.index: one for one in stats}, logged, list(itertools.chain(*rank_failures))

    def _log_failures(self, stats: Mapping[int, CompletionStats], failures: Sequence[RewardFailure]) -> None:
        """Logs how many completions of all ranks have no known reward, and why."""
        for failure in failures:
            logger.warning(
                "Reward function %s: no reward for %d of %d completions, which are left out of the loss.%s",
                failure.message,
                len(failure.indices),
                len(stats),
                f"\n{failure.traceback}" if failure.traceback else "",
            )
        abstained = sum(set(one.statuses) == {RewardStatus.ABSTAINED} for one in stats.values())
        if abstained and not self._logged_abstentions:
            self._logged_abstentions = True
            logger.warning(
                "All reward functions abstained on %d of %d completions, which are left out of the loss. This warning "
                "appears once; the metric rewards/<name>/abstained_share covers the rest of the run.",
                abstained,
                len(stats),
            )


@dataclass
class _OverlappedWork:
    """Log-prob work that runs while rewards are pending; timed separately, and its error is raised separately."""

    work: Callable[[], None] | None = None
    seconds: float = 0.0
    error: Exception | None = None

    def __call__(self) -> None:
        if self.work is not None:
            started = time.perf_counter()
            _, self.error = _catch(self.work)
            self.seconds = time.perf_counter() - started


def _catch(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Returns the result of `work`, or its exception, which the other ranks must hear of before it is raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _samples_without_rewards(
    indices: Sequence[int], prompts: Sequence[Prompt], completions: Sequence[Completion], *, mask_truncated: bool
) -> dict[int, TrainingSample]:
    """Samples by completion index, without advantages. Completions that rewards may leave in the loss are in it."""
    return {
        index: TrainingSample(
            prompt_ids=prompt.token_ids,
            completion_ids=completion.token_ids,
            advantage=0.0,
            has_loss=not (mask_truncated and completion.is_truncated),
            group_has_signal=False,
            behavior_logprobs=completion.behavior_logprobs,
            entropies=completion.entropies,
        )
        for index, prompt, completion in zip(indices, prompts, completions, strict=True)
    }


def _as_message(error: Exception | None) -> tuple[bool, str] | None:
    """What other ranks receive: whether it is a RewardError, and its text."""
    if error is None:
        return None
    is_reward_error = isinstance(error, RewardError)
    return is_reward_error, str(error) if is_reward_error else f"{type(error).__name__}: {error}"


def _raise_first(messages: Sequence[tuple[bool, str] | None], error: Exception | None) -> None:
    """Raises `error` if this rank has one, else the first one that another rank reports."""
    for rank, message in enumerate(messages):
        if message is not None:
            is_reward_error, text = message
            raise error or (
                RewardError(text)
                if is_reward_error
                else TrainingError(f"Process {rank} could not sample or score its completions: {text}")
            )


def _check_failures(rounds: Sequence[SamplingRound], max_failed_share: float) -> None:
    """Counts over all rounds: a later round may have so few completions that one failure is a large share of them."""
    stats = [one for sampled in rounds for one in sampled.stats.values()]
    failed = sum(one.failed for one in stats)
    if failed > max_failed_share * len(stats):
        failures = [failure for sampled in rounds for failure in sampled.failures][:3]
        causes = "; ".join(f"{failure.name}: {failure.kind}, {failure.message}" for failure in failures)
        raise RewardError(
            f"{failed} of {len(stats)} completions have a failed reward ({failed / len(stats):.0%}), more than "
            f"max_failed_reward_share={max_failed_share:.0%}. {causes}. Fix the reward function, let it return None "
            "where it does not apply, or raise max_failed_reward_share."
        )
