"""Tasks made by reasoning-gym: right answers at every level, levels, and nothing that gives a held-out answer away."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest

from grupo.rewards import make_reward
from grupo.tasks import Task
from grupo.tasks.reasoning_gym import BUILT_IN, BuiltInTask, _word_problem
from grupo.tasks.registry import make_task

pytest.importorskip("reasoning_gym")
LEVELS = [(name, level) for name, task in BUILT_IN.items() for level in range(1, len(task.levels) + 1)]


def question(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


def scores(task: Task, texts: list[str]) -> list[float | None]:
    ((name, arguments),) = task.rewards.items()
    columns = {column: [row[column] for row in task.train] for column in task.train[0] if column != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return list(make_reward(name, **arguments)(completions=completions, **columns))


def exactly(expression: str) -> Fraction:
    return Fraction(eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction}))


def independent_answer(name: str, row: dict[str, Any]) -> bool:
    """Whether the answer is right, found out from the text of the question in another way than it was made."""
    text = question(row)
    if name == "arithmetic":
        expression = re.fullmatch(r"What is ([-+*/() 0-9]+)\?", text)
        assert expression is not None
        return exactly(expression[1]) == int(row["answer"])
    if name == "countdown":
        numbers, target = re.findall(r"numbers ([\d, ]+) with.* result is (\d+)\.", text)[0]
        assert row["numbers"] == [int(number) for number in numbers.split(", ")] and row["target"] == int(target)
        assert sorted(map(int, re.findall(r"\d+", row["answer"]))) == sorted(row["numbers"])
        return exactly(row["answer"]) == int(target) not in row["numbers"]
    if name == "sorting":
        order, listed = re.findall(r"in (\w+) order: (.*)\. Write", text)[0]
        return row["answer"] == ", ".join(sorted(listed.split(", "), key=float, reverse=order == "descending"))
    if name == "letter-counting":
        letter, phrase = re.findall(r'letter "(.)" appear in the text: "(.*)"\?', text)[0]
        return row["answer"] == str(sum(character == letter for character in phrase)) != "0"
    return row["answer"].isdigit()


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_answers_are_right_and_the_reward_pays_for_nothing_else(name: str, level: int) -> None:
    task = make_task(name, 7, level=level, train=20, held_out=5)
    assert all(independent_answer(name, row) and row["level"] == level for row in [*task.train, *task.held_out])
    answers = [row["answer"] for row in task.train]
    assert scores(task, answers) == [1.0] * 20
    assert scores(task, [f"I think so.\nThe answer is: {answer}" for answer in answers]) == [1.0] * 20
    for wrong in ("", "no idea", "-123456"):
        assert scores(task, [wrong] * 20) == [0.0] * 20
    shifted = [answers[(place + 1) % 20] for place in range(20)]
    pairs = zip(answers, shifted, strict=True)
    assert scores(task, shifted) == [float(answer == other) for answer, other in pairs]


def test_word_problems_whose_solution_does_not_add_up_are_left_out() -> None:
    """Some templates of gsm_symbolic round: 48 / 18 = 2 racks."""

    def entry(solution: str, answer: str = "2") -> dict[str, Any]:
        return {"question": "How many?", "answer": answer, "metadata": {"answer_cot": solution}}

    assert _word_problem(entry("4 * 12 = 48 cakes\n48 / 24 = 2 racks\n#### 2"), 1)
    assert _word_problem(entry("£4.50 * 10 = £45\n45 - 5 - 38 = 2\n#### 2"), 1)
    assert not _word_problem(entry("4 * 12 = 48 cakes\n48 / 18 = 2 racks\n#### 2"), 1)
    assert not _word_problem(entry("£80 - £77 = £2\nSo 2 = 2"), 1)
    assert not _word_problem(entry("1 + 1 = 2", "2.5"), 1)
    steps = "1 + 1 = 2\n" * 5
    assert not _word_problem(entry(steps), 2) and _word_problem(entry(steps), 3)


@pytest.mark.parametrize("name", BUILT_IN)
def test_levels_are_mixed_and_held_out_prompts_do_not_depend_on_the_size(name: str) -> None:
    task, larger = (make_task(name, level=[1, 2], train=train, held_out=10) for train in (21, 60))
    levels = [row["level"] for row in task.train]
    assert (levels.count(1), levels.count(2)) == (11, 10) and levels != sorted(levels)
    assert task.held_out == larger.held_out and len(task.held_out) == 10


def test_what_gives_an_answer_away_is_on_one_side_only() -> None:
    """The same numbers in another order, or the same story about someone else."""

    def fact(name: str, row: dict[str, Any]) -> tuple[str, ...]:
        parts = r"\w+" if name == "letter-counting" else r"\d+(?:\.\d+)?|[-+]"
        text, _, target = question(row).partition(" so that the result is ")
        return *sorted(re.findall(parts, text)), target

    for name in BUILT_IN:
        task = make_task(name, 5)
        assert not {fact(name, row) for row in task.train} & {fact(name, row) for row in task.held_out}, name


@pytest.mark.parametrize(("name", "task"), BUILT_IN.items())
def test_the_items_of_a_seed_never_change(name: str, task: BuiltInTask) -> None:
    """A seed in a paper or a recipe must give the same items in later versions, as long as reasoning-gym does."""
    (row,) = make_task(name, 0, train=1, held_out=1).held_out
    assert (question(row), row["answer"]) == task.sample


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "n_queens", "spell_backward"])
def test_any_task_by_its_name(name: str) -> None:
    task = make_task(f"reasoning-gym:{name}", 2, train=6, held_out=3)
    assert (len(task.train), len(task.held_out)) == (6, 3)
    assert make_task(f"reasoning-gym:{name}", 2, train=6, held_out=3) == task
    answers = [row["answer"] for row in task.train]
    assert scores(task, answers) == [1.0] * 6
    assert scores(task, [f"I think.\n<answer>{answer}</answer>" for answer in answers]) == [1.0] * 6
    assert scores(task, [""] * 6) == [0.0] * 6
    assert all(score is not None and 0 <= score < 1 for score in scores(task, ["no idea"] * 6))


def test_levels_and_settings_of_a_task_by_its_name() -> None:
    easy, hard = (make_task("reasoning-gym:chain_sum", level=level, train=20, held_out=5) for level in (1, 4))
    lengths = [sum(len(question(row)) for row in task.train) for task in (easy, hard)]
    assert lengths[0] < lengths[1] and hard.train[0]["level"] == 4
    fixed = make_task("reasoning-gym:chain_sum", train=5, held_out=0, settings={"min_terms": 3, "max_terms": 3})
    assert all(len(re.findall(r" [-+] ", question(row))) == 2 for row in fixed.train)
