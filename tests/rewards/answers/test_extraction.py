"""What is read from a completion: its text, its last box, its last number."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers import patterns
from grupo.rewards.answers.extraction import (
    ExtractedAnswer,
    Extraction,
    completion_text,
    extract_answer,
    extract_boxed,
    gold_number,
    last_number,
    quote_value,
    whole_text_number,
)
from grupo.rewards.library.format import block_content

LAST_NUMBERS = [
    ("7 * 8 = 56", 56), ("7 * 8 = 56.", 56), ("The total is $3,450.00.", 3450), ("It costs -$5", -5),
    ("It costs $-5.", -5), ("USD450", 450), ("about 1,234,567 people", 1234567), (r"\boxed{2{,}000}", 2000),
    ("= -5", -5), ("= \u22125", -5), ("= \u20135", -5), ("7-5", 5), ("3\u20135", 5), ("7 - 5", 5),
    ("x = 3/4", Fraction(3, 4)), ("x = -3/4.", Fraction(-3, 4)), ("1 3/4 cups", Fraction(7, 4)),
    ("0.50", Fraction(1, 2)), ("it is .5", Fraction(1, 2)), ("well...5", 5), ("No.5", 5), ("1.5e3", 1500),
    ("50%", 50), ("25 cm\u00b2", 25), ("25 cm^2.", 25), (r"25\text{ cm}^{2}", 25), ("25 m2", 25), ("25 in 2", 2),
    ("2½ cups", Fraction(5, 2)), ("1\u20442", Fraction(1, 2)), ("90^\\circ", 90),
    ("Of 176 ... Final Answer: **58**", 58), ("first 12, then 7.", 7), ("12\r\n7\r\n", 7), ("2\\,000 of them", 2000),
    ("1'250'000", 1250000), ("1_250", 1250), ("1\u202f250 and 12\u00a0500", 12500), ("= - 5", -5), ("= \u2011 5", -5),
    ("12 + 30 = \uff14\uff12", 42), ("12 + 30 = \u0664\u0662", 42),
    ("= \uff0d\uff11\uff0c\uff12\uff15\uff10\uff0e\uff15", Fraction(-2501, 2)), ("4\u200b2", 42),
    ("4\u00ad2\u2069", 42), ("12345 678", 678), ("page 5 1000", 1000), ("5 million", 5 * 10**6),
    ("It costs $2.5 million.", 2_500_000), ("a 5-million dollar house", 5 * 10**6), (r"5\text{ million}", 5 * 10**6),
    ("**5** Million people", 5 * 10**6), ("3 hundred thousand", 300_000), ("3/4 billion", 750_000_000),
    ("2 dozen eggs", 24), ("5 dozens.", 60), ("5 trillion", 5 * 10**12), ("5 percent", 5), ("5 thousandths", 5),
    ("3 hundred-dollar bills", 3), ("It is 5.\nMillions of them", 5), ("1/2 or 0.5", Fraction(1, 2)),
    ("5 million, or 5,000,000", 5 * 10**6), ("3 or 4, say 3", 3), ("for 7 apples", 7),
    ("2 red or blue balls, so 7", 7),
]  # fmt: skip


def test_last_number() -> None:
    assert {text: last_number(text) for text, _ in LAST_NUMBERS} == dict(LAST_NUMBERS)


# Pairs, digits that may be thousands or two numbers, divisions that were not carried out: never the number before them
NOT_NUMBERS = [
    "", "no number", "one 5, two 3,7", "0,9", "0,900", "45,67", "12,34,567", "1,2500", "1.2.3", "12/25/2024",
    "it costs 1 250", "12 500 000.", "1 000", "5\uff0c7", "24/8", "1/0", "5 = 2^10", "2^{10}", "3 \\times 10^8",
    r"\frac{3}{4}", r"\frac{\sqrt{3}}{4}", r"\frac34", r"3\sqrt{2}", "\u221a2", r"2\pi", "2\u03c0", "5\u00b2", "5^2",
    "5 x^2", "5 and a half.", "9" * 2000, "5 or 7", "5 apples, or maybe 7", "The answer is $2$ or $5$.",
    "x = 5 or x = 7", r"5\text{ or }7", "5% or 7%", "5 or 7 or 7", "5 million or 5", " or ".join("1" * 5000),
]  # fmt: skip


def test_what_only_looks_like_a_number_is_none_and_never_an_earlier_or_partial_number() -> None:
    assert [text for text in NOT_NUMBERS if last_number(text) is not None] == []


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


BOXES = [
    (r"\boxed{\frac{3}{8}}", r"\frac{3}{8}"), (r"so \boxed{2} and then \boxed{3}.", "3"),
    (r"\boxed{\left\{2,5\right\}}", r"\left\{2,5\right\}"), (r"\boxed{\{2}", r"\{2"), (r"\fbox{12}", "12"),
    (r"\boxed {5}", "5"), (r"\boxed{\boxed{5}}", "5"), (r"\boxed{}", ""), ("\\boxed{a\nb}", "a\nb"),
    (r"\boxed{\frac{3}{8}", None), (r"\boxed{2} but \boxed{3", None), (r"\boxed 5", None), (r"\boxedtext{5}", None),
    ("\\boxed{5\\", None), ("5", None), ("", None),
]  # fmt: skip


def test_extract_boxed() -> None:
    assert {text: extract_boxed(text) for text, _ in BOXES} == dict(BOXES)


def test_a_box_decides_over_numbers_in_the_text() -> None:
    assert extract_answer(r"\boxed{x+1} in 3 steps") == "x+1"
    assert extract_answer(r"\boxed{5 in 3 steps") is None
    assert extract_answer("in 3 steps: 1,250") == "1250"
    assert extract_answer("nothing") is None


SOURCES = [
    (r"a \boxed{5} b", "boxed", "5"), (r"a \boxed{5", "boxed", None), (r"\boxed{ }", "boxed", None),
    ("<answer>4</answer><answer> 5\n</answer>", "tag", "5"), ("<answer>4<answer>5</answer></answer>", "tag", "5"),
    ("<answer>5</answer> <answer>6", "tag", None), ("<answer>5</answer> of 6</answer>", "tag", "5"),
    ("</answer><answer>5", "tag", None), ("<answer></answer>", "tag", None),
    ("48 = 72\n#### 72\nDone.", "hash", "72"), ("#### 72\n####  1,072 \r\n", "hash", "1,072"), ("####", "hash", None),
    ("The final answer is 42. Good.", "phrase", "42"), ("The answer is 3.5", "phrase", "3.5"),
    ("Answer: 5\nAnswer = 6", "phrase", "6"), ("ANSWER: 5", "phrase", "5"), ("Answer: 5\nANSWER: 6", "phrase", "6"),
    ("ANSWER: 5\nAnswer: 6", "phrase", "6"), ("**Answer:** 5 apples, since 2 + 3 = 5", "phrase", "5 apples"),
    ("### Final Answer\n\n$$\n5\n$$\nThat was it.", "phrase", "$$\n5\n$$"), ("Answer:", "phrase", None),
    ("so 42", "last_number", "42"), ("so 6/8", "last_number", "3/4"),
]  # fmt: skip


def test_each_source() -> None:
    for text, source, answer in SOURCES:
        assert Extraction().find(text) == Extraction((source,)).find(text) == ExtractedAnswer(answer, source)
        assert extract_answer(text, Extraction((source,))) == answer


NO_SOURCE = [
    "", "an answer", "answering: 5", "The answer is not 5", "answered = 5", "the answer isn't 5", "</answer> 5",
]  # fmt: skip


def test_what_no_source_but_the_last_number_finds() -> None:
    extraction = Extraction(("boxed", "tag", "hash", "phrase"))
    assert [text for text in NO_SOURCE if extraction.find(text) != ExtractedAnswer(None, None)] == []


def test_the_order_of_the_sources_decides() -> None:
    text = r"<answer>1</answer> #### 2" + "\nThe answer is 3. \\boxed{4}, of 5"
    orders = {"boxed": "4", "tag": "1", "hash": "2", "phrase": "3", "last_number": "5"}
    for first, answer in orders.items():
        others = [source for source in orders if source != first]
        assert Extraction((first, *others)).find(text) == ExtractedAnswer(answer, first)


def test_strict_stops_at_a_broken_source_and_lenient_goes_on() -> None:
    sources = ("boxed", "tag", "last_number")
    strict, lenient = Extraction(sources), Extraction(sources, strict=False)
    for text in (r"\boxed{} <answer>5</answer>", r"<answer>5</answer> \boxed{5", r"<answer></answer> \boxed{ } 5"):
        assert strict.find(text) == ExtractedAnswer(None, "boxed")
        assert lenient.find(text).answer == "5"
    sentence = "<answer>we need 5 of them</answer> out of 7"
    assert strict.find(sentence) == ExtractedAnswer("we need 5 of them", "tag")
    assert lenient.find(sentence) == ExtractedAnswer("5", "tag")
    assert lenient.find("<answer>none of them</answer> out of 7") == ExtractedAnswer("7", "last_number")


def test_other_tags() -> None:
    assert Extraction(("tag",), tag="SOLUTION").find("<answer>4</answer><SOLUTION>5</SOLUTION>").answer == "5"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sources": ["box"]}, "no source of answers named 'box'. Did you mean 'boxed'"),
        ({"sources": []}, "is not an order"),
        ({"sources": ["tag", "tag"]}, "is not an order"),
        ({"tag": "<answer>"}, "without angle brackets"),
        ({"source": ["tag"]}, "has no 'source'. Did you mean 'sources'"),
    ],
)
def test_an_extraction_that_cannot_be(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Extraction.of(arguments, default=Extraction())


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([*"0123456789.,/-+e$% \\{}^x\n(", "\u2212", "\u20ac", "sqrt", "\\frac"]), max_size=40).map(
        "".join
    )
)
def test_the_last_number_is_found_from_the_end_as_from_the_start(text: str) -> None:
    """What stands before and behind the last number does not change it, once it cannot be part of it."""
    assert last_number("12 apples; " + text) == last_number(text) or not any(map(str.isdigit, text))
    assert last_number(text + " " + "w" * 50) == last_number(text)


WHOLE_TEXTS = [
    ("72", 72), ("72 apples", 72), ("x = 72", 72), (r"\$5 \text{ million}", 5 * 10**6),
    (r"\frac{3}{4}", Fraction(3, 4)), (r"2\frac{3}{4}", Fraction(11, 4)), (r"-\dfrac{3}{4}", Fraction(-3, 4)),
    ("6 * 12", None), ("12*7", None), (r"\frac{24}{8}", None), (r"6 \times 10^3", None), (r"2\pi", None),
    ("5 or 7", None), ("we need 72", None), ("x", None), ("", None),
]  # fmt: skip


def test_a_number_alone_needs_no_computation() -> None:
    assert {text: whole_text_number(text) for text, _ in WHOLE_TEXTS} == dict(WHOLE_TEXTS)


@pytest.mark.parametrize(
    "text", ["<answer>5</answer> <answer>6", "<answer>4</answer><answer> 5\n</answer>", "a", "<answer>5"]
)
def test_the_last_block_is_the_same_for_extractions_and_formats(text: str) -> None:
    assert Extraction(("tag",)).find(text).answer == block_content(text, "answer")


GOLD_NUMBERS = [
    (17, 17), (0.1, Fraction(1, 10)), (np.float32(0.1), Fraction(1, 10)), (np.int64(3), 3),
    (np.array(0.1, dtype=np.float32), Fraction(1, 10)), (np.bool_(True), None), ("\uff17\uff12", 72),
    ("2\\,000", 2000), ("1 250", None), (1e-7, Fraction(1, 10**7)), (Decimal("2.50"), Fraction(5, 2)),
    (Fraction(1, 3), Fraction(1, 3)), ("58", 58), (" 58. ", 58), ("$58$", 58), ("-$5", -5), (r"50\%", 50),
    ("3/4", Fraction(3, 4)), ("48 + 24 = 72\n#### 72", 72), ("#### 1,072", 1072), (None, None), (True, None),
    (float("nan"), None), (float("inf"), None), (Decimal("NaN"), None), (Decimal("1e999999999"), None), ("", None),
    ("see figure 5", None), ("3,7", None), ([5], None),
]  # fmt: skip


def test_gold_number() -> None:
    assert [(gold, gold_number(gold)) for gold, _ in GOLD_NUMBERS] == GOLD_NUMBERS


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


def test_values_that_python_cannot_print_are_quoted() -> None:
    for value in (10**5000, [10**5000], Fraction(10**5000, 7)):
        assert "more than 1,000 digits" in quote_value(value) or "too large to be shown" in quote_value(value)
    assert quote_value("a" * 100, 10) == "'aaaaaaaaa"


def test_each_pattern_matches_its_example() -> None:
    for pattern, example in patterns.EXAMPLES:
        before, _, rest = example.partition("«")
        match, _, after = rest.partition("»")
        found = pattern.search(before + match + after)
        assert found is not None and found[0] == match, example
