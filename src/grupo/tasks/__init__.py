"""Built-in tasks: prompts to train on, held-out prompts, and the rewards that suit them, made from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grupo.errors import ConfigError

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Prompts to train on and prompts that training never sees."""

    name: str
    description: str
    train: list[Row]
    held_out: list[Row]
    rewards: dict[str, dict[str, Any]]
    """Built-in rewards that suit the task, by name, with their arguments."""
    levels: tuple[str, ...] = ()
    """Description of each difficulty level, from level 1 on; empty for a task without levels."""


def user_prompt(question: str) -> list[dict[str, str]]:
    """A question as a conversation of one message."""
    return [{"role": "user", "content": question}]


def check_levels(name: str, levels: Sequence[Any], highest: int | None) -> None:
    """
    Raises:
        ConfigError: the task has no such level (`highest` None: any from 1 on), or a level is named twice.
    """
    for level in levels or [None]:
        if not isinstance(level, int) or isinstance(level, bool) or not 1 <= level <= (highest or level):
            known = "1 is the easiest" if highest is None else f"it has the levels 1 to {highest}"
            raise ConfigError(f"Task {name!r} has no level {level!r}: {known}.")
    if len(set(levels)) < len(levels):
        raise ConfigError(f"Task {name!r}: level={list(levels)} names a level twice.")
