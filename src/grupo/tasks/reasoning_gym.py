"""Tasks whose items come from the library reasoning-gym: some built in, with levels, and all others by name.

The entries of built-in tasks are checked, and those with a wrong or ambiguous answer are skipped: some generators round
a quotient down, or count letters whatever their case. Rewards are grupo's own for these tasks: the scorers of
reasoning-gym pay 0.01 to 0.05 for a wrong answer, `number_sorting` accepts numbers that are off by 1, `gsm_symbolic`
reads the first number of a text without its sign, and `countdown` evaluates the answer.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from grupo.data.decontamination import normalize_text
from grupo.errors import ConfigError
from grupo.rewards.verifiers.puzzles import countdown_fault, import_reasoning_gym
from grupo.tasks import Row, Task, check_levels, user_prompt
from grupo.utils.messages import did_you_mean

PREFIX = "reasoning-gym:"
DRAWS_PER_ITEM = 20
"""Draws for each item after which a task is taken to have no more different ones."""
LARGEST_RESULT = 100_000

Entry = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One question of a task."""

    question: str
    answer: str
    key: Hashable
    """Equal for items of which one gives the other away: the same numbers in another order, other names in a story."""
    columns: Row = field(default_factory=dict)
    """Columns that rewards need in addition to the answer."""


@dataclass(frozen=True)
class BuiltInTask:
    """A task whose levels are settings of one dataset of reasoning-gym."""

    description: str
    dataset: str
    levels: Mapping[str, Row]
    """Description of each level, from level 1 on -> fields of the dataset's configuration class."""
    to_item: Callable[[Entry, int], Item | None]
    """The item of an entry drawn for a level; None for an entry that cannot be used."""
    rewards: dict[str, dict[str, Any]]
    sample: tuple[str, str]
    """Question and answer of the first held-out item of seed 0."""


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
        check_levels(PREFIX + name, [level], None)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"Task {PREFIX + name!r}: settings={settings!r:.80} is not a mapping of names to values.")
    size = DRAWS_PER_ITEM * (train + held_out)
    items = _items(_dataset(name, settings, level, seed, size), size, level, functools.partial(_whole_entry, name))
    rows = _take(PREFIX + name, items, train + held_out, level, set())
    return Task(
        name=PREFIX + name,
        description=f"The task {name} of reasoning-gym.",
        train=rows[held_out:],
        held_out=rows[:held_out],
        rewards={"reasoning_gym": {}},
    )


def built_in_task(name: str, seed: int, level: int | Sequence[int] = 1, train: int = 400, held_out: int = 100) -> Task:
    """A task of `BUILT_IN`.

    The held-out items are drawn first, so that they stay the same whatever `train` is.
    """
    task = BUILT_IN[name]
    levels: list[Any] = list(level) if isinstance(level, (list, tuple)) else [level]
    check_levels(name, levels, len(task.levels))
    _check_sizes(name, train, held_out)
    size = DRAWS_PER_ITEM * (train + held_out)
    items: dict[int, Iterator[Item]] = {}
    for one in levels:
        # reasoning-gym seeds each entry with seed + index: neighbouring seeds would share nearly all entries.
        own_seed = random.Random(f"{name}, level {one}, seed {seed}").getrandbits(31)
        dataset = _dataset(task.dataset, list(task.levels.values())[one - 1], None, own_seed, size)
        items[one] = _items(dataset, size, one, task.to_item)
    taken: set[Hashable] = set()
    sides: list[list[Row]] = []
    for count in (held_out, train):
        rows: list[Row] = []
        for place, one in enumerate(levels):
            rows += _take(name, items[one], count // len(levels) + (place < count % len(levels)), one, taken)
        random.Random(f"{name}, order, seed {seed}").shuffle(rows)
        sides.append(rows)
    return Task(name, task.description, sides[1], sides[0], task.rewards, tuple(task.levels))


def _check_sizes(name: str, train: Any, held_out: Any) -> None:
    for what, size, least in (("train", train, 1), ("held_out", held_out, 0)):
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ConfigError(f"Task {name!r}: {what}={size!r} must be a number of prompts, at least {least}.")


def _dataset(name: str, settings: Mapping[str, Any], level: int | None, seed: int, size: int) -> Any:
    """A dataset of reasoning-gym.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such dataset, no levels for it, or rejects a setting.
    """
    import_reasoning_gym()
    from reasoning_gym.factory import CURRICULA, DATASETS

    if name not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no task {name!r}.{did_you_mean(name, DATASETS)} It has {len(DATASETS)} tasks."
        )
    if level is not None and name not in CURRICULA:
        raise ConfigError(f"level={level}: the task {name!r} of reasoning-gym has no levels. Leave level out.")
    dataset_class, config_class = DATASETS[name]
    fields = {**settings, "seed": seed, "size": size}
    try:
        if level is None:
            config = config_class(**fields)
        else:
            curriculum = CURRICULA[name]()
            curriculum.set_global_level(level - 1)
            config = curriculum.generate_configuration(fields)
        config.validate()
        return dataset_class(config=config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym rejects the settings of {name!r}: {error}") from error


def _items(dataset: Any, size: int, level: int | None, to_item: Callable[[Entry, Any], Item | None]) -> Iterator[Item]:
    for index in range(size):
        try:
            item = to_item(dataset[index], level)
        except (ValueError, RuntimeError):  # some generators give up on some seeds
            continue
        if item is not None:
            yield item


def _take(name: str, items: Iterator[Item], count: int, level: int | None, taken: set[Hashable]) -> list[Row]:
    """Rows of the next `count` items whose keys and questions are not in `taken`, which gets theirs.

    Raises:
        ConfigError: there are too few.
    """
    rows: list[Row] = []
    while len(rows) < count:
        item = next(items, None)
        if item is None:
            raise ConfigError(
                f"Task {name!r} has too few different items{'' if level is None else f' at level {level}'}: "
                f"{len(rows)} more were found where {count} are needed. Lower train and held_out of task_arguments, or "
                "choose other levels or settings."
            )
        keys = {item.key, normalize_text(item.question)}
        if not keys & taken:
            taken |= keys
            row = {"prompt": user_prompt(item.question), "answer": item.answer, **item.columns}
            rows.append(row if level is None else {**row, "level": level})
    return rows


# From entries to items -----------------------------------------------------------------------------------------------


def _whole_entry(name: str, entry: Entry, level: int | None) -> Item:
    entry["metadata"].setdefault("source_dataset", name)
    return Item(entry["question"], entry["answer"], normalize_text(entry["question"]), {"entry": entry})


def _arithmetic(entry: Entry, level: int) -> Item | None:
    from sympy import sympify

    expression = entry["metadata"]["expression"]
    if abs(int(entry["answer"])) > LARGEST_RESULT or sympify(expression) != int(entry["answer"]):
        return None
    return Item(f"What is {expression}?", entry["answer"], tuple(sorted(expression.split())))


def _countdown(entry: Entry, level: int) -> Item | None:
    numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
    if target in numbers or countdown_fault(entry["answer"], numbers, target):
        return None
    question = (
        f"Combine the numbers {', '.join(map(str, numbers))} with + - * / and parentheses so that the result is "
        f"{target}. Use each number at most once. Write the expression, and nothing else, in the last line."
    )
    return Item(question, entry["answer"], (tuple(sorted(numbers)), target), {"numbers": numbers, "target": target})


def _sorting(entry: Entry, level: int) -> Item:
    order = entry["metadata"]["direction"]
    numbers = [f"{float(number) + 0.0:g}" for number in entry["metadata"]["original_numbers"]]  # + 0.0: no -0
    question = (
        f"Sort these numbers in {order} order: {', '.join(numbers)}. Write them in the last line, separated by commas."
    )
    ordered = sorted(numbers, key=float, reverse=order == "descending")
    return Item(question, ", ".join(ordered), tuple(sorted(numbers)))


def _letter_counting(entry: Entry, level: int) -> Item | None:
    letter, words = entry["metadata"]["target_letter"], entry["metadata"]["span"]
    if not letter.isalpha() or "".join(words).count(letter) != int(entry["answer"]):
        return None
    return Item(entry["question"], entry["answer"], (letter, tuple(sorted(words))))


_NUMBER = r"(\d+(?:\.\d+)?)"
_CALCULATION = re.compile(rf"(?<![-+*/x(] )(?<![-+*/x(\d.,]){_NUMBER} ?([-+*/x]) ?{_NUMBER} ?= ?{_NUMBER}(?![\d,%])")


def _word_problem(entry: Entry, level: int) -> Item | None:
    """Levels are the steps of the worked solution: up to two, three, four or more."""
    solution = re.sub("[£€$]", "", entry["metadata"]["answer_cot"])
    if not entry["answer"].isdigit() or min(max(solution.count("="), 2), 4) - 1 != level:
        return None
    for left, operator, right, result in _CALCULATION.findall(solution):
        a, b = float(left), float(right)
        value = {"+": a + b, "-": a - b, "/": a / b if b else 0.0}.get(operator, a * b)
        if abs(value - float(result)) > 0.01:
            return None
    return Item(entry["question"], entry["answer"], tuple(sorted(re.findall(r"\d+(?:\.\d+)?", entry["question"]))))


def _arithmetic_level(terms: int, digits: int, operators: str, parentheses: bool = True) -> Row:
    sizes = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
    return {**sizes, "operators": list(operators), "allow_parentheses": parentheses}


def _sorting_level(count: int, smallest: int, largest: int, min_decimals: int = 0, max_decimals: int = 0) -> Row:
    sizes = {"min_numbers": count, "max_numbers": count, "min_value": smallest, "max_value": largest}
    return {**sizes, "min_decimals": min_decimals, "max_decimals": max_decimals}


BUILT_IN: Mapping[str, BuiltInTask] = MappingProxyType(
    {
        "arithmetic": BuiltInTask(
            "Sums, differences, products and quotients of whole numbers; the usual precedence holds.",
            "basic_arithmetic",
            {
                "a + b and a - b up to 100": _arithmetic_level(2, 2, "+-", parentheses=False),
                "3 numbers up to 9, + - * and parentheses": _arithmetic_level(3, 1, "+-*"),
                "4 numbers up to 99, + - * and parentheses": _arithmetic_level(4, 2, "+-*"),
                "5 numbers up to 99, + - * and parentheses": _arithmetic_level(5, 2, "+-*"),
                "6 numbers up to 99, + - * / and parentheses": _arithmetic_level(6, 2, "+-*/"),
            },
            _arithmetic,
            {"number_match": {}},
            ("What is 12 + 90?", "102"),
        ),
        "countdown": BuiltInTask(
            "Reach a target with given numbers, each used at most once; every puzzle has a solution.",
            "countdown",
            {
                f"{count} numbers up to {largest}": {
                    "min_numbers": count, "max_numbers": count, "max_value": largest, "min_target": 1,
                }
                for count, largest in ((3, 20), (4, 25), (5, 50), (6, 100))
            },
            _countdown,
            {"countdown": {}},
            (
                "Combine the numbers 6, 8, 5 with + - * / and parentheses so that the result is 34. Use each number at "
                "most once. Write the expression, and nothing else, in the last line.",
                "5*8 - 6",
            ),
        ),
        "sorting": BuiltInTask(
            "Put a list of numbers in order, ascending or descending.",
            "number_sorting",
            {
                "4 numbers from 0 to 20": _sorting_level(4, 0, 20),
                "6 numbers from 0 to 99": _sorting_level(6, 0, 99),
                "8 numbers from -99 to 99": _sorting_level(8, -99, 99),
                "10 numbers from -99 to 99 with one decimal place": _sorting_level(10, -99, 99, 1, 1),
                "12 numbers from -9 to 9 with up to three decimal places": _sorting_level(12, -9, 9, 1, 3),
            },
            _sorting,
            {"number_list": {}},
            (
                "Sort these numbers in descending order: 19, 19, 6, 19. Write them in the last line, separated by "
                "commas.",
                "19, 19, 19, 6",
            ),
        ),
        "letter-counting": BuiltInTask(
            "Count a letter in one or several words.",
            "letter_counting",
            {
                f"{count} {'word' if count == 1 else 'words'}": {"min_words": count, "max_words": count}
                for count in (1, 2, 3, 6, 10)
            },
            _letter_counting,
            {"number_match": {}},
            ('How many times does the letter "r" appear in the text: "Paris"?', "1"),
        ),
        "word-problems": BuiltInTask(
            "Word problems in the manner of GSM8K, with a whole number as the answer.",
            "gsm_symbolic",
            {"up to two steps": {}, "three steps": {}, "four steps or more": {}},
            _word_problem,
            {"number_match": {}},
            (
                "Sophia is trying to decide whether to do her financial planning herself or hire an accountant. If she "
                "does it herself, she'll be able to do 11 fewer hours of consulting work, losing £88/hour in missed "
                "income. The accountant charges £63. How much more money will she have if she hires the accountant? "
                "Give the result as your final answer. Do not include units.",
                "905",
            ),
        ),
    }
)  # fmt: skip
