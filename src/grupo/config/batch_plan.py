"""The batch arithmetic of a run, done once: what a rollout, an optimizer step and an epoch consist of; without torch.

    optimizer step   per_device_train_batch_size x gradient_accumulation_steps x processes completions
    rollout          per_device_train_batch_size x steps_per_generation x processes completions, sampled together;
                     num_iterations passes are made over them

Rules: a rollout holds whole groups of `num_generations`; a rollout is used up by whole optimizer steps, or a step
takes whole rollouts. What an epoch has left over is dropped and stated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grupo.errors import ConfigError
from grupo.utils.messages import pluralize

if TYPE_CHECKING:
    from grupo.config.grpo_config import GRPOConfig

_MAX_SUGGESTIONS = 3
_MAX_TRIED_VALUES = 20_000


@dataclass(frozen=True)
class StepPlan:
    """Resolved batch numbers of a run. Counts are over all processes unless they say otherwise."""

    micro_batch_size: int
    """Completions per device, of which the longest have room in one forward pass."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step and device, after a raise."""
    raised_from: int | None
    """What the user had set for accumulation, where it was raised to fill one group; otherwise None."""
    steps_per_generation: int
    """Micro-batches per device and rollout."""
    num_iterations: int
    """Passes over each rollout."""
    num_generations: int
    """Completions per prompt."""
    world_size: int
    """Processes."""
    completions_per_step: int
    completions_per_rollout: int
    prompts_per_rollout: int
    steps_per_rollout: int
    """Optimizer steps from one rollout to the next, all passes included. 1 where a step takes several rollouts."""
    rollouts_per_step: int
    """Rollouts that one optimizer step takes; 1 where a rollout serves one or more steps."""
    num_prompts: int | None
    """Rows of the dataset; None: not known yet, and so are the numbers per epoch."""
    rollouts_per_epoch: int | None
    """Rollouts that are really made: a last one that would fill no whole optimizer step is not."""
    steps_per_epoch: int | None
    dropped_prompts_per_epoch: int | None

    @classmethod
    def from_config(cls, config: GRPOConfig, *, num_prompts: int | None, world_size: int | None = None) -> StepPlan:
        """Raises ConfigError where the numbers do not fit together, with settings that would."""
        numbers = _Numbers(
            per_device_train_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            num_generations=config.num_generations,
            steps_per_generation=config.steps_per_generation,
            generation_batch_size=config.generation_batch_size,
            num_iterations=config.num_iterations,
            world_size=config.world_size if world_size is None else world_size,
            num_prompts=num_prompts,
        )
        misfit = _misfit(numbers)
        if misfit is not None:
            raise ConfigError(f"{misfit} {_advice(numbers)}")
        return cls._of_fitting(numbers)

    @classmethod
    def _of_fitting(cls, numbers: _Numbers) -> StepPlan:
        accumulation = numbers.accumulation
        per_forward = numbers.per_forward
        window = numbers.window
        prompts_per_rollout, rollouts_per_step = numbers.prompts_per_rollout, numbers.rollouts_per_step
        steps_per_rollout = max(1, window * numbers.num_iterations // accumulation)
        rollouts = steps = dropped = None
        if numbers.num_prompts is not None:
            steps_worth = numbers.num_prompts // (prompts_per_rollout * rollouts_per_step)
            rollouts = steps_worth * rollouts_per_step
            steps = steps_worth * steps_per_rollout
            dropped = numbers.num_prompts - rollouts * prompts_per_rollout
        return cls(
            micro_batch_size=numbers.per_device_train_batch_size,
            gradient_accumulation_steps=accumulation,
            raised_from=numbers.gradient_accumulation_steps if numbers.is_raised else None,
            steps_per_generation=window,
            num_iterations=numbers.num_iterations,
            num_generations=numbers.num_generations,
            world_size=numbers.world_size,
            completions_per_step=per_forward * accumulation,
            completions_per_rollout=per_forward * window,
            prompts_per_rollout=prompts_per_rollout,
            steps_per_rollout=steps_per_rollout,
            rollouts_per_step=rollouts_per_step,
            num_prompts=numbers.num_prompts,
            rollouts_per_epoch=rollouts,
            steps_per_epoch=steps,
            dropped_prompts_per_epoch=dropped,
        )

    def total_steps(self, num_train_epochs: float, max_steps: int = -1) -> int:
        """Optimizer steps of the run, as transformers counts them: a positive `max_steps` wins over the epochs."""
        if max_steps > 0:
            return max_steps
        if self.steps_per_epoch is None:
            raise ConfigError(
                "The number of prompts is not known, so epochs cannot be counted. Set max_steps to the number of "
                "optimizer steps."
            )
        return math.ceil(num_train_epochs * self.steps_per_epoch)

    def describe(self) -> list[str]:
        """What a run prints before it starts, one line each."""
        lines = (self._raise_line(), self._step_line(), self._rollout_line(), self._epoch_line())
        return [line for line in lines if line is not None]

    def _raise_line(self) -> str | None:
        if self.raised_from is None:
            return None
        return (
            f"gradient_accumulation_steps raised from {self.raised_from} to {self.gradient_accumulation_steps}, so "
            f"that an optimizer step holds one whole group of {self.num_generations} completions"
        )

    def _step_line(self) -> str:
        groups, rest = divmod(self.completions_per_step, self.num_generations)
        if rest == 0:
            content = f"of {pluralize(groups, 'prompt')}"
        else:
            content = f"({self.completions_per_step / self.num_generations:.3g} groups of {self.num_generations})"
        return (
            f"optimizer step: {pluralize(self.completions_per_step, 'completion')} {content} = {self.micro_batch_size} "
            f"per device x {pluralize(self.gradient_accumulation_steps, 'accumulation step')} x "
            f"{pluralize(self.world_size, 'process')}"
        )

    def _rollout_line(self) -> str:
        completions = pluralize(self.completions_per_rollout, "completion")
        size = f"{completions} of {pluralize(self.prompts_per_rollout, 'prompt')}"
        if self.rollouts_per_step > 1:
            use = f"{self.rollouts_per_step} rollouts per optimizer step"
        else:
            use = f"used for {pluralize(self.steps_per_rollout, 'optimizer step')}"
        passes = f", {self.num_iterations} passes over each completion" if self.num_iterations > 1 else ""
        return f"rollout: {size}, {use}{passes}"

    def _epoch_line(self) -> str | None:
        if self.rollouts_per_epoch is None or self.steps_per_epoch is None:
            return None
        rollouts, steps = self.rollouts_per_epoch, self.steps_per_epoch
        line = f"epoch: {pluralize(rollouts, 'rollout')}, {pluralize(steps, 'optimizer step')}"
        if self.dropped_prompts_per_epoch:
            line += f"; {self.dropped_prompts_per_epoch} of {self.num_prompts} prompts left over and dropped"
        return line


@dataclass(frozen=True)
class _Numbers:
    """What the user set."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_generations: int
    steps_per_generation: int | None
    generation_batch_size: int | None
    num_iterations: int
    world_size: int
    num_prompts: int | None

    @property
    def per_forward(self) -> int:
        """Completions of one forward pass, over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def is_raised(self) -> bool:
        """One step is a smaller part of one group, and nothing was said about the size of a rollout."""
        completions = self.per_forward * self.gradient_accumulation_steps
        window_is_free = self.steps_per_generation is None and self.generation_batch_size is None
        return window_is_free and completions < self.num_generations and self.num_generations % completions == 0

    @property
    def accumulation(self) -> int:
        return self.num_generations // self.per_forward if self.is_raised else self.gradient_accumulation_steps

    @property
    def window(self) -> int:
        """Micro-batches per device and rollout."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.per_forward
        return self.accumulation if self.steps_per_generation is None else self.steps_per_generation

    @property
    def prompts_per_rollout(self) -> int:
        return self.per_forward * self.window // self.num_generations

    @property
    def rollouts_per_step(self) -> int:
        return max(1, self.accumulation // self.window) if self.num_iterations == 1 else 1


def _misfit(numbers: _Numbers) -> str | None:
    """The first rule that the numbers break, as a sentence; None: they fit."""
    group = numbers.num_generations
    if numbers.steps_per_generation is not None and numbers.generation_batch_size is not None:
        return (
            f"steps_per_generation={numbers.steps_per_generation} and generation_batch_size="
            f"{numbers.generation_batch_size} both set the size of a rollout: set one of them."
        )
    if group < 2:
        return f"num_generations={group}: advantages compare the completions of one prompt, which takes at least 2."
    rollout_is_cut = _uneven_rollout(numbers) or _cut_group(numbers)
    return rollout_is_cut or _uneven_steps(numbers) or _too_few_prompts(numbers)


def _uneven_rollout(numbers: _Numbers) -> str | None:
    size = numbers.generation_batch_size
    if size is None or (size >= numbers.per_forward and size % numbers.per_forward == 0):
        return None
    return (
        f"generation_batch_size={size} is not a multiple of the {pluralize(numbers.per_forward, 'completion')} of one "
        f"forward pass (per_device_train_batch_size={numbers.per_device_train_batch_size} x "
        f"{pluralize(numbers.world_size, 'process')})."
    )


def _cut_group(numbers: _Numbers) -> str | None:
    completions = numbers.per_forward * numbers.window
    if completions % numbers.num_generations == 0:
        return None
    of_user = numbers.steps_per_generation is not None or numbers.generation_batch_size is not None
    window_name = "steps per generation" if of_user else "gradient_accumulation_steps"
    return (
        f"A rollout of {pluralize(completions, 'completion')} (per_device_train_batch_size="
        f"{numbers.per_device_train_batch_size} x {numbers.window} {window_name} x "
        f"{pluralize(numbers.world_size, 'process')}) does not hold whole groups of num_generations="
        f"{numbers.num_generations}."
    )


def _uneven_steps(numbers: _Numbers) -> str | None:
    accumulation, window, passes = numbers.accumulation, numbers.window, numbers.num_iterations
    if (window * passes) % accumulation == 0 or (passes == 1 and accumulation % window == 0):
        return None
    return (
        f"A rollout of {pluralize(window, 'micro-batch')} x num_iterations={passes} is not used up by whole optimizer "
        f"steps of gradient_accumulation_steps={accumulation}."
    )


def _too_few_prompts(numbers: _Numbers) -> str | None:
    if numbers.num_prompts is None:
        return None
    rollouts = numbers.rollouts_per_step
    needed = numbers.prompts_per_rollout * rollouts
    if numbers.num_prompts >= needed:
        return None
    what = "one rollout" if rollouts == 1 else f"one optimizer step ({rollouts} rollouts)"
    return (
        f"The dataset has {pluralize(numbers.num_prompts, 'prompt')}, and {what} needs {needed} "
        f"({needed * numbers.num_generations} completions, {numbers.num_generations} per prompt)."
    )


def _advice(numbers: _Numbers) -> str:
    """Settings that fit: one changed number each, else a set of them, else the size of a dataset that would do."""
    settings = [f"{name}={value}" for name, value in _fitting_changes(numbers)]
    if len(settings) == 1:
        return f"This fits: {settings[0]}."
    if settings:
        return f"Any one of these fits: {', '.join(settings[:_MAX_SUGGESTIONS])}."
    group, processes = numbers.num_generations, numbers.world_size
    smallest = replace(
        numbers,
        per_device_train_batch_size=group // math.gcd(group, processes),
        gradient_accumulation_steps=1,
        steps_per_generation=None,
        generation_batch_size=None,
    )
    if _misfit(smallest) is not None:
        return (
            f"With num_generations={group} on {pluralize(processes, 'process')} it takes at least "
            f"{pluralize(processes // math.gcd(group, processes), 'prompt')}."
        )
    return (
        f"These fit together: per_device_train_batch_size={smallest.per_device_train_batch_size}, "
        "gradient_accumulation_steps=1, steps_per_generation=None, generation_batch_size=None."
    )


def _fitting_changes(numbers: _Numbers) -> Iterator[tuple[str, int | None]]:
    if numbers.steps_per_generation is not None and numbers.generation_batch_size is not None:
        names: tuple[str, ...] = ("steps_per_generation", "generation_batch_size")
        candidates: dict[str, Iterator[int | None]] = {name: iter((None,)) for name in names}
    else:
        names = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_generations",
            "steps_per_generation",
            "generation_batch_size",
        )
        candidates = {name: _nearby(getattr(numbers, name), numbers) for name in names if getattr(numbers, name)}
    for name, values in candidates.items():
        for value in values:
            changed = replace(numbers, **{name: value})  # type: ignore[arg-type]
            if _misfit(changed) is None and not changed.is_raised:
                yield name, value
                break


def _nearby(current: int, numbers: _Numbers) -> Iterator[int]:
    """Other positive numbers, nearest first. Every fit recurs within group x accumulation micro-batches."""
    reach = current + numbers.num_generations * max(numbers.per_forward, numbers.gradient_accumulation_steps)
    for distance in range(1, min(reach, _MAX_TRIED_VALUES)):
        if current - distance >= 1:
            yield current - distance
        yield current + distance
