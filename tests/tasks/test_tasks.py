"""Built-in tasks: right answers, levels, seeds, splits that share nothing; datasets by columns; their rewards."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.data.decontamination import normalised, shared_items, without_shared
from grupo.errors import ConfigError, DataError, RewardError
from grupo.recipes.data import recipe_rewards, recipe_rows
from grupo.recipes.schema import DatasetSpec, Recipe, load_recipe
from grupo.rewards import countdown, make_reward, number_list
from grupo.rewards.answers.ground_truth import final_answer
from grupo.rewards.verifiers.puzzles import countdown_fault, may_run, written_answer
from grupo.tasks.generators import Tree, joined
from grupo.tasks.registry import TASKS, Task, make_task

DRAWN = ["arithmetic", "countdown", "sorting", "letter-counting", "word-problems"]
LEVELS = [(name, level) for name in DRAWN for level in range(1, len(make_task(name, train=5, held_out=5).levels) + 1)]


def question(row: dict[str, Any]) -> str:
    (message,) = row["prompt"]
    assert message["role"] == "user"
    return str(message["content"])


def scores(task: Task, rows: list[dict[str, Any]], texts: list[str]) -> list[float | None]:
    ((name, arguments),) = task.rewards.items()
    columns = {column: [row[column] for row in rows] for column in rows[0] if column != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return list(make_reward(name, **arguments)(completions=completions, **columns))


# ---- items -----------------------------------------------------------------------------------------------------------


def independent_answer(name: str, text: str, row: dict[str, Any]) -> bool:
    """Whether the gold answer is right, found out from the text of the question in another way than it was made."""
    if name == "arithmetic":
        expression = re.fullmatch(r"What is ([-+*/() 0-9]+)\?", text)
        assert expression is not None
        return Fraction(row["answer"]) == eval(re.sub(r"(\d+)", r"Fraction(\1)", expression[1]), {"Fraction": Fraction})
    if name == "countdown":
        numbers, target = re.findall(r"numbers ([\d, ]+) with.* result is (\d+)\.", text)[0]
        assert row["numbers"] == [int(number) for number in numbers.split(", ")] and row["target"] == int(target)
        used = [int(number) for number in re.findall(r"\d+", row["answer"])]
        assert sorted(used) == sorted(row["numbers"])
        return eval(re.sub(r"(\d+)", r"Fraction(\1)", row["answer"]), {"Fraction": Fraction}) == int(target)
    if name == "sorting":
        order, numbers = re.findall(r"in (\w+) order: (.*)\. Write", text)[0]
        expected = sorted(numbers.split(", "), key=float, reverse=order == "descending")
        return row["answer"] == ", ".join(expected)
    letter, phrase = re.findall(r'letter "(.)" occur in "(.*)"\?', text)[0]
    return row["answer"] == str(sum(character == letter for character in phrase))


@pytest.mark.parametrize(("name", "level"), [case for case in LEVELS if case[0] != "word-problems"])
def test_gold_answers_are_right(name: str, level: int) -> None:
    task = make_task(name, 7, level=level, train=60, held_out=20)
    for row in [*task.train, *task.held_out]:
        assert independent_answer(name, question(row), row), row
        assert row["level"] == level


WORD_PROBLEMS: dict[str, Callable[..., int]] = {
    r"has (\d+) .* gives \w+ (\d+) more": lambda a, b: a + b,
    r"There were (\d+) .* took (\d+) of": lambda a, b: a - b,
    r"fills (\d+) boxes with (\d+)": lambda a, b: a * b,
    r"shares (\d+) .* among (\d+) children": lambda a, b: a // b,
    r"buys (\d+) \w+ at \$(\d+) each and pays with \$(\d+)": lambda n, p, paid: paid - n * p,
    r"collected (\d+) \w+\. \w+ collected (\d+) more": lambda a, b: a + a + b,
    r"has (\d+) \w+, and \w+ has (\d+) times": lambda a, b: a * b - a,
    r"opens (\d+) packs of (\d+) \w+ and gives (\d+)": lambda a, b, c: a * b - c,
    r"costs \$(\d+)\. \w+ buys (\d+) .* of (\d+)% .* pays \$(\d+)":
        lambda p, n, off, fee: p * n * (100 - off) // 100 + fee,
    r"earns \$(\d+) .* works (\d+) hours a day for (\d+) days.* spends \$(\d+)": lambda w, h, d, s: w * h * d - s,
    r"had (\d+) \w+ and gave 1/(\d+) .* found (\d+) more": lambda t, k, m: (t - t // k) // 2 + m,
    r"at (\d+) km per hour for (\d+) hours.* goes (\d+) km .* for (\d+) more": lambda s, h, f, m: s * h + (s + f) * m,
    r"has (\d+) hens that lay (\d+) .* eats (\d+) eggs .* at \$(\d+) .* in (\d+) weeks":
        lambda hens, eggs, eaten, price, weeks: (hens * eggs - eaten) * price * weeks,
}  # fmt: skip


def test_word_problems_have_the_answer_of_their_numbers() -> None:
    seen = set()
    for level in (1, 2, 3):
        for row in make_task("word-problems", 3, level=level).train:
            ((pattern, numbers),) = [(p, found) for p in WORD_PROBLEMS if (found := re.search(p, question(row)))]
            assert "{" not in question(row)
            assert int(row["answer"]) == WORD_PROBLEMS[pattern](*map(int, numbers.groups())) > 0, row
            seen.add(pattern)
    assert seen == WORD_PROBLEMS.keys(), "every story came up"


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_the_natural_reward_pays_gold_and_nothing_else(name: str, level: int) -> None:
    task = make_task(name, 1, level=level, train=20, held_out=5)
    golds = [row["answer"] for row in task.train]
    assert scores(task, task.train, golds) == [1.0] * 20
    assert scores(task, task.train, [f"I think so.\nThe answer is: {gold}" for gold in golds]) == [1.0] * 20
    for wrong in ("", "no idea", "-123456"):
        assert scores(task, task.train, [wrong] * 20) == [0.0] * 20
    shifted = [golds[(place + 1) % 20] for place in range(20)]
    pairs = zip(golds, shifted, strict=True)
    assert scores(task, task.train, shifted) == [float(gold == other) for gold, other in pairs]


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_is_a_task(name: str) -> None:
    assert make_task(name, 3) == make_task(name, 3)
    assert make_task(name, 3).held_out != make_task(name, 4).held_out


def test_the_items_of_a_seed_never_change() -> None:
    """A seed in a paper or a recipe must mean the same items in later versions."""
    first = {name: question(make_task(name, 0, train=1, held_out=1).held_out[0]) for name in DRAWN}
    assert first == FIRST_OF_SEED_0


FIRST_OF_SEED_0 = {
    "arithmetic": "What is 35 - 24?",
    "countdown": "Combine the numbers 18, 18, 12 with + - * / and parentheses so that the result is 48. Use each "
    "number at most once. Write the expression, and nothing else, in the last line.",
    "sorting": "Sort these numbers in ascending order: 7, 11, 20, 16. Write them in the last line, separated by "
    "commas.",
    "letter-counting": 'How many times does the letter "s" occur in "sugar"?',
    "word-problems": "Rosa has 15 oranges. Kavya gives Rosa 4 more. How many oranges does Rosa have now?",
}


@pytest.mark.parametrize("name", DRAWN)
def test_more_training_prompts_leave_the_held_out_ones_alone(name: str) -> None:
    assert make_task(name, train=10, held_out=30).held_out == make_task(name, train=300, held_out=30).held_out


@pytest.mark.parametrize("name", DRAWN)
def test_levels_can_be_mixed_for_a_curriculum(name: str) -> None:
    task = make_task(name, level=[1, 3], train=21, held_out=10)
    levels = [row["level"] for row in task.train]
    assert (levels.count(1), levels.count(3)) == (11, 10) and levels != sorted(levels)
    assert len(task.held_out) == 10


def test_harder_levels_are_larger() -> None:
    for name in ("arithmetic", "countdown", "sorting"):
        lengths = [
            sum(len(question(row)) for row in make_task(name, level=level, train=50, held_out=0).train)
            for level in range(1, len(make_task(name).levels) + 1)
        ]
        assert lengths == sorted(lengths), name


def test_times_tables_grow() -> None:
    for level, largest in enumerate((12, 20, 40, 99), start=1):
        task = make_task("times-tables", level=level)
        factors = [int(number) for row in task.train + task.held_out for number in re.findall(r"\d+", question(row))]
        assert max(factors) == largest and len(factors) == 2 * (largest - 1) ** 2
        assert 0.25 < len(task.held_out) / (largest - 1) ** 2 < 0.35


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("countdown", {"level": 5}, "Task 'countdown' has no level 5: it has the levels 1 to 4."),
        ("countdown", {"level": 0}, "has no level 0"),
        ("countdown", {"level": "2"}, "has no level '2'"),
        ("countdown", {"level": True}, "has no level True"),
        ("countdown", {"level": []}, "has no level None"),
        ("countdown", {"level": None}, "has no level None"),
        ("countdown", {"level": 1.5}, "has no level 1.5"),
        ("countdown", {"level": "2"}, "has no level '2'"),
        ("reasoning-gym:chain_sum", {"settings": "hard"}, "settings='hard' is no mapping"),
        ("countdown", {"level": [1, 1]}, "names a level twice"),
        ("sorting", {"train": 0}, "train=0 is no number of prompts from 1 on"),
        ("sorting", {"held_out": -1}, "held_out=-1 is no number of prompts from 0 on"),
        ("sorting", {"size": 9}, "unexpected keyword argument 'size'. It takes (level, train, held_out)"),
        ("word-problems", {"train": 10**5}, "too few different items at level 1"),
        ("times-tables", {"level": 9}, "has the levels 1 to 4"),
        ("short-stories", {"level": 1}, "unexpected keyword argument 'level'"),
    ],
)
def test_what_a_task_cannot_give_is_refused(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_task(name, **arguments)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_trees_are_written_with_the_parentheses_they_need(seed: int) -> None:
    draws = random.Random(seed)

    def tree(depth: int) -> Tree:
        if depth == 0 or draws.random() < 0.2:
            return Tree(draws.randint(1, 9))
        left, right = tree(depth - 1), tree(depth - 1)
        return joined(draws.choice("+-*/"), left, right) or left

    drawn = tree(4)
    assert eval(re.sub(r"(\d+)", r"Fraction(\1)", str(drawn)), {"Fraction": Fraction}) == drawn.value


# ---- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_no_item_is_on_both_sides(name: str) -> None:
    for seed in range(3):
        task = make_task(name, seed)
        assert not shared_items(task.train, task.held_out)
        texts = [normalised(question(row)) for row in task.train + task.held_out]
        assert len(set(texts)) == len(texts)


def test_what_gives_an_answer_away_is_on_one_side_only() -> None:
    """The same numbers in another order, or the same story about someone else."""

    def facts(name: str, rows: list[dict[str, Any]]) -> set[Any]:
        if name == "countdown":
            return {(*sorted(row["numbers"]), row["target"]) for row in rows}
        numbers = [tuple(sorted(re.findall(r"\d+", question(row)))) for row in rows]
        if name == "sorting":
            return set(numbers)
        return {(n, re.sub(r"[A-Z]\w+|\d+", "", question(row))[-40:]) for n, row in zip(numbers, rows, strict=True)}

    for name in ("countdown", "sorting"):
        task = make_task(name, 5)
        assert not facts(name, task.train) & facts(name, task.held_out)
    sums = make_task("arithmetic", 5, level=1)
    sides = [
        {frozenset(re.findall(r"\d+", question(row))) for row in rows if "+" in question(row)}
        for rows in (sums.train, sums.held_out)
    ]
    assert not sides[0] & sides[1], "3 + 4 and 4 + 3 are one fact"


SAME = [
    ("What is 2 + 3?", "what is  2+3"),
    ("What is 2 + 3?", "What is 2 + 3 ?\n"),
    ("Tom's apples: how many?", "toms apples, how many"),
    ("He said “yes”.", 'he said "YES"'),
    ("twenty-one sheep", "Twenty one sheep!"),
    ("1,250 m", "1250 m"),
    ("ﬁne １２", "fine 12"),
    ("x-y", "x - y"),
    ("5−3", "5 - 3"),
]
DIFFERENT = [
    ("What is 2 + 3?", "What is 2 - 3?"),
    ("What is 2 * 3?", "What is 2 / 3?"),
    ("What is 2.5?", "What is 25?"),
    ("Sort 1, 23", "Sort 12, 3"),
    ("Sort 3, 1, 2", "Sort 1, 2, 3"),
    ("2 * (3 + 4)", "(2 * 3) + 4"),
    ("x + y", "x y"),
    ("-5", "5"),
    ("50%", "50"),
    ("2^10", "2 10"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_texts_that_are_the_same(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_texts_that_are_not(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def dataset(path: Path, **spec: Any) -> Recipe:
    return Recipe(dataset=DatasetSpec(path=str(path), **spec), rewards=[{"name": "math_accuracy"}])


def test_planted_duplicates_are_left_out_whichever_side_they_come_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(20)]
    planted = [{"prompt": f"what  is {n}+{n}", "answer": 2 * n} for n in range(5)]
    clean, dirty = write(tmp_path / "clean.jsonl", rows), write(tmp_path / "dirty.jsonl", [*rows, *planted])
    found = 0
    for seed in range(5):
        _, held_out = recipe_rows(dataset(clean, held_out=8), seed)
        assert len(held_out) == 8 and not caplog.messages
        train, held_out = recipe_rows(dataset(dirty, held_out=8), seed)
        sides = [{normalised(row["prompt"][0]["content"]) for row in side} for side in (train, held_out)]
        assert not sides[0] & sides[1] and len(train) == 17
        found += 8 - len(held_out)
        assert bool(caplog.messages) is (len(held_out) < 8)
        caplog.clear()
    assert found > 5


def test_a_planted_duplicate_is_reported_with_both_rows(caplog: pytest.LogCaptureFixture) -> None:
    train = [{"prompt": "What is 1 + 1?"}, {"prompt": [{"role": "user", "content": "Name a  colour!"}]}]
    held_out = [
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "name a colour"}]},
        {"prompt": "What is 1 - 1?"},
    ]
    kept = without_shared(train, held_out)
    assert list(kept) == held_out[1:] and kept.numbers == (1,)  # type: ignore[attr-defined]
    (said,) = caplog.messages
    assert said.startswith("1 of 2 held-out rows ask what a training row asks")
    assert "(row 0 as row 1: 'name a colour')" in said and said.endswith("left out of the evaluation.")
    with pytest.raises(DataError, match="Nothing is left to evaluate on"):
        without_shared(train, held_out[:1])
    assert without_shared(train, []) == []


# ---- datasets by columns ---------------------------------------------------------------------------------------------

GSM8K = [
    {"question": "Natalia sold 48 clips and then half as many. How many in all?",
     "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"},
    {"question": "A car costs $1,250 and tax is $3. What is paid?", "answer": "1250 + 3 = 1253\n#### 1,253"},
]  # fmt: skip
NUMINA = [
    {"problem": "What is the coefficient?", "solution": "Expand it.\nThe final answer is $\\boxed{\\frac{3}{8}}$.",
     "messages": [{"role": "user", "content": "..."}]},
    {"problem": "Evaluate.", "solution": "We get $\\boxed{12}$, no: $\\boxed{-4}$.",
     "messages": [{"role": "user", "content": "..."}]},
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_gsm8k_by_its_columns(suffix: str, tmp_path: Path) -> None:
    rows, _ = recipe_rows(dataset(write(tmp_path / f"gsm8k{suffix}", GSM8K), prompt="question", gold="answer"), 0)
    assert [row["answer"] for row in rows] == ["72", "1,253"] and rows[0].keys() == {"prompt", "answer"}
    for name in ("number_match", "math_accuracy"):
        reward = make_reward(name)
        assert reward(completions=["It is 72.", "\\boxed{1253}"], answer=[row["answer"] for row in rows]) == [1.0, 1.0]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_numinamath_by_its_columns(suffix: str, tmp_path: Path) -> None:
    rows, _ = recipe_rows(dataset(write(tmp_path / f"tir{suffix}", NUMINA), prompt="problem", gold="solution"), 0)
    assert [row["answer"] for row in rows] == ["\\frac{3}{8}", "-4"]
    assert rows[0]["solution"] == NUMINA[0]["solution"], "for rewards that take the whole solution"
    reward = make_reward("math_accuracy")
    assert reward(completions=["\\boxed{0.375}", "\\boxed{4}"], answer=[row["answer"] for row in rows]) == [1.0, 0.0]


def test_gold_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "a", "solution": "1", "answer": "x"}])
    for spec, said in (
        ({"gold": "gold"}, "dataset.gold='gold' is no column"),
        ({"gold": "question"}, "dataset.gold='question' is no column"),
        ({"gold": "solution"}, "would be called 'answer'"),
    ):
        with pytest.raises(DataError, match=said):
            recipe_rows(dataset(path, prompt="question", **spec), 0)
    rows, _ = recipe_rows(dataset(path, prompt="question", gold="solution", rename={"answer": "old"}), 0)
    assert rows[0]["answer"] == "1" and rows[0]["old"] == "x"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("so\n#### 72", "72"),
        ("#### 1 \n#### 2 ", "2"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"#### \boxed{7}", "7"),
        (r"\boxed{7", r"\boxed{7"),
        (r"\boxed{8} and behind it", "8"),
        ("72", "72"),
        (72, 72),
        (None, None),
        (["72"], ["72"]),
    ],
)
def test_the_answer_at_the_end_of_a_solution(gold: Any, answer: Any) -> None:
    assert final_answer(gold) == answer


def test_recipes_give_arguments_to_a_task() -> None:
    recipe = load_recipe("quickstart", ["task=countdown", "task_arguments.level=2", "task_arguments.train=30"])
    rows, held_out = recipe_rows(recipe, 0)
    assert len(rows) == 30 and len(held_out) == 100 and len(rows[0]["numbers"]) == 4
    rewards, weights = recipe_rewards(recipe)
    assert [reward.__name__ for reward in rewards] == ["countdown"] and weights == [1.0]
    with pytest.raises(ConfigError, match="`task_arguments` belong to a `task`"):
        load_recipe("quickstart", ["task=null", "dataset={path: a.jsonl}", "task_arguments={level: 2}"])


# ---- the rewards of puzzles ------------------------------------------------------------------------------------------

EXPRESSIONS = [
    ("3 * 8", None),
    ("8*3", None),
    ("(3 + 5) * 3", "more often"),
    ("3 * 8 = 24", None),
    ("3 * 8 = 25", "behind '='"),
    ("3 * 8 = 24 = 24", "behind '='"),
    (r"3 \times 8", None),
    ("3 × 8", None),
    (r"\left(5 - 2\right) \cdot 8", None),
    ("8 / (3 - 8 / 3)", "more often than given"),
    ("24", "24 more often"),
    ("3 * 8 + 5 - 5", "5 more often"),
    ("3 8", "no operator"),
    ("38 - 14", "more often"),
    ("-3 + 8", "expected"),
    ("3 * 8 / 0", "divides by zero"),
    ("3 ** 8", "expected"),
    ("__import__('os')", "is no number"),
    ("3 * (8", "not closed"),
    ("(3 * 8))", "not expected"),
    ("", "ends too early"),
    ("3 +", "ends too early"),
    ("3.0 * 8", "is no number"),
    ("٣ * 8", "is no number"),
    ("²", "is no number"),
    ("(" * 200 + "3", "expected"),
    ("1 + " * 200 + "1", "longer than 300"),
    ("9" * 13, "no operator"),
]


@pytest.mark.parametrize(("answer", "fault"), EXPRESSIONS)
def test_countdown_expressions(answer: str, fault: str | None) -> None:
    found = countdown_fault(answer, [2, 3, 5, 8], 24)
    assert found is None if fault is None else fault in (found or "")


def test_countdown_values_are_exact() -> None:
    assert countdown_fault("8 / 3 * 3", [8, 3, 3], 8) is None
    assert countdown_fault("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24) is None
    assert "1/0" not in (countdown_fault("8 / (3 - 3)", [8, 3, 3], 8) or "") and countdown_fault(
        "8 / (3 - 3)", [8, 3, 3], 8
    )
    assert countdown_fault("0 + 5", [0, 5], 5) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>3 * 8</answer>", "3 * 8"),
        ("<answer>1</answer> no <answer>\n2\n</answer> done", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>never closed", ""),
        (r"so \boxed{3 * 8}", "3 * 8"),
        ("The answer is simple.\n3 * 8", "3 * 8"),
        ("First 5.\nAnswer: 3 * 8.", "3 * 8"),
        ("**The final answer is 3 * 8**", "3 * 8"),
        ("Thus, the answer is: `3 * 8`", "3 * 8"),
        ("", ""),
    ],
)
def test_where_an_answer_is_read(text: str, answer: str) -> None:
    assert written_answer(text) == answer


def test_countdown_abstains_where_the_puzzle_is_unreadable() -> None:
    reward = countdown(numbers_column="nums")
    with pytest.warns(UserWarning, match="cannot read a puzzle"):
        given = [[3, 8], None, [], [3, "x"], ["3", "8"]]
        assert reward(["3*8"] * 5, nums=given, target=[24, 24, 24, 24, "24"]) == [1.0, None, None, None, 1.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("1, 2.50, -3", 1.0),
        ("[1; 2.5; \u22123]", 1.0),
        ("Sorted: 1 2.5 -3.", 1.0),
        ("1, -3, 2.5", 0.0),
        ("1, 2.5", 0.0),
        ("0, 1, 2.5, -3", 0.0),
        ("1, 2.5, -3 are sorted", 0.0),
        ("", 0.0),
    ],
)
def test_lists_of_numbers(text: str, score: float) -> None:
    assert number_list()(completions=[text], answer=["1, 2.5, -3"]) == [score]
    assert number_list()(completions=[text], answer=[[1, 2.5, -3]]) == [score]


def test_an_unreadable_gold_list_is_no_reward() -> None:
    with pytest.warns(UserWarning, match="A gold answer is a list of numbers"):
        assert number_list()(completions=["1", "1", ""], answer=["one", None, ""]) == [None, None, None]


@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=80)
    | st.text("0123456789+-*/()= .,<>answer\\boxed{}", max_size=80)
)
@settings(max_examples=300, deadline=None)
def test_rewards_of_puzzles_on_any_text(text: str) -> None:
    for score in (
        *countdown()([text, ""], numbers=[[3, 8], [3, 8]], target=[24, 24]),
        *number_list()(completions=[text, ""], answer=["1, 2", "1, 2"]),
    ):
        assert score in (0.0, 1.0)
    assert countdown()([""], numbers=[[0]], target=[0]) == [0.0] == number_list()(completions=[""], answer=["1"])


# ---- reasoning-gym ---------------------------------------------------------------------------------------------------


def test_without_reasoning_gym_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        make_task("reasoning-gym:chain_sum")


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "n_queens", "spell_backward"])
def test_tasks_of_reasoning_gym(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    task = make_task(f"reasoning-gym:{name}", 2, train=6, held_out=3)
    assert (len(task.train), len(task.held_out)) == (6, 3) and not shared_items(task.train, task.held_out)
    assert make_task(f"reasoning-gym:{name}", 2, train=6, held_out=3) == task
    golds = [row["answer"] for row in task.train]
    assert scores(task, task.train, golds) == [1.0] * 6
    assert scores(task, task.train, [f"I think.\n<answer>{gold}</answer>" for gold in golds]) == [1.0] * 6
    assert scores(task, task.train, [""] * 6) == [0.0] * 6
    assert all(score is not None and 0 <= score < 1 for score in scores(task, task.train, ["no idea"] * 6))


def test_levels_and_settings_of_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    easy, hard = (make_task("reasoning-gym:chain_sum", level=level, train=20, held_out=5) for level in (1, 4))
    lengths = [sum(len(row["prompt"][0]["content"]) for row in task.train) for task in (easy, hard)]
    assert lengths[0] < lengths[1] and hard.train[0]["level"] == 4
    fixed = make_task("reasoning-gym:chain_sum", train=5, held_out=0, settings={"min_terms": 3, "max_terms": 3})
    assert all(len(re.findall(r" [-+] ", row["prompt"][0]["content"])) == 2 for row in fixed.train)
    for arguments, said in (
        ({"settings": {"terms": 3}}, "refuses the settings of 'chain_sum'"),
        ({"settings": {"min_terms": 0}}, "refuses the settings of 'chain_sum'"),
        ({"level": 0}, "no level 0: 1 is the easiest"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_task("reasoning-gym:chain_sum", **arguments)
    with pytest.raises(ConfigError, match="Did you mean 'chain_sum'"):
        make_task("reasoning-gym:chain_sums")


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        ("[[1, 2], [3, 4]]", False),
        ("(3 + 5) * (2 - 1)", False),
        ("x**2 + 3*x", False),
        ("sin(x)/2", False),
        ("['a', 'b']", False),
        ("__import__('os').system('true')", True),
        ("open('/etc/passwd')", True),
        ("().__class__", True),
        ("9**9**9", True),
        ("2**100", True),
        ("'a' * 99999", True),
        ("[0] * 99999", True),
        ("[i for i in 'abc']", True),
        ("(lambda: 1)()", True),
        ("{'a': print}['a'](1)", True),
        ("7" * 40, True),
    ],
)
def test_answers_that_could_run(answer: str, runs: bool) -> None:
    assert may_run(answer) is runs


def test_scorers_that_evaluate_never_see_code(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    task = make_task("reasoning-gym:spiral_matrix", 0, train=2, held_out=1)
    trace = tmp_path / "trace"
    attack = f"[open({str(trace)!r}, 'w').close()]"
    assert scores(task, task.train, [attack] * 2) == [0.0, 0.0] and not trace.exists()
    with pytest.raises(RewardError, match="needs the whole entry"):
        make_reward("reasoning_gym")(completions=["1"], entry=[{"answer": "1"}])


def test_a_target_too_long_to_print_is_no_puzzle() -> None:
    with pytest.warns(UserWarning, match="more than 1,000 digits"):
        assert countdown()(["3 * 8"], numbers=[[3, 8]], target=[10**5000]) == [None]
