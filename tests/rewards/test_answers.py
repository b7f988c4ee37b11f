"""What is read from a completion: its text, its last box, its last number."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import RewardError
from grupo.rewards.answers import completion_text, extract_answer, extract_boxed, gold_number, last_number

LAST_NUMBERS = [
    ("7 * 8 = 56", 56),
    ("7 * 8 = 56.", 56),
    ("The total is $3,450.00.", 3450),
    ("It costs -$5", -5),
    ("It costs $-5.", -5),
    ("USD450", 450),
    ("about 1,234,567 people", 1234567),
    (r"\boxed{2{,}000}", 2000),
    ("= -5", -5),
    ("= \u22125", -5),
    ("= \u20135", -5),
    ("7-5", 5),
    ("3\u20135", 5),
    ("7 - 5", 5),
    ("x = 3/4", Fraction(3, 4)),
    ("x = -3/4.", Fraction(-3, 4)),
    ("1 3/4 cups", Fraction(7, 4)),
    ("0.50", Fraction(1, 2)),
    ("it is .5", Fraction(1, 2)),
    ("well...5", 5),
    ("No.5", 5),
    ("1.5e3", 1500),
    ("50%", 50),
    ("25 cm\u00b2", 25),
    ("90^\\circ", 90),
    ("Of 176 ... Final Answer: **58**", 58),
    ("first 12, then 7.", 7),
    ("12\r\n7\r\n", 7),
]


@pytest.mark.parametrize(("text", "number"), LAST_NUMBERS)
def test_last_number(text: str, number: Fraction | int) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no number",
        "one 5, two 3,7",  # a pair is no number, and the 5 before it is not the answer
        "0,9",
        "0,900",
        "45,67",
        "12,34,567",
        "1,2500",
        "1.2.3",
        "12/25/2024",
        "24/8",  # the division of the question, not carried out
        "1/0",
        "5 = 2^10",
        "2^{10}",
        "3 \\times 10^8",
        r"\frac{3}{4}",
        r"\frac{\sqrt{3}}{4}",
        r"\frac34",
        r"3\sqrt{2}",
        "\u221a2",
        r"2\pi",
        "2\u03c0",
        "5\u00b2",
        "9" * 2000,
    ],
)
def test_what_only_looks_like_a_number_is_none_and_never_an_earlier_or_partial_number(text: str) -> None:
    assert last_number(text) is None


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30))
def test_any_integer_with_separators_is_read_back(number: int) -> None:
    assert last_number(f"after 4 steps the answer is {number:,}.") == number
    assert gold_number(f"{number:,}") == number


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_any_decimal_with_separators_is_read_back(number: Decimal) -> None:
    assert last_number(f"it is {number:,f}") == Fraction(number)


@settings(deadline=None)
@given(st.fractions(max_denominator=10**6))
def test_any_fraction_is_read_back(number: Fraction) -> None:
    assert last_number(f"it is {number}") == number


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,/-+e$% \\{}^x", max_size=60))
def test_no_text_raises(text: str) -> None:
    last_number(text)
    gold_number(text)
    extract_boxed(text)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{3}{8}}", r"\frac{3}{8}"),
        (r"so \boxed{2} and then \boxed{3}.", "3"),
        (r"\boxed{\left\{2,5\right\}}", r"\left\{2,5\right\}"),
        (r"\boxed{\{2}", r"\{2"),
        (r"\fbox{12}", "12"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{\frac{3}{8}", None),
        (r"\boxed{2} but \boxed{3", None),
        (r"\boxed 5", None),
        (r"\boxedtext{5}", None),
        ("\\boxed{5\\", None),
        ("5", None),
        ("", None),
    ],
)
def test_extract_boxed(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


def test_a_box_decides_over_numbers_in_the_text() -> None:
    assert extract_answer(r"\boxed{x+1} in 3 steps") == "x+1"
    assert extract_answer(r"\boxed{5 in 3 steps") is None
    assert extract_answer("in 3 steps: 1,250") == "1250"
    assert extract_answer("nothing") is None


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        (17, 17),
        (0.1, Fraction(1, 10)),
        (np.float32(0.1), Fraction(1, 10)),
        (np.int64(3), 3),
        (1e-7, Fraction(1, 10**7)),
        (Decimal("2.50"), Fraction(5, 2)),
        (Fraction(1, 3), Fraction(1, 3)),
        ("58", 58),
        (" 58. ", 58),
        ("$58$", 58),
        ("-$5", -5),
        (r"50\%", 50),
        ("3/4", Fraction(3, 4)),
        ("48 + 24 = 72\n#### 72", 72),
        ("#### 1,072", 1072),
        (None, None),
        (True, None),
        (float("nan"), None),
        (float("inf"), None),
        (Decimal("NaN"), None),
        (Decimal("1e999999999"), None),
        ("", None),
        ("see figure 5", None),
        ("3,7", None),
        ([5], None),
    ],
)
def test_gold_number(gold: object, number: object) -> None:
    assert gold_number(gold) == number


def test_a_gold_integer_may_be_longer_than_python_prints() -> None:
    assert gold_number(10**5000) == 10**5000


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        (None, None),
        ([], None),
        ([{"role": "assistant", "content": "a"}], "a"),
        ([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}], "b"),
        ([{"role": "assistant", "content": None}], None),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}], "ab"),
    ],
)
def test_completion_text(completion: object, text: str | None) -> None:
    assert completion_text(completion) == text


@pytest.mark.parametrize("completion", [5, ["text"], [{"role": "assistant", "content": 5}]])
def test_a_completion_of_another_shape_is_named(completion: object) -> None:
    with pytest.raises(RewardError, match="a string or a list of messages"):
        completion_text(completion)
