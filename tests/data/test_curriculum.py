"""Levels are unlocked by success on the newest one."""

from __future__ import annotations

from typing import Any

import pytest

from grupo.data.curriculum import Curriculum
from grupo.data.prompts import PromptOutcome, TokenizedRow
from grupo.errors import DataError


def tokenized(*levels: Any) -> list[TokenizedRow]:
    """Rows number 10, 11, 12 and so on."""
    return [TokenizedRow(10 + i, (1,), "x", {"level": level}) for i, level in enumerate(levels)]


def curriculum(*levels: Any, window: int = 2, threshold: float = 0.5, per_window: int = 1) -> Curriculum:
    return Curriculum(
        tokenized(*levels), column="level", threshold=threshold, window=window, success_reward=1.0,
        prompts_per_window=per_window,
    )  # fmt: skip


def answered(level: float, *rewards: float | None) -> PromptOutcome:
    return PromptOutcome(tokenized(level)[0].to_prompt(0), rewards)


def test_the_next_level_is_unlocked_by_the_newest_one() -> None:
    course = curriculum(3, 1, 2, 1, 3, 2, 1)
    assert course.eligible_rows() == [1, 3, 6]
    assert course.update([answered(1, 1.0, 0.0), answered(2, 1.0, 1.0), answered(3, 1.0, 1.0)]) == {
        "curriculum/level": 1.0, "curriculum/success_rate": 0.5,
    }  # fmt: skip
    assert course.unlocked == 1, "half of two prompts is not measured yet, and other levels do not count"
    assert course.update([answered(1, 0.0, 0.0)])["curriculum/success_rate"] == 0.25
    assert course.update([answered(1, 1.0, 1.0)])["curriculum/success_rate"] == 0.5, "of the last two prompts"
    assert course.unlocked == 2 and course.eligible_rows() == [1, 2, 3, 5, 6]
    assert course.update([]) == {"curriculum/level": 2.0}, "a new level has no success rate yet"
    course.update([answered(2, 1.0), answered(2, 1.0)])
    assert course.eligible_rows() == list(range(7))
    course.update([answered(3, 1.0), answered(3, 1.0)])
    assert course.unlocked == 3, "there is no fourth level"


def test_what_counts_as_a_success() -> None:
    course = curriculum(1, 1, 1, 2, window=3)
    course.update([answered(1, 1.0 - 1e-9, 2.5, 0.99, None), answered(1, None, None)])
    assert course.recent == [pytest.approx(2 / 3)], "unknown rewards do not count as failures"


def test_a_level_smaller_than_the_window_is_measured_on_all_its_prompts() -> None:
    course = curriculum(1, 2, 2, 2, 2, 2, window=4)
    course.update([answered(1, 1.0)])
    assert course.unlocked == 2
    course.update([answered(2, 1.0)] * 3)
    assert course.unlocked == 2


@pytest.mark.parametrize("value", [None, "easy", float("nan"), float("inf"), [1]])
def test_a_level_is_a_number(value: Any) -> None:
    with pytest.raises(DataError, match=r"in row 11; a level must be a finite number"):
        curriculum(1, value, 2)


def test_levels_that_cannot_be_used() -> None:
    with pytest.raises(
        DataError, match=r"level=1\) has 2 prompts, .* needs 4\. The levels up to level=3 have 5 together"
    ):
        curriculum(1, 1, 2, 3, 3, 4, per_window=4)
    with pytest.raises(DataError, match="is 1 in all 3 training prompts"):
        curriculum(1, 1.0, True)
