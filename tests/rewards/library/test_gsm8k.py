"""The GSM8K tutorial rewards and those of the notebooks: what they promise, and each trap of the copied code."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from grupo.errors import ConfigError
from grupo.rewards import (
    RewardRunner,
    banded_answer,
    gsm8k_correctness,
    gsm8k_integer,
    gsm8k_soft_format,
    gsm8k_strict_format,
    gsm8k_tag_count,
    number_score,
    tag_count,
    tag_format,
)


def score(reward: Any, completion: Any, **columns: Any) -> Any:
    """One score, the same for text and for messages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        columns = {name: [value] for name, value in columns.items()}
        (result,) = reward(completions=[completion], **columns)
        (of_messages,) = reward(completions=[[{"role": "assistant", "content": completion}]], **columns)
    assert result == of_messages
    return result


def blocks(reasoning: str, answer: str, end: str = "\n") -> str:
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>{end}"


ONE_LINE = blocks("8 * 9", "72")
# What a chat model writes: several lines, and no line end behind the last tag.
USUAL = blocks("There are 8 rows.\nEach has 9.\n\n8 * 9 = 72", "72", end="")


# The copied code, as its authors published it, against `compat=True` --------------------------------------------------


def published_answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def published_count(text: str) -> float:
    count = 0.0
    if text.count("<reasoning>\n") == 1:
        count += 0.125
    if text.count("\n</reasoning>\n") == 1:
        count += 0.125
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        count -= len(text.split("\n</answer>\n")[-1]) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        count -= (len(text.split("\n</answer>")[-1]) - 1) * 0.001
    return count


PUBLISHED = {
    gsm8k_correctness: lambda text: 2.0 if published_answer(text) == "72" else 0.0,
    gsm8k_integer: lambda text: 0.5 if published_answer(text).isdigit() else 0.0,
    gsm8k_strict_format: lambda text: (
        0.5 if re.match(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", text) else 0.0
    ),
    gsm8k_soft_format: lambda text: (
        0.5 if re.match(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", text) else 0.0
    ),
    gsm8k_tag_count: published_count,
}
TEXTS = [
    "", "72", "4", "²", "-4", "1,000", "3.5", ONE_LINE, USUAL, ONE_LINE + "x" * 1000, blocks("a", "72", ""),
    "Sure! " + ONE_LINE,
    ONE_LINE.replace("\n", ""), ONE_LINE.replace("\n", " "), ONE_LINE.replace("\n", "\r\n"), ONE_LINE * 2,
    "<answer>72", "72</answer>", "<answer>\n72\n</answer>\n", "\n</answer>", ONE_LINE.removesuffix("</answer>\n"),
]  # fmt: skip


@pytest.mark.parametrize("make", PUBLISHED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:25])
def test_compat_is_the_published_code(make: Any, text: str) -> None:
    assert score(make(compat=True), text, answer="72") == pytest.approx(PUBLISHED[make](text), abs=1e-12)


# Right answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold", "right", "copied"),
    [
        ("72", "72", 2.0, 2.0),
        ("71", "72", 0.0, 0.0),
        ("72.0", "72", 2.0, 0.0),
        ("1,000", "1000", 2.0, 0.0),
        ("1000", "1,000", 2.0, 0.0),
        ("$20", "20", 2.0, 0.0),
        ("72 apples", "72", 2.0, 0.0),
        ("The answer is 72.", "72", 2.0, 0.0),
        (r"\boxed{72}", "72", 2.0, 0.0),
        ("-5", "-5", 2.0, 2.0),
        ("\u22125", "-5", 2.0, 0.0),
        ("5", "-5", 0.0, 0.0),
        ("0", "0", 2.0, 2.0),
        ("0.00", "0", 2.0, 0.0),
        ("72", 72, 2.0, None),
        ("72", "8 rows of 9 are 8*9 = 72\n#### 72", 2.0, 0.0),
        ("71 or 72", "72", 0.0, 0.0),
        ("70 71 72 73", "72", 0.0, 0.0),
        ("6 * 12", "72", 0.0, 0.0),
        ("3,7", "37", 0.0, 0.0),
        ("", "72", 0.0, 0.0),
        ("72", "see the figure", None, 0.0),
    ],
)
def test_right_answers(answer: str, gold: Any, right: float | None, copied: float | None) -> None:
    assert score(gsm8k_correctness(), blocks("...", answer), answer=gold) == right
    assert score(gsm8k_correctness(compat=True), blocks("...", answer), answer=gold) == copied


@pytest.mark.parametrize(
    ("text", "right", "copied"),
    [
        ("72", 0.0, 2.0),
        ("<answer>72", 0.0, 2.0),
        ("72</answer>", 0.0, 2.0),
        ("<answer>72</answer> or 73", 2.0, 2.0),
        ("<answer>71</answer><answer>72</answer>", 2.0, 2.0),
        ("<answer>72</answer><answer>71</answer>", 0.0, 0.0),
        ("<answer>72</answer> that is, <answer>73", 0.0, 0.0),
    ],
)
def test_what_counts_as_the_answer(text: str, right: float, copied: float) -> None:
    assert score(gsm8k_correctness(), text, answer="72") == right
    assert score(gsm8k_correctness(compat=True), text, answer="72") == copied


# Whole numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "whole", "copied"),
    [
        ("4", 0.5, 0.5), ("-4", 0.5, 0.0), ("\u22124", 0.5, 0.0), ("+4", 0.5, 0.0), ("1,000", 0.5, 0.0),
        ("007", 0.5, 0.5),
        ("3.5", 0.0, 0.0), ("4.0", 0.0, 0.0), ("²", 0.0, 0.5), ("٤", 0.0, 0.5), ("1,00", 0.0, 0.0), ("3,7", 0.0, 0.0),
        ("4 apples", 0.0, 0.0), ("four", 0.0, 0.0), ("", 0.0, 0.0), ("4\n5", 0.0, 0.0),
    ],
)  # fmt: skip
def test_whole_numbers(answer: str, whole: float, copied: float) -> None:
    assert score(gsm8k_integer(), blocks("...", answer)) == whole
    assert score(gsm8k_integer(compat=True), blocks("...", answer)) == copied


def test_a_bare_number_is_no_answer() -> None:
    assert (score(gsm8k_integer(), "4"), score(gsm8k_integer(compat=True), "4")) == (0.0, 0.5)


# Formats -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strict", "soft", "copied_strict", "copied_soft"),
    [
        (ONE_LINE, 0.5, 0.5, 0.5, 0.0),
        (USUAL, 0.5, 0.5, 0.0, 0.0),
        (USUAL + "\n", 0.5, 0.5, 0.0, 0.0),
        (USUAL.replace("\n", "\r\n"), 0.5, 0.5, 0.0, 0.0),
        (ONE_LINE.replace("\n", ""), 0.0, 0.5, 0.0, 0.5),
        (ONE_LINE.replace("\n", " "), 0.0, 0.5, 0.0, 0.5),
        (ONE_LINE.replace("</reasoning>\n", "</reasoning>\n\n"), 0.0, 0.5, 0.0, 0.0),
        (ONE_LINE.replace("\n</", "</"), 0.0, 0.5, 0.0, 0.0),
        (ONE_LINE.replace("<answer>\n", "<answer>"), 0.0, 0.5, 0.0, 0.0),
        ("\n\n" + ONE_LINE, 0.0, 0.5, 0.0, 0.0),
        (ONE_LINE + "\n", 0.5, 0.5, 0.5, 0.0),
        (ONE_LINE + "\n\n", 0.5, 0.5, 0.0, 0.0),
        (ONE_LINE + "Bye.", 0.0, 0.5, 0.0, 0.0),
        ("Sure! " + ONE_LINE, 0.0, 0.0, 0.0, 0.0),
        (ONE_LINE + ONE_LINE, 0.0, 0.0, 0.0, 0.0),
        (ONE_LINE.replace("</reasoning>", ""), 0.0, 0.0, 0.0, 0.0),
        ("<answer>\n72\n</answer>\n<reasoning>\nx\n</reasoning>\n", 0.0, 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_formats(text: str, strict: float, soft: float, copied_strict: float, copied_soft: float) -> None:
    assert score(gsm8k_strict_format(), text) == strict
    assert score(gsm8k_soft_format(), text) == soft
    # `$` matches in front of a last line end too, so the copied pattern allows two of them, and no more.
    assert score(gsm8k_strict_format(compat=True), text) == copied_strict
    assert score(gsm8k_soft_format(compat=True), text) == copied_soft


@pytest.mark.parametrize("opening", ["<reasoning>", "<reasoning>\n"])
def test_formats_where_the_prompt_opened_the_first_tag(opening: str) -> None:
    rest = ONE_LINE.removeprefix("<reasoning>").removeprefix("\n" if opening.endswith("\n") else "")
    for make in (gsm8k_strict_format, gsm8k_soft_format):
        assert score(make(), rest, prompts="Q: 8 * 9? " + opening) == 0.5
        assert score(make(), rest, prompts="Q: 8 * 9? ") == 0.0
        assert score(make(prompt_opens_first=True), rest) == 0.5
        assert score(make(), ONE_LINE, prompts="Q: 8 * 9? " + opening) == 0.0
    assert score(gsm8k_tag_count(), rest, prompts="Q: 8 * 9? " + opening) == 0.375
    assert score(gsm8k_tag_count(), "", prompts="Q: 8 * 9? " + opening) == 0.0


def test_tags_are_parameters() -> None:
    text = ONE_LINE.replace("reasoning>", "work>").replace("answer>", "result>")
    for compat in (False, True):
        assert score(gsm8k_strict_format(tags=("work", "result"), compat=compat), text) == 0.5
        assert score(gsm8k_tag_count(tags=("work", "result"), compat=compat), text) == 0.5
        assert score(gsm8k_correctness(tag="result", compat=compat), text, answer="72") == 2.0
        assert score(gsm8k_integer(tag="result", compat=compat), text) == 0.5
    assert score(gsm8k_soft_format(tags=("work", "result")), text) == 0.5


# Tags ----------------------------------------------------------------------------------------------------------------


def test_counted_tags() -> None:
    for text, counted, copied in [
        (ONE_LINE, 0.5, 0.5),
        (blocks("8 * 9", "72", end=""), 0.5, 0.501 - 0.001 * len(ONE_LINE[:-1])),
        (ONE_LINE + "x" * 100, 0.4, 0.3),
        (ONE_LINE + "x" * 1000, 0.0, -1.5),
        (ONE_LINE.replace("\n", " "), 0.5, 0.0),
        (ONE_LINE + "<answer>", 0.375 - 0.008, 0.5 - 0.016),
        ("<reasoning>\n", 0.125, 0.125),
        ("", 0.0, 0.0),
    ]:
        assert score(gsm8k_tag_count(), text) == pytest.approx(counted), text
        assert score(gsm8k_tag_count(compat=True), text) == pytest.approx(copied), text
    # The number that goes round: a perfect answer of 50 characters without its last line end gets 0.451.
    fifty = blocks("xxxx", "7", end="")
    assert len(fifty) == 50 and score(gsm8k_tag_count(compat=True), fifty) == pytest.approx(0.451)


def test_a_longer_right_answer_never_gets_less_than_a_short_one() -> None:
    """The hidden length penalty: it falls with the reasoning where the last line end is missing."""
    short, long = blocks("x", "72", end=""), blocks("x" * 1000, "72", end="")
    assert score(gsm8k_tag_count(), short) == score(gsm8k_tag_count(), long) == 0.5
    assert score(gsm8k_tag_count(compat=True), long) < 0.0 < score(gsm8k_tag_count(compat=True), short)


# All five ------------------------------------------------------------------------------------------------------------


def five(compat: bool) -> RewardRunner:
    makes = (gsm8k_tag_count, gsm8k_soft_format, gsm8k_strict_format, gsm8k_integer, gsm8k_correctness)
    return RewardRunner([make(compat=compat) for make in makes])  # type: ignore[operator]


def total(compat: bool, text: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = five(compat).score(prompts=["p"], completions=[text], completion_ids=[[1]], columns={"answer": ["72"]})
    return sum(value or 0.0 for value in table.scores[0])


def test_the_sum_of_all_five() -> None:
    assert total(False, USUAL) == total(False, ONE_LINE) == 4.0
    # Strict and soft exclude each other in the copied code.
    assert total(True, ONE_LINE) == 3.5
    assert total(True, ONE_LINE.replace("\n", "")) == 3.0
    # A right answer is worth as much as everything else together.
    assert total(False, USUAL.replace("72", "73")) == 2.0
    assert five(False).names == (
        "gsm8k_tag_count",
        "gsm8k_soft_format",
        "gsm8k_strict_format",
        "gsm8k_integer",
        "gsm8k_correctness",
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: gsm8k_correctness(tag="<answer>"),
        lambda: gsm8k_integer(score=float("nan")),
        lambda: gsm8k_strict_format(tags=("a", "b", "c"), compat=True),
        lambda: gsm8k_soft_format(prompt_opens_first=True, compat=True),
        lambda: gsm8k_tag_count(score=-1.0),
        lambda: tag_count(absent=0.5),
        lambda: tag_format(tags=[("<a>", "<a>")]),
        lambda: tag_format(tags=[("<a>", "<a>b")]),
        lambda: tag_format(tags=[("<a>",)]),
        lambda: tag_format(score=float("inf")),
        lambda: banded_answer(bands=[(0.0, 1.0)]),
    ],
)
def test_settings_without_a_meaning_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# The notebooks -------------------------------------------------------------------------------------------------------

NOTEBOOK_TAGS = [("<start_working_out>", "<end_working_out>"), "SOLUTION"]
GOOD = "<start_working_out>8 rows\nof 9<end_working_out>\n<SOLUTION>72</SOLUTION>"


def test_the_exact_format_of_the_notebooks() -> None:
    exact = tag_format(tags=NOTEBOOK_TAGS, score=3.0)
    assert score(exact, GOOD) == 3.0
    assert score(exact, GOOD.removeprefix("<start_working_out>"), prompts="72? <start_working_out>\n") == 3.0
    # Their pattern is searched for line by line, so it accepts junk lines around it.
    assert score(exact, "junk\n" + GOOD) == score(exact, GOOD + "\njunk") == 0.0


def test_the_approximate_format_of_the_notebooks() -> None:
    approximate = tag_count(tags=NOTEBOOK_TAGS)
    assert score(approximate, GOOD) == 2.0
    assert score(approximate, "") == -4.0
    assert score(approximate, GOOD + "<SOLUTION>") == 0.5
    rest = GOOD.removeprefix("<start_working_out>")
    assert score(approximate, rest, prompts="72? <start_working_out>") == 1.5
    assert score(approximate, GOOD, prompts="72? <start_working_out>") == 0.5
    assert score(tag_count(tags=NOTEBOOK_TAGS, absent=-0.5), "") == -2.0


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("72", "72", 5.0),
        (" 72 ", "72", 5.0),
        ("72.0", "72", 5.0),
        ("1,000", "1000", 5.0),
        ("$20", "20", 5.0),
        ("0", "0", 5.0),
        ("0.0", "0", 5.0),
        ("-5", "-5", 5.0),
        ("\u22125", "-5", 5.0),
        ("66", "60", 2.0),
        ("54", "60", 2.0),
        ("67", "60", 1.5),
        ("72", "60", 1.5),
        ("48", "60", 1.5),
        ("73", "60", -2.5),
        ("-66", "-60", 2.0),
        ("66", "-60", -2.5),
        ("0.001", "0", -2.5),
        ("cat", "60", -4.5),
        (",", "60", -4.5),
        (".", "60", -4.5),
        ("60 or 66", "60", -4.5),
        ("", "60", -4.5),
    ],
)
def test_banded_answers(answer: str, gold: str, expected: float) -> None:
    assert score(banded_answer(), f"so\n<SOLUTION>{answer}</SOLUTION>", answer=gold) == expected


def test_banded_answers_outside_of_a_block() -> None:
    for text in ("72", "<SOLUTION>72", "</SOLUTION>72<SOLUTION>", ""):
        assert score(banded_answer(), text, answer="72") == -2.0
    assert score(banded_answer(), "<SOLUTION>cat</SOLUTION> 72", answer="72") == -4.5
    assert score(banded_answer(), "<SOLUTION>72</SOLUTION>", answer="seventy-two") is None
    small = banded_answer(exact=3.0, bands=[(0.1, 1.0), (0.2, 0.5)], far=-1.5, unreadable=-1.5, missing=0.0)
    assert [score(small, f"<SOLUTION>{n}</SOLUTION>", answer=60) for n in (60, 61, 70, 99)] == [3.0, 1.0, 0.5, -1.5]
    assert small.value_range == (-1.5, 3.0)
    # Exactly on the edge; as floats, 1.3 - 1 and 0.3 differ.
    assert score(banded_answer(bands=[(0.3, 1.0)]), "<SOLUTION>78</SOLUTION>", answer="60") == 1.0


def test_the_number_check_of_the_notebooks() -> None:
    check = number_score(3.5, -1.5, -2.5, tag="SOLUTION")
    for text, gold, expected in [
        ("<SOLUTION>72</SOLUTION>", "72", 3.5),
        ("<SOLUTION>1,000</SOLUTION>", "1000", 3.5),
        ("<SOLUTION>-4</SOLUTION>", "-4", 3.5),
        ("<SOLUTION>4</SOLUTION>", "-4", -1.5),
        ("<SOLUTION>0</SOLUTION>", "0", 3.5),
        ("<SOLUTION>71</SOLUTION>", "72", -1.5),
        ("<SOLUTION>,</SOLUTION>", "72", -2.5),
        ("<SOLUTION>none</SOLUTION> 72", "72", -2.5),
        ("<SOLUTION>72", "72", -2.5),
        ("72", "72", -2.5),
        ("", "72", -2.5),
    ]:
        assert score(check, text, answer=gold) == expected, text


def test_the_best_and_the_worst_of_the_four_notebook_rewards() -> None:
    rewards = [
        tag_format(NOTEBOOK_TAGS, score=3.0),
        tag_count(NOTEBOOK_TAGS),
        banded_answer(),
        number_score(3.5, -1.5, -2.5, tag="SOLUTION"),
    ]
    rest = GOOD.removeprefix("<start_working_out>")
    prompt = "What is 8 * 9? <start_working_out>\n"
    assert [score(reward, rest, prompts=prompt, answer="72") for reward in rewards] == [3.0, 1.5, 5.0, 3.5]
    assert sum(score(reward, "junk", prompts=prompt, answer="72") for reward in rewards) == -7.5
