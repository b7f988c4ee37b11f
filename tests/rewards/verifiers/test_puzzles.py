"""Rewards of puzzles on answers of every kind, and the scorers of reasoning-gym."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import RewardError
from grupo.rewards import countdown, make_reward, number_list
from grupo.rewards.verifiers.puzzles import countdown_fault, may_run, written_answer
from grupo.tasks.registry import make_task

EXPRESSIONS = [
    ("3 * 8", None),
    ("8*3", None),
    ("(3 + 5) * 3", "more often"),
    ("3 * 8 = 24", None),
    ("3 * 8 = 25", "right-hand side"),
    ("3 * 8 = 24 = 24", "right-hand side"),
    (r"3 \times 8", None),
    ("3 × 8", None),
    (r"\left(5 - 2\right) \cdot 8", None),
    ("8 / (3 - 8 / 3)", "more often than given"),
    ("24", "24 more often"),
    ("3 * 8 + 5 - 5", "5 more often"),
    ("3 8", "not an expression"),
    ("38 - 14", "more often"),
    ("-3 + 8", "not an expression"),
    ("3 * 8 / 0", "divides by zero"),
    ("3 ** 8", "not an expression"),
    ("__import__('os')", "not an expression"),
    ("3 * (8", "not an expression"),
    ("(3 * 8))", "not an expression"),
    ("", "not an expression"),
    ("3 +", "not an expression"),
    ("3.0 * 8", "not an expression"),
    ("٣ * 8", "not an expression"),
    ("²", "not an expression"),
    ("(" * 200 + "3", "not an expression"),
    ("1 + " * 200 + "1", "not an expression"),
    ("9" * 13, "more often"),
    ("9" * 301, "not an expression"),
    ("03 * 8", None),
    ("3 // 8", "not an expression"),
    ("3, 8", "not an expression"),
    ("-" * 200 + "3", "not an expression"),
    ("(" * 40 + "3" + ")" * 40, "its value is 3"),
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


def test_a_target_too_long_to_print_is_no_puzzle() -> None:
    with pytest.warns(UserWarning, match="more than 1,000 digits"):
        assert countdown()(["3 * 8"], numbers=[[3, 8]], target=[10**5000]) == [None]


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
    rows = make_task("reasoning-gym:spiral_matrix", 0, train=2, held_out=1).train
    trace = tmp_path / "trace"
    attack = f"[open({str(trace)!r}, 'w').close()]"
    reward = make_reward("reasoning_gym")
    assert reward(completions=[attack] * 2, entry=[row["entry"] for row in rows]) == [0.0, 0.0] and not trace.exists()
    with pytest.raises(RewardError, match="needs the whole entry"):
        reward(completions=["1"], entry=[{"answer": "1"}])
