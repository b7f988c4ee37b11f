"""Built-in tasks: generated offline from a seed, split into training and held-out prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grupo.errors import ConfigError
from grupo.names import nearest

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Prompts to train on and prompts that training never sees."""

    name: str
    description: str
    train: list[Row]
    held_out: list[Row]
    rewards: dict[str, dict[str, Any]]
    """The built-in rewards that suit the task, with their arguments."""


def make_task(name: str, seed: int = 0) -> Task:
    """Builds a built-in task.

    Raises:
        ConfigError: unknown name.
    """
    if name not in TASKS:
        raise ConfigError(f"There is no task {name!r}.{nearest(name, TASKS)} Built-in tasks: {', '.join(TASKS)}.")
    return TASKS[name](seed)


def times_tables(seed: int) -> Task:
    """Products of two numbers from 2 to 12.

    A product and its mirror are one fact, so both orders of a pair are on the same side of the split. One pair is held
    out of each run of neighbours in the table, so that held-out products are as hard as the others.
    """
    pairs = sorted(itertools.combinations_with_replacement(range(2, 13), 2), key=lambda pair: (pair[1], pair[0]))
    choice = random.Random(f"times-tables, seed {seed}").choice
    bounds = [round(index * len(pairs) / HELD_OUT_PAIRS) for index in range(HELD_OUT_PAIRS + 1)]
    held_out = [choice(pairs[start:end]) for start, end in itertools.pairwise(bounds)]
    return Task(
        name="times-tables",
        description="What is a * b? with 2 <= a, b <= 12; 20 of the 66 pairs are held out, in both orders.",
        train=_products([pair for pair in pairs if pair not in held_out]),
        held_out=_products(held_out),
        rewards={"number_match": {}},
    )


HELD_OUT_PAIRS = 20


def _products(pairs: list[tuple[int, int]]) -> list[Row]:
    orders = [order for a, b in pairs for order in ([(a, b), (b, a)] if a != b else [(a, b)])]
    return [{"prompt": [{"role": "user", "content": f"What is {a} * {b}?"}], "answer": str(a * b)} for a, b in orders]


def short_stories(seed: int) -> Task:
    """Open questions to be answered at a given length; what counts is the number of tokens alone."""
    subjects = [
        "a lighthouse", "the sea", "a lost key", "an old bicycle", "the first snow", "a night train", "a paper boat",
        "a garden", "a clock", "the moon", "a market", "a storm", "a letter", "a bridge", "a violin", "a fox",
        "a map", "a river", "a kite", "an island", "a mirror", "a library", "a candle", "a stone",
    ]  # fmt: skip
    questions = [
        "Tell me about {}.",
        "Write a short story about {}.",
        "Describe {} to a child.",
        "Why do people like {}?",
    ]
    rows: list[Row] = [
        {"prompt": [{"role": "user", "content": question.format(subject)}]}
        for subject in subjects
        for question in questions
    ]
    random.Random(f"short-stories, seed {seed}").shuffle(rows)
    return Task(
        name="short-stories",
        description="Open questions; meant for a reward on the length of the answer.",
        train=rows[16:],
        held_out=rows[:16],
        rewards={"token_length": {"target": 50}},
    )


TASKS: dict[str, Callable[[int], Task]] = {"times-tables": times_tables, "short-stories": short_stories}
