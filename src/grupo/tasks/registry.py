"""Tasks by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from grupo.data.decontamination import find_overlap
from grupo.errors import ConfigError
from grupo.tasks import Task
from grupo.tasks.reasoning_gym import BUILT_IN, PREFIX, built_in_task, gym_task
from grupo.tasks.short_stories import short_stories
from grupo.tasks.times_tables import times_tables
from grupo.utils.messages import did_you_mean

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "times-tables": times_tables,
        **{name: functools.partial(built_in_task, name) for name in BUILT_IN},
        "short-stories": short_stories,
    }
)
"""name -> function of the seed and of the task's arguments."""


def make_task(name: str, seed: int = 0, **arguments: Any) -> Task:
    """Makes a built-in task, or one of reasoning-gym as `reasoning-gym:NAME`.

    Args:
        name: see `TASKS`.
        seed: the same seed gives the same task on every machine; tasks of reasoning-gym, with the same version of it.
        arguments: of the task. `level` is the difficulty. Tasks made by reasoning-gym mix the levels of a list evenly,
            have `level` as a column, and take the numbers of prompts as `train` and `held_out`.

    Raises:
        ConfigError: unknown name or argument, no such level, more prompts than there are different ones, or
            reasoning-gym is needed and not installed.
    """
    if name.startswith(PREFIX):
        factory: Callable[..., Task] = functools.partial(gym_task, name.removeprefix(PREFIX))
    elif name in TASKS:
        factory = TASKS[name]
    else:
        raise ConfigError(
            f"There is no task {name!r}.{did_you_mean(name, TASKS)} Built-in tasks: {', '.join(TASKS)}, {PREFIX}NAME."
        )
    try:
        inspect.signature(factory).bind(seed, **arguments)
    except TypeError as error:
        known = [one for one in inspect.signature(factory).parameters if one != "seed"]
        raise ConfigError(f"Task {name!r}: {error}. It takes ({', '.join(known)}).") from None
    task = factory(seed, **arguments)
    assert not find_overlap(task.train, task.held_out), f"{name} trains on held-out prompts"
    return task


def task_rewards(name: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    """The rewards of a task; reasoning-gym draws nothing for that, because drawing can take a while."""
    if name.startswith(PREFIX):
        return {"reasoning_gym": {}}
    return BUILT_IN[name].rewards if name in BUILT_IN else make_task(name, **arguments).rewards


def describe_tasks() -> list[str]:
    """Lines that list all tasks with their levels and a sample. Nothing is drawn: that takes reasoning-gym seconds."""
    lines = []
    for name in TASKS:
        if name in BUILT_IN:
            spec = BUILT_IN[name]
            description, levels, rewards = spec.description, tuple(spec.levels), spec.rewards
            sizes = "It needs reasoning-gym"
            question, answer = spec.sample
        else:
            task = make_task(name)
            description, levels, rewards = task.description, task.levels, task.rewards
            sizes = f"{len(task.train)} training prompts, {len(task.held_out)} held out"
            question, answer = task.train[0]["prompt"][0]["content"], task.train[0].get("answer", "")
        lines.append(f"{name}: {description} {sizes}; rewards {', '.join(rewards)}")
        lines += [f"    level {level}: {text}" for level, text in enumerate(levels, start=1)]
        lines.append(f"    sample: {question!r}" + (f" -> {answer!r}" if answer else ""))
    return [*lines, f"{PREFIX}NAME: any task of reasoning-gym, with its own scorer; pip install reasoning-gym"]
