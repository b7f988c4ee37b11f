"""The answer at the end of a worked solution."""

from __future__ import annotations

from typing import Any

import pytest

from grupo.rewards.answers.ground_truth import final_answer


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
