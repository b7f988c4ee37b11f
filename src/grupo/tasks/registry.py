"""Built-in tasks: generated offline from a seed, split into training and held-out prompts."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grupo.data.decontamination import normalised, shared_items
from grupo.errors import ConfigError
from grupo.tasks import generators
from grupo.tasks.generators import Generator, Item
from grupo.tasks.reasoning_gym import PREFIX, gym_rows
from grupo.tasks.word_problems import word_problems
from grupo.utils.messages import did_you_mean

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
    levels: tuple[str, ...] = ()
    """What each difficulty level asks for, from level 1 on; empty where there are none."""


def make_task(name: str, seed: int = 0, **arguments: Any) -> Task:
    """Builds a built-in task, or one of reasoning-gym as `reasoning-gym:NAME`.

    Args:
        name: see `TASKS`.
        seed: the same seed gives the same task, on every machine.
        arguments: of the task. `level` is the difficulty; drawn tasks mix the levels of a list evenly, have `level` as
            a column, and take the numbers of prompts as `train` and `held_out`.

    Raises:
        ConfigError: unknown name or argument, a level that is not there, or more prompts than there are different ones.
    """
    if name.startswith(PREFIX):
        factory: Callable[..., Task] = functools.partial(gym_task, name.removeprefix(PREFIX))
    elif name in TASKS:
        factory = TASKS[name]
    else:
        raise ConfigError(
            f"There is no task {name!r}.{did_you_mean(name, TASKS)} Built-in tasks: {', '.join(TASKS)}; and "
            f"{PREFIX}NAME."
        )
    try:
        inspect.signature(factory).bind(seed, **arguments)
    except TypeError as error:
        known = [parameter for parameter in inspect.signature(factory).parameters if parameter != "seed"]
        raise ConfigError(f"Task {name!r}: {error}. It takes ({', '.join(known)}).") from None
    task = factory(seed, **arguments)
    assert not shared_items(task.train, task.held_out), f"{name} trains on held-out prompts"
    return task


def task_rewards(name: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    """The rewards of a task, without drawing the items of reasoning-gym, which can take a while."""
    return {"reasoning_gym": {}} if name.startswith(PREFIX) else make_task(name, **arguments).rewards


def times_tables(seed: int, level: int = 1) -> Task:
    """Products of two numbers from 2 on.

    A product and its mirror are one fact, so both orders of a pair are on the same side of the split. One pair is held
    out of each run of neighbours in the table, so that held-out products are as hard as the others.
    """
    _check_levels("times-tables", [level], len(LARGEST_FACTORS))
    largest = LARGEST_FACTORS[level - 1]
    factors = itertools.combinations_with_replacement(range(2, largest + 1), 2)
    pairs = sorted(factors, key=lambda pair: (pair[1], pair[0]))
    choice = random.Random(f"times-tables, seed {seed}").choice
    parts = round(HELD_OUT_SHARE * len(pairs))
    bounds = [round(index * len(pairs) / parts) for index in range(parts + 1)]
    held_out = [choice(pairs[start:end]) for start, end in itertools.pairwise(bounds)]
    kept = set(pairs).difference(held_out)
    return Task(
        name="times-tables",
        description=f"What is a * b? with 2 <= a, b <= {largest}; {parts} of the {len(pairs)} pairs are held out, in "
        "both orders.",
        train=_products([pair for pair in pairs if pair in kept]),
        held_out=_products(held_out),
        rewards={"number_match": {}},
        levels=tuple(f"up to {factor}" for factor in LARGEST_FACTORS),
    )


HELD_OUT_SHARE = 0.3
LARGEST_FACTORS = (12, 20, 40, 99)


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


def drawn_task(
    name: str,
    generator: Generator,
    seed: int,
    level: int | Sequence[int] = 1,
    train: int = 400,
    held_out: int = 100,
) -> Task:
    """A task whose items are drawn until there are enough different ones.

    The held-out items come first, so that they stay the same whatever `train` is.
    """
    levels: list[Any] = list(level) if isinstance(level, (list, tuple)) else [level]
    _check_levels(name, levels, len(generator.levels))
    _check_sizes(name, train, held_out)
    taken: set[Hashable] = set()
    randoms = {one: random.Random(f"{name}, level {one}, seed {seed}") for one in levels}
    parts: list[list[Row]] = []
    for size in (held_out, train):
        rows: list[Row] = []
        for place, one in enumerate(levels):
            count = size // len(levels) + (place < size % len(levels))
            rows += [_row(item, one) for item in _different(name, generator, randoms[one], one, count, taken)]
        parts.append(rows)
    for rows in parts:
        random.Random(f"{name}, order, seed {seed}").shuffle(rows)
    return Task(
        name=name,
        description=generator.description,
        train=parts[1],
        held_out=parts[0],
        rewards=generator.rewards,
        levels=generator.levels,
    )


MISSES = 1000
"""After so many draws in a row without a new item, a level is taken to have no more of them."""


def _different(
    name: str, generator: Generator, draws: random.Random, level: int, count: int, taken: set[Hashable]
) -> list[Item]:
    """`count` items with keys and questions that are not `taken`, which takes up theirs."""
    items: list[Item] = []
    misses = 0
    while len(items) < count and misses < MISSES:
        item = generator.draw(draws, level)
        marks = set() if item is None else {item.key, normalised(item.question)}
        if item is None or marks & taken:
            misses += 1
            continue
        taken |= marks
        items.append(item)
        misses = 0
    if len(items) < count:
        raise ConfigError(
            f"Task {name!r} has too few different items at level {level}: {len(items)} more were found where {count} "
            "are wanted. Set task_arguments.train and held_out lower, or take other levels in."
        )
    return items


def _row(item: Item, level: int) -> Row:
    prompt = [{"role": "user", "content": item.question}]
    return {"prompt": prompt, "answer": item.answer, "level": level, **item.columns}


def gym_task(
    name: str,
    seed: int,
    level: int | None = None,
    train: int = 400,
    held_out: int = 100,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Task:
    """A task of reasoning-gym, with its own scorer as the reward; `settings` are those of its configuration class."""
    _check_sizes(PREFIX + name, train, held_out)
    if level is not None:
        _check_levels(PREFIX + name, [level], None)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"Task {PREFIX + name!r}: settings={settings!r:.80} is no mapping of names to values.")
    rows = gym_rows(name, seed, train + held_out, level, dict(settings))
    return Task(
        name=PREFIX + name,
        description=f"The task {name} of reasoning-gym.",
        train=rows[held_out:],
        held_out=rows[:held_out],
        rewards=task_rewards(PREFIX + name),
    )


def _check_levels(name: str, levels: Sequence[Any], highest: int | None) -> None:
    for level in levels or [None]:
        if not isinstance(level, int) or isinstance(level, bool) or not 1 <= level <= (highest or level):
            known = "1 is the easiest" if highest is None else f"it has the levels 1 to {highest}"
            raise ConfigError(f"Task {name!r} has no level {level!r}: {known}.")
    if len(set(levels)) < len(levels):
        raise ConfigError(f"Task {name!r}: level={list(levels)} names a level twice.")


def _check_sizes(name: str, train: Any, held_out: Any) -> None:
    for what, size, least in (("train", train, 1), ("held_out", held_out, 0)):
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ConfigError(f"Task {name!r}: {what}={size!r} is no number of prompts from {least} on.")


TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "times-tables": times_tables,
        "arithmetic": functools.partial(drawn_task, "arithmetic", generators.arithmetic),
        "countdown": functools.partial(drawn_task, "countdown", generators.countdown),
        "sorting": functools.partial(drawn_task, "sorting", generators.sorting),
        "letter-counting": functools.partial(drawn_task, "letter-counting", generators.letter_counting),
        "word-problems": functools.partial(drawn_task, "word-problems", word_problems),
        "short-stories": short_stories,
    }
)
"""name -> function of the seed and of the task's arguments."""
