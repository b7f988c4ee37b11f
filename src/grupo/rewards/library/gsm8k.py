r"""The five rewards of the GSM8K tutorials: right answer, whole number, strict and soft format, tags.

They expect

    <reasoning>
    ...
    </reasoning>
    <answer>
    ...
    </answer>

and are meant to be summed: at most 4.0, of which the right answer is 2.0. Each has two forms. The default does what
its description says. With `compat=True` it computes what the widely copied code computes, so that a run can be compared
with published ones; the docstrings name the differences. Both take texts, lists of messages, and None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers.extraction import completion_texts
from grupo.rewards.library.format import TagCount, TagFormat, block_content, tag_marks
from grupo.rewards.library.numeric import NumberScore
from grupo.rewards.value_range import score_range
from grupo.rewards.verifiers.base import GoldScore

_INTEGER = re.compile(r"[+\-\u2212]?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)")
TAGS = ("reasoning", "answer")


class Integer:
    """See `gsm8k_integer`."""

    def __init__(self, score: float, tag: str) -> None:
        self.__name__ = "gsm8k_integer"
        self.value_range = score_range(self.__name__, score=score, other=0.0)
        self.score, self.tag = float(score), tag
        tag_marks((tag,))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = completion_texts(completions)
        return [self.score if self.is_integer(text) else 0.0 for text in texts]

    def is_integer(self, text: str) -> bool:
        return _INTEGER.fullmatch(block_content(text, self.tag) or "") is not None


class StrictFormat(TagFormat):
    """`TagFormat` with every tag alone on its line, as the prompt shows it."""

    def fault(self, text: str, first_is_open: bool) -> str | None:
        text = text.replace("\r\n", "\n")
        fault = super().fault(text, first_is_open)
        if fault is not None:
            return fault
        if first_is_open:
            # The line end behind a tag of the prompt may be part of the prompt.
            text = self.marks[0][0] + "\n" + text
        position, gap = 0, ""
        for opening, closing in self.marks:
            start, end = text.index(opening), text.index(closing)
            content = text[start + len(opening) : end]
            if text[position:start] != gap or len(content) < 2 or content[0] != "\n" or content[-1] != "\n":
                return f"{opening} or {closing} does not stand alone on its line"
            position, gap = end + len(closing), "\n"
        return None


def gsm8k_correctness(
    score: float = 2.0, tag: str = "answer", gold_column: str = "answer", compat: bool = False
) -> GoldScore:
    """`score` where the answer block holds the gold number, else 0.0.

    The last block of the tag counts; it must be closed and hold one number. `72`, `72.0`, `$72`, `72 apples` and
    `The answer is 72.` all hold 72, and `1,000` holds 1000; `71 or 72` holds none. The gold answer is a number, a text
    that is one, or a GSM8K solution with `#### 72`. Where it cannot be read the reward abstains.

    With `compat=True` the text between the last opening and the next closing tag, stripped, must equal the gold text
    character by character; a gold answer that is no text is unreadable. So `72.0` and `1,000` are wrong; without tags
    the whole text is the answer, so a bare `72` is right; a block that was cut off is right; and an empty completion is
    right where the gold text is empty.
    """
    if compat:
        return LiteralCorrectness(score, tag, gold_column)
    return NumberScore(score, 0.0, 0.0, tag, gold_column, name="gsm8k_correctness")


def gsm8k_integer(score: float = 0.5, tag: str = "answer", compat: bool = False) -> Integer:
    """`score` where the answer block holds a whole number and nothing else, right or wrong, else 0.0.

    `-4` and `1,000` are whole numbers; `3.5`, `²` and `4 apples` are not. It pays for any number: a safety net for the
    time when almost nothing is right yet.

    With `compat=True` it is `str.isdigit` of the text between the tags, or of the whole text where there are none: `-4`
    and `1,000` get 0.0, and `²` and a bare `4` get the score.
    """
    return LiteralInteger(score, tag) if compat else Integer(score, tag)


def gsm8k_strict_format(
    score: float = 0.5,
    tags: Sequence[str] = TAGS,
    prompt_opens_first: bool | None = None,
    compat: bool = False,
) -> TagFormat | LiteralFormat:
    r"""`score` where the completion is the blocks, each tag alone on its line, else 0.0.

    Blocks may span lines, and `\r\n` is a line end. Behind the last tag there may be white space or nothing, since chat
    models stop there. Each tag stands there once. For `prompt_opens_first` see `tag_format`.

    With `compat=True` it is the pattern `^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$`, in which the
    dot does not match a line end: reasoning of two lines gets 0.0, and so does a text without a line end at its end.
    """
    if compat:
        (opening, closing), (answer, answer_end) = _two(tags, prompt_opens_first)
        pattern = rf"^{opening}\n.*?\n{closing}\n{answer}\n.*?\n{answer_end}\n$"
        return LiteralFormat("gsm8k_strict_format", score, pattern)
    return StrictFormat(tags, prompt_opens_first, text_after=False, score=score, name="gsm8k_strict_format")


def gsm8k_soft_format(
    score: float = 0.5,
    tags: Sequence[str] = TAGS,
    prompt_opens_first: bool | None = None,
    compat: bool = False,
) -> TagFormat | LiteralFormat:
    r"""`score` where the completion starts with the blocks in order, wherever the line ends are, else 0.0.

    Each tag stands there once, blank lines may come first, and text may follow: `tag_format` with `text_after=True`.
    What is right for `gsm8k_strict_format` is right here.

    With `compat=True` it is the pattern `<reasoning>.*?</reasoning>\s*<answer>.*?</answer>` at the start of the text,
    in which the dot does not match a line end. So a block of several lines gets 0.0, and no text gets both the strict
    and the soft score.
    """
    if compat:
        (opening, closing), (answer, answer_end) = _two(tags, prompt_opens_first)
        return LiteralFormat("gsm8k_soft_format", score, rf"{opening}.*?{closing}\s*{answer}.*?{answer_end}")
    return TagFormat(tags, prompt_opens_first, text_after=True, score=score, name="gsm8k_soft_format")


def gsm8k_tag_count(
    score: float = 0.125,
    tail_penalty: float = 0.001,
    tags: Sequence[str] = TAGS,
    prompt_opens_first: bool | None = None,
    compat: bool = False,
) -> TagCount | LiteralTagCount:
    r"""`score` for each of the four tags that stands there exactly once, less `tail_penalty` for each character behind
    the last closing tag; never below 0.0.

    White space behind the last tag is free. See `tag_count`.

    With `compat=True` tags count with the line ends around them, and characters behind the last tag are subtracted
    twice, without a limit. Where the last line end is missing, which is normal for chat models, the length of the whole
    text is subtracted: a hidden length penalty. So a perfect text gets 0.5, one without the last line end 0.501 less
    0.001 for each of its characters, and a perfect text with 1,000 characters behind it -1.5.
    """
    if compat:
        _two(tags, prompt_opens_first)
        return LiteralTagCount(score, tail_penalty, tags)
    return TagCount(tags, score, 0.0, tail_penalty, prompt_opens_first, name="gsm8k_tag_count")


def _two(tags: Sequence[str], prompt_opens_first: bool | None) -> list[tuple[str, str]]:
    """The marks of two tags as patterns; the copied code knows neither other numbers nor opened tags."""
    marks = [(re.escape(opening), re.escape(closing)) for opening, closing in tag_marks(tags)]
    if len(marks) != 2 or prompt_opens_first:
        raise ConfigError(
            f"compat=True is the code of the tutorials, which knows two tags that the completion opens; tags={tags!r}, "
            f"prompt_opens_first={prompt_opens_first} need compat=False."
        )
    return marks


# The code of the tutorials, bit by bit -------------------------------------------------------------------------------


def literal_answer(text: str, tag: str) -> str:
    """Between the last opening and the next closing tag; all of the text where there are none."""
    return text.split(f"<{tag}>")[-1].split(f"</{tag}>")[0].strip()


class LiteralCorrectness(GoldScore):
    """`gsm8k_correctness(compat=True)`"""

    needs = "With compat=True a gold answer is the text that must be matched; make it a string."

    def __init__(self, score: float, tag: str, gold_column: str) -> None:
        super().__init__("gsm8k_correctness", gold_column)
        self.value_range = score_range(self.__name__, score=score, other=0.0)
        self.right, self.tag = float(score), tag
        tag_marks((tag,))

    def can_read(self, gold: Any) -> bool:
        return isinstance(gold, str)

    def score(self, text: str, gold: Any) -> float | None:
        if not self.can_read(gold):
            return None
        return self.right if literal_answer(text, self.tag) == gold else 0.0


class LiteralInteger(Integer):
    """`gsm8k_integer(compat=True)`"""

    def is_integer(self, text: str) -> bool:
        return literal_answer(text, self.tag).isdigit()


class LiteralFormat:
    """`gsm8k_strict_format(compat=True)` and `gsm8k_soft_format(compat=True)`"""

    def __init__(self, name: str, score: float, pattern: str) -> None:
        self.__name__ = name
        self.value_range = score_range(name, score=score, other=0.0)
        self.score, self.pattern = float(score), re.compile(pattern)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = completion_texts(completions)
        return [self.score if self.pattern.match(text) else 0.0 for text in texts]


class LiteralTagCount:
    """`gsm8k_tag_count(compat=True)`"""

    def __init__(self, score: float, tail_penalty: float, tags: Sequence[str]) -> None:
        self.__name__ = "gsm8k_tag_count"
        score_range(self.__name__, score=score, tail_penalty=tail_penalty)
        self.score, self.tail_penalty = score, tail_penalty
        (self.opening, self.closing), (self.answer, self.answer_end) = tag_marks(tags)
        # A text that ends in its last tag gets one character back.
        self.value_range = (-math.inf, max(4 * score, 3 * score + tail_penalty))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        return [self.count(text) for text in completion_texts(completions)]

    def count(self, text: str) -> float:
        total = 0.0
        total += self.score * (text.count(f"{self.opening}\n") == 1)
        total += self.score * (text.count(f"\n{self.closing}\n") == 1)
        if text.count(f"\n{self.answer}\n") == 1:
            total += self.score - self.tail_penalty * len(text.split(f"\n{self.answer_end}\n")[-1])
        if text.count(f"\n{self.answer_end}") == 1:
            total += self.score - self.tail_penalty * (len(text.split(f"\n{self.answer_end}")[-1]) - 1)
        return total
