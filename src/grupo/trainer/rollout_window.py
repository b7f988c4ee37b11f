"""The rollout window: from prompts to the training samples of a few optimizer steps."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from grupo.algo.advantages import AdvantageSettings
from grupo.config.batch_plan import StepPlan
from grupo.data.prompt_stream import PromptStream
from grupo.policy.forward_backward import ForwardBackward
from grupo.policy.reference import Reference
from grupo.rollout.collector import RolloutCollector, RolloutResult
from grupo.rollout.groups import DynamicSampling
from grupo.rollout.schedule import schedule_completions
from grupo.sampling import SamplingSpec
from grupo.trainer.training_log import TrainingLog
from grupo.types import TrainingSample


@dataclass(eq=False, kw_only=True)
class RolloutWindow:
    """The rollouts that `plan.steps_per_rollout` optimizer steps train on, and what stays fixed while they do.

    A window is filled when its first step asks for samples: prompts from the stream, completions, rewards and
    advantages from the collector, `old_logprobs` and `reference_logprobs` from the policy and the reference. These need
    no rewards, so they are computed while rewards are pending, where a reward function asked for it.
    """

    plan: StepPlan
    stream: PromptStream
    collector: RolloutCollector
    forward_backward: ForwardBackward
    sampling: SamplingSpec
    advantages: AdvantageSettings
    dynamic_sampling: DynamicSampling | None
    reference: Reference | None
    log: TrainingLog
    on_rollout: Callable[[RolloutResult], None]
    """Called after each rollout, to record it."""
    world_size: int
    rank: int
    index: int | None = None
    """Number of the open window; None before the first one."""
    steps: list[list[TrainingSample]] = dataclasses.field(default_factory=list)
    """This rank's samples of each optimizer step of the open window."""

    def samples(self, model: nn.Module, trainer_state: Any) -> list[TrainingSample]:
        """This rank's samples of the coming optimizer step, from the open window or a new one.

        Args:
            model: the module that the training step was given.
            trainer_state: its `global_step` decides; reward functions get a copy.
        """
        index, step = divmod(trainer_state.global_step, self.plan.steps_per_rollout)
        if self.index != index:
            assert step == 0, "a checkpoint in the middle of a window holds the window"
            self.steps = self._fill(model, index, trainer_state)
            self.index = index
        return self.steps[step]

    def _fill(self, model: nn.Module, index: int, trainer_state: Any) -> list[list[TrainingSample]]:
        """Collects the rollouts of a window and assigns their samples to its optimizer steps."""
        plan = self.plan
        schedule = schedule_completions(
            window_size=plan.completions_per_rollout * plan.rollouts_per_step,
            rollout_size=plan.completions_per_rollout,
            passes=plan.num_iterations,
            step_size=plan.completions_per_step,
            world_size=self.world_size,
            rank=self.rank,
        )
        own = sorted({number for numbers in schedule for number in numbers})
        prompts = self.stream.window(index)
        samples: dict[int, TrainingSample] = {}
        with_logprobs: dict[int, TrainingSample] = {}
        for rollout in range(plan.rollouts_per_step):
            first = rollout * plan.completions_per_rollout
            is_last = rollout + 1 == plan.rollouts_per_step
            overlaps = is_last and self._overlaps_with_rewards()
            result = self.collector.collect(
                prompts[rollout * plan.prompts_per_rollout : (rollout + 1) * plan.prompts_per_rollout],
                [number - first for number in own if first <= number < first + plan.completions_per_rollout],
                group_size=plan.num_generations,
                sampling=self.sampling,
                settings=self.advantages,
                # A copy: a reward function must not be able to move the run.
                trainer_state=copy.copy(trainer_state),
                dynamic_sampling=self.dynamic_sampling,
                while_waiting=functools.partial(self._logprobs_while_waiting, model, samples, first, with_logprobs)
                if overlaps
                else None,
            )
            self._record(result)
            samples.update(_shifted(result.samples, first))
        if not overlaps:
            self._add_fixed_logprobs(model, samples, with_logprobs)
        complete = {
            number: dataclasses.replace(
                samples[number],
                old_logprobs=with_logprobs[number].old_logprobs,
                reference_logprobs=with_logprobs[number].reference_logprobs,
            )
            for number in own
        }
        return [[complete[number] for number in numbers] for numbers in schedule]

    def _overlaps_with_rewards(self) -> bool:
        """Whether log-probs are computed while rewards are pending: not where rewards decide what is computed."""
        has_fixed_logprobs = self.plan.steps_per_rollout > 1 or self.reference is not None
        rewards_decide = self.dynamic_sampling is not None or self.advantages.num_generations_trained is not None
        return has_fixed_logprobs and not rewards_decide and self.collector.rewards.overlaps_logprobs

    def _logprobs_while_waiting(
        self,
        model: nn.Module,
        earlier: Mapping[int, TrainingSample],
        first: int,
        into: dict[int, TrainingSample],
        last: Mapping[int, TrainingSample],
    ) -> None:
        """Adds log-probs to the window whose `last` rollout, from completion `first` on, has no rewards yet."""
        self._add_fixed_logprobs(model, {**earlier, **_shifted(last, first)}, into)

    def _add_fixed_logprobs(
        self, model: nn.Module, samples: Mapping[int, TrainingSample], into: dict[int, TrainingSample]
    ) -> None:
        """Puts the samples, with the log-probs that stay fixed in the window, into `into`."""
        started = time.perf_counter()
        numbers = sorted(samples)
        filled = self.forward_backward.add_fixed_logprobs(
            model,
            [samples[number] for number in numbers],
            with_old=self.plan.steps_per_rollout > 1,
            reference=self.reference,
        )
        into.update(zip(numbers, filled, strict=True))
        self.log.add_time("logprobs", time.perf_counter() - started)

    def _record(self, result: RolloutResult) -> None:
        self.log.metrics.merge(result.metrics)
        for name, value in self.stream.update(result.outcomes).items():
            self.log.metrics.add(name, value)
        self.log.add_time("generating", result.seconds_generating)
        self.log.add_time("rewarding", result.seconds_rewarding)
        self.on_rollout(result)

    def close(self, stream: PromptStream, dynamic_sampling: DynamicSampling | None) -> None:
        """Drops the open window; the next one draws from `stream`."""
        self.index, self.steps = None, []
        self.stream, self.dynamic_sampling = stream, dynamic_sampling

    def state_dict(self) -> dict[str, Any]:
        """Plain values of the open window and of the prompt stream."""
        steps = [[dataclasses.asdict(sample) for sample in step] for step in self.steps]
        window = None if self.index is None else (self.index, steps)
        return {"window": window, "prompt_stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index, steps = state["window"] or (None, [])
        self.steps = [[TrainingSample(**record) for record in step] for step in steps]
        self.stream.load_state_dict(state["prompt_stream"])


def _shifted(samples: Mapping[int, TrainingSample], first: int) -> dict[int, TrainingSample]:
    """The samples of a rollout by their number in the window."""
    return {number + first: sample for number, sample in samples.items()}
