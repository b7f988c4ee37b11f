"""The batch arithmetic of a run: the sizes of a rollout, an optimizer step and an epoch. Imports no torch.

    optimizer step   per_device_train_batch_size x gradient_accumulation_steps x processes completions
    rollout          per_device_train_batch_size x steps_per_generation x processes completions, sampled together and
                     used for num_iterations passes

Rules: a rollout consists of whole groups of `num_generations`; either a rollout is a whole number of optimizer steps,
or a step is a whole number of rollouts. Prompts left over at the end of an epoch are dropped and reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grupo.errors import ConfigError
from grupo.utils.messages import pluralize

if TYPE_CHECKING:
    from grupo.config.fields import GRPOFields

_MAX_SUGGESTIONS = 3
_MAX_TRIED_VALUES = 20_000


@dataclass(frozen=True)
class StepPlan:
    """Resolved batch sizes of a run. Counts are over all processes unless stated otherwise."""

    micro_batch_size: int
    """Completions per device; a forward pass has room for this many of the longest ones."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step and device, after it was raised if necessary."""
    original_accumulation: int | None
    """The gradient_accumulation_steps that the user set, if it was raised to fill one group; otherwise None."""
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
    """Optimizer steps per rollout over all passes. 1 where a step uses several rollouts."""
    rollouts_per_step: int
    """Rollouts per optimizer step; 1 where a rollout is used for one or more steps."""
    num_prompts: int | None
    """Rows of the dataset; None: not known yet, like the numbers per epoch."""
    rollouts_per_epoch: int | None
    """Rollouts per epoch, without a last one that would not fill an optimizer step."""
    steps_per_epoch: int | None
    dropped_prompts_per_epoch: int | None

    @classmethod
    def from_config(cls, config: GRPOFields, *, num_prompts: int | None, world_size: int | None = None) -> StepPlan:
        """Raises ConfigError where the settings do not fit together, and suggests settings that do."""
        settings = _BatchSettings(
            per_device_train_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            num_generations=config.num_generations,
            steps_per_generation=config.steps_per_generation,
            generation_batch_size=config.generation_batch_size,
            num_iterations=config.num_iterations,
            world_size=config.world_size if world_size is None else world_size,
            num_prompts=num_prompts,
        )
        violation = _first_violation(settings)
        if violation is not None:
            raise ConfigError(f"{violation} {_suggestions(settings)}")
        return cls._resolve(settings)

    @classmethod
    def _resolve(cls, settings: _BatchSettings) -> StepPlan:
        accumulation = settings.accumulation
        per_forward = settings.per_forward
        window = settings.micro_batches_per_rollout
        prompts_per_rollout, rollouts_per_step = settings.prompts_per_rollout, settings.rollouts_per_step
        steps_per_rollout = max(1, window * settings.num_iterations // accumulation)
        rollouts = steps = dropped = None
        if settings.num_prompts is not None:
            steps_worth = settings.num_prompts // (prompts_per_rollout * rollouts_per_step)
            rollouts = steps_worth * rollouts_per_step
            steps = steps_worth * steps_per_rollout
            dropped = settings.num_prompts - rollouts * prompts_per_rollout
        return cls(
            micro_batch_size=settings.per_device_train_batch_size,
            gradient_accumulation_steps=accumulation,
            original_accumulation=settings.gradient_accumulation_steps if settings.is_accumulation_raised else None,
            steps_per_generation=window,
            num_iterations=settings.num_iterations,
            num_generations=settings.num_generations,
            world_size=settings.world_size,
            completions_per_step=per_forward * accumulation,
            completions_per_rollout=per_forward * window,
            prompts_per_rollout=prompts_per_rollout,
            steps_per_rollout=steps_per_rollout,
            rollouts_per_step=rollouts_per_step,
            num_prompts=settings.num_prompts,
            rollouts_per_epoch=rollouts,
            steps_per_epoch=steps,
            dropped_prompts_per_epoch=dropped,
        )

    def total_steps(self, num_train_epochs: float, max_steps: int = -1) -> int:
        """Optimizer steps of the run, as in transformers: a positive `max_steps` takes precedence over epochs."""
        if max_steps > 0:
            return max_steps
        if self.steps_per_epoch is None:
            raise ConfigError(
                "The number of prompts is unknown, so epochs cannot be counted. Set max_steps to the number of "
                "optimizer steps."
            )
        return math.ceil(num_train_epochs * self.steps_per_epoch)

    def describe(self) -> list[str]:
        """The lines that a run prints before it starts."""
        lines = (self._raise_line(), self._step_line(), self._rollout_line(), self._epoch_line())
        return [line for line in lines if line is not None]

    def _raise_line(self) -> str | None:
        if self.original_accumulation is None:
            return None
        return (
            f"gradient_accumulation_steps raised from {self.original_accumulation} to "
            f"{self.gradient_accumulation_steps}, so that an optimizer step contains one whole group of "
            f"{self.num_generations} completions"
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
class _BatchSettings:
    """Batch sizes as set by the user."""

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
        """Completions per forward pass, over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def is_accumulation_raised(self) -> bool:
        """Whether a step is only a part of one group, and the size of a rollout is not set."""
        completions = self.per_forward * self.gradient_accumulation_steps
        rollout_size_unset = self.steps_per_generation is None and self.generation_batch_size is None
        return rollout_size_unset and completions < self.num_generations and self.num_generations % completions == 0

    @property
    def accumulation(self) -> int:
        return (
            self.num_generations // self.per_forward
            if self.is_accumulation_raised
            else self.gradient_accumulation_steps
        )

    @property
    def micro_batches_per_rollout(self) -> int:
        """Micro-batches per device and rollout."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.per_forward
        return self.accumulation if self.steps_per_generation is None else self.steps_per_generation

    @property
    def prompts_per_rollout(self) -> int:
        return self.per_forward * self.micro_batches_per_rollout // self.num_generations

    @property
    def rollouts_per_step(self) -> int:
        return max(1, self.accumulation // self.micro_batches_per_rollout) if self.num_iterations == 1 else 1


def _first_violation(settings: _BatchSettings) -> str | None:
    """Error message for the first rule that the settings violate; None: they fit together."""
    group = settings.num_generations
    if settings.steps_per_generation is not None and settings.generation_batch_size is not None:
        return (
            f"steps_per_generation={settings.steps_per_generation} and generation_batch_size="
            f"{settings.generation_batch_size} both set the size of a rollout: set one of them."
        )
    if group < 2:
        return f"num_generations={group}: advantages compare the completions of one prompt, which requires at least 2."
    return (
        _partial_forward_pass(settings)
        or _partial_group(settings)
        or _partial_step(settings)
        or _too_few_prompts(settings)
    )


def _partial_forward_pass(settings: _BatchSettings) -> str | None:
    size = settings.generation_batch_size
    if size is None or (size >= settings.per_forward and size % settings.per_forward == 0):
        return None
    return (
        f"generation_batch_size={size} is not a multiple of the {pluralize(settings.per_forward, 'completion')} of one "
        f"forward pass (per_device_train_batch_size={settings.per_device_train_batch_size} x "
        f"{pluralize(settings.world_size, 'process')})."
    )


def _partial_group(settings: _BatchSettings) -> str | None:
    completions = settings.per_forward * settings.micro_batches_per_rollout
    if completions % settings.num_generations == 0:
        return None
    is_set = settings.steps_per_generation is not None or settings.generation_batch_size is not None
    factor_name = "steps per generation" if is_set else "gradient_accumulation_steps"
    return (
        f"A rollout of {pluralize(completions, 'completion')} (per_device_train_batch_size="
        f"{settings.per_device_train_batch_size} x {settings.micro_batches_per_rollout} {factor_name} x "
        f"{pluralize(settings.world_size, 'process')}) is not a whole number of groups of num_generations="
        f"{settings.num_generations}."
    )


def _partial_step(settings: _BatchSettings) -> str | None:
    accumulation, window, passes = settings.accumulation, settings.micro_batches_per_rollout, settings.num_iterations
    if (window * passes) % accumulation == 0 or (passes == 1 and accumulation % window == 0):
        return None
    return (
        f"A rollout of {pluralize(window, 'micro-batch')} x num_iterations={passes} is not a whole number of optimizer "
        f"steps with gradient_accumulation_steps={accumulation}."
    )


def _too_few_prompts(settings: _BatchSettings) -> str | None:
    if settings.num_prompts is None:
        return None
    rollouts = settings.rollouts_per_step
    needed = settings.prompts_per_rollout * rollouts
    if settings.num_prompts >= needed:
        return None
    what = "one rollout" if rollouts == 1 else f"one optimizer step ({rollouts} rollouts)"
    return (
        f"The dataset has {pluralize(settings.num_prompts, 'prompt')}, and {what} needs {needed} "
        f"({needed * settings.num_generations} completions, {settings.num_generations} per prompt)."
    )


def _suggestions(settings: _BatchSettings) -> str:
    """Suggests single changes that fit; otherwise a combination; otherwise the size of the dataset that is needed."""
    changes = [f"{name}={value}" for name, value in _fitting_changes(settings)]
    if len(changes) == 1:
        return f"This fits: {changes[0]}."
    if changes:
        return f"Any one of these fits: {', '.join(changes[:_MAX_SUGGESTIONS])}."
    group, processes = settings.num_generations, settings.world_size
    smallest = replace(
        settings,
        per_device_train_batch_size=group // math.gcd(group, processes),
        gradient_accumulation_steps=1,
        steps_per_generation=None,
        generation_batch_size=None,
    )
    if _first_violation(smallest) is not None:
        return (
            f"With num_generations={group} on {pluralize(processes, 'process')}, the dataset needs at least "
            f"{pluralize(processes // math.gcd(group, processes), 'prompt')}."
        )
    return (
        f"These fit together: per_device_train_batch_size={smallest.per_device_train_batch_size}, "
        "gradient_accumulation_steps=1, steps_per_generation=None, generation_batch_size=None."
    )


def _fitting_changes(settings: _BatchSettings) -> Iterator[tuple[str, int | None]]:
    if settings.steps_per_generation is not None and settings.generation_batch_size is not None:
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
        candidates = {name: _nearby(getattr(settings, name), settings) for name in names if getattr(settings, name)}
    for name, values in candidates.items():
        for value in values:
            changed = replace(settings, **{name: value})  # type: ignore[arg-type]
            if _first_violation(changed) is None and not changed.is_accumulation_raised:
                yield name, value
                break


def _nearby(current: int, settings: _BatchSettings) -> Iterator[int]:
    """Other positive values, nearest first. Whether a value fits repeats within group x accumulation micro-batches."""
    reach = current + settings.num_generations * max(settings.per_forward, settings.gradient_accumulation_steps)
    for distance in range(1, min(reach, _MAX_TRIED_VALUES)):
        if current - distance >= 1:
            yield current - distance
        yield current + distance
