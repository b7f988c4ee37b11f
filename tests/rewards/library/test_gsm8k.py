"""The rewards of the GSM8K tutorials and of the notebooks do what their descriptions promise."""

from __future__ import annotations

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
# What a chat model writes: several lines, and no line end after the last tag.
USUAL = blocks("There are 8 rows.\nEach has 9.\n\n8 * 9 = 72", "72", end="")


def test_right_answers() -> None:
    for answer, gold in [
        *(("72", "72"), ("72.0", "72"), ("1,000", "1000"), ("1000", "1,000"), ("$20", "20"), ("72 apples", "72")),
        *(("The answer is 72.", "72"), (r"\boxed{72}", "72"), ("-5", "-5"), ("\u22125", "-5"), ("0.00", "0")),
        *(("72", 72), ("72", "8 rows of 9 are 8*9 = 72\n#### 72")),
    ]:
        assert score(gsm8k_correctness(), blocks("...", answer), answer=gold) == 2.0, answer
    for answer, gold in [
        *(("71", "72"), ("5", "-5"), ("71 or 72", "72"), ("70 71 72 73", "72"), ("6 * 12", "72"), ("3,7", "37")),
        ("", "72"),
    ]:
        assert score(gsm8k_correctness(), blocks("...", answer), answer=gold) == 0.0, answer
    assert score(gsm8k_correctness(), blocks("...", "72"), answer="see the figure") is None


def test_the_last_closed_block_is_the_answer() -> None:
    for text in ("<answer>72</answer> or 73", "<answer>71</answer><answer>72</answer>"):
        assert score(gsm8k_correctness(), text, answer="72") == 2.0, text
    for text in (
        *("72", "<answer>72", "72</answer>", "<answer>72</answer><answer>71</answer>"),
        "<answer>72</answer> that is, <answer>73",
    ):
        assert score(gsm8k_correctness(), text, answer="72") == 0.0, text


def test_whole_numbers() -> None:
    for answer in ("4", "-4", "\u22124", "+4", "1,000", "007"):
        assert score(gsm8k_integer(), blocks("...", answer)) == 0.5, answer
    for answer in ("3.5", "4.0", "²", "٤", "1,00", "3,7", "4 apples", "four", "", "4\n5"):
        assert score(gsm8k_integer(), blocks("...", answer)) == 0.0, answer
    assert score(gsm8k_integer(), "4") == 0.0


@pytest.mark.parametrize(
    ("text", "strict", "soft"),
    [
        (ONE_LINE, 0.5, 0.5),
        (USUAL, 0.5, 0.5),
        (USUAL.replace("\n", "\r\n"), 0.5, 0.5),
        (ONE_LINE + "\n\n", 0.5, 0.5),
        (ONE_LINE.replace("\n", " "), 0.0, 0.5),
        (ONE_LINE.replace("</reasoning>\n", "</reasoning>\n\n"), 0.0, 0.5),
        (ONE_LINE.replace("\n</", "</"), 0.0, 0.5),
        (ONE_LINE.replace("<answer>\n", "<answer>"), 0.0, 0.5),
        ("\n\n" + ONE_LINE, 0.0, 0.5),
        (ONE_LINE + "Bye.", 0.0, 0.5),
        ("Sure! " + ONE_LINE, 0.0, 0.0),
        (ONE_LINE + ONE_LINE, 0.0, 0.0),
        (ONE_LINE.replace("</reasoning>", ""), 0.0, 0.0),
        ("<answer>\n72\n</answer>\n<reasoning>\nx\n</reasoning>\n", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_formats(text: str, strict: float, soft: float) -> None:
    assert (score(gsm8k_strict_format(), text), score(gsm8k_soft_format(), text)) == (strict, soft)


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
    for make in (gsm8k_strict_format, gsm8k_soft_format, gsm8k_tag_count):
        assert score(make(tags=("work", "result")), text) == 0.5
    assert score(gsm8k_correctness(tag="result"), text, answer="72") == 2.0
    assert score(gsm8k_integer(tag="result"), text) == 0.5


def test_counted_tags() -> None:
    for text, expected in [
        (ONE_LINE, 0.5),
        (USUAL, 0.5),  # no hidden penalty for length
        (ONE_LINE + "x" * 100, 0.4),
        (ONE_LINE + "x" * 1000, 0.0),
        (ONE_LINE + "<answer>", 0.375 - 0.008),
        ("<reasoning>\n", 0.125),
        ("", 0.0),
    ]:
        assert score(gsm8k_tag_count(), text) == pytest.approx(expected), text


def test_the_sum_of_all_five() -> None:
    makes = (gsm8k_tag_count, gsm8k_soft_format, gsm8k_strict_format, gsm8k_integer, gsm8k_correctness)
    runner = RewardRunner([make() for make in makes])  # type: ignore[operator]
    assert runner.names == tuple(make.__name__ for make in makes)
    # A right answer is worth as much as everything else together.
    for text, total in [(USUAL, 4.0), (ONE_LINE, 4.0), (USUAL.replace("72", "73"), 2.0)]:
        table = runner.score(prompts=["p"], completions=[text], completion_ids=[[1]], columns={"answer": ["72"]})
        assert sum(value or 0.0 for value in table.scores[0]) == total


@pytest.mark.parametrize(
    "make",
    [
        lambda: gsm8k_correctness(tag="<answer>"),
        lambda: gsm8k_integer(score=float("nan")),
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
    # Their pattern is searched for line by line, so it accepts other lines around the format.
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


def test_banded_answers() -> None:
    for gold, answers, expected in [
        ("72", ["72", " 72 ", "72.0"], 5.0),
        ("1000", ["1,000"], 5.0),
        ("20", ["$20"], 5.0),
        ("0", ["0", "0.0"], 5.0),
        ("-5", ["-5", "\u22125"], 5.0),
        ("60", ["66", "54"], 2.0),
        ("-60", ["-66"], 2.0),
        ("60", ["67", "72", "48"], 1.5),
        ("60", ["73"], -2.5),
        ("-60", ["66"], -2.5),
        ("0", ["0.001"], -2.5),
        ("60", ["cat", ",", ".", "60 or 66", ""], -4.5),
    ]:
        for answer in answers:
            text = f"so\n<SOLUTION>{answer}</SOLUTION>"
            assert score(banded_answer(), text, answer=gold) == expected, (answer, gold)


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
