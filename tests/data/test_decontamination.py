"""Rows that ask the same are found whatever differs in case, white space and punctuation."""

from __future__ import annotations

import pytest

from grupo.data.decontamination import decontaminate, normalize_text
from grupo.errors import DataError

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
    assert normalize_text(one) == normalize_text(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_texts_that_are_not(one: str, other: str) -> None:
    assert normalize_text(one) != normalize_text(other)


def test_a_planted_duplicate_is_reported_with_both_rows(caplog: pytest.LogCaptureFixture) -> None:
    train = [{"prompt": "What is 1 + 1?"}, {"prompt": [{"role": "user", "content": "Name a  colour!"}]}]
    held_out = [
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "name a colour"}]},
        {"prompt": "What is 1 - 1?"},
    ]
    kept = decontaminate(train, held_out)
    assert list(kept) == held_out[1:] and kept.indices == (1,)  # type: ignore[attr-defined]
    (said,) = caplog.messages
    assert said.startswith("1 of 2 held-out rows have the question of a training row")
    assert "(row 0 is row 1: 'name a colour')" in said and said.endswith("left out of the evaluation.")
    with pytest.raises(DataError, match="No row is left to evaluate on"):
        decontaminate(train, held_out[:1])
    assert decontaminate(train, []) == []
