"""The five rewards of the GSM8K tutorials: right answer, whole number, strict and soft format, tags.

They expect

    <reasoning>
    ...
    </reasoning>
    <answer>
    ...
    </answer>

and are meant to be summed: at most 4.0, of which the right answer is 2.0. The widely copied tutorial code computes
something else than its descriptions say; it is in `examples/rewards/gsm8k_tutorial.py`, for comparison with published
runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grupo.rewards.answers.extraction import completion_texts
from grupo.rewards.library.format import TagCount, TagFormat, block_content, tag_delimiters
from grupo.rewards.library.numeric import NumberScore
from grupo.rewards.value_range import checked_range

_INTEGER = re.compile(r"[+\-\u2212]?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)")
TAGS = ("reasoning", "answer")


class Integer:
    """See `gsm8k_integer`."""

    def __init__(self, score: float, tag: str) -> None:
        self.__name__ = "gsm8k_integer"
        self.value_range = checked_range(self.__name__, score=score, other=0.0)
        self.score, self.tag = float(score), tag
        tag_delimiters((tag,))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        answers = [block_content(text, self.tag) for text in completion_texts(completions)]
        return [self.score if _INTEGER.fullmatch(answer or "") else 0.0 for answer in answers]


class StrictFormat(TagFormat):
    """`TagFormat` with every tag alone on its line, as the prompt shows it."""

    def violation(self, text: str, first_is_open: bool) -> str | None:
        text = text.replace("\r\n", "\n")
        violation = super().violation(text, first_is_open)
        if violation is not None:
            return violation
        if first_is_open:
            # The line end after a tag of the prompt may be part of the prompt.
            text = self.delimiters[0][0] + "\n" + text
        position, gap = 0, ""
        for opening, closing in self.delimiters:
            start, end = text.index(opening), text.index(closing)
            content = text[start + len(opening) : end]
            if text[position:start] != gap or len(content) < 2 or content[0] != "\n" or content[-1] != "\n":
                return f"{opening} or {closing} is not alone on its line"
            position, gap = end + len(closing), "\n"
        return None


def gsm8k_correctness(score: float = 2.0, tag: str = "answer", gold_column: str = "answer") -> NumberScore:
    """`score` where the answer block holds the gold number, else 0.0.

    The last block of the tag counts; it must be closed and hold one number. `72`, `72.0`, `$72`, `72 apples` and
    `The answer is 72.` all hold 72, and `1,000` holds 1000; `71 or 72` holds none. The gold answer is a number, a text
    that is one, or a GSM8K solution with `#### 72`. Where it cannot be read the reward abstains.
    """
    return NumberScore(score, 0.0, 0.0, tag, gold_column, name="gsm8k_correctness")


def gsm8k_integer(score: float = 0.5, tag: str = "answer") -> Integer:
    """`score` where the answer block holds a whole number and nothing else, right or wrong, else 0.0.

    `-4` and `1,000` are whole numbers; `3.5`, `²` and `4 apples` are not. It pays for any number, which helps while
    almost nothing is right yet.
    """
    return Integer(score, tag)


def gsm8k_strict_format(
    score: float = 0.5, tags: Sequence[str] = TAGS, prompt_opens_first: bool | None = None
) -> TagFormat:
    r"""`score` where the completion consists of the blocks, each tag alone on its line, else 0.0.

    Blocks may span lines, and `\r\n` is a line end. White space may follow the last tag, but need not, since chat
    models stop there. Each tag occurs once. For `prompt_opens_first` see `tag_format`.
    """
    return StrictFormat(tags, prompt_opens_first, text_after=False, score=score, name="gsm8k_strict_format")


def gsm8k_soft_format(
    score: float = 0.5, tags: Sequence[str] = TAGS, prompt_opens_first: bool | None = None
) -> TagFormat:
    """`score` where the completion starts with the blocks in order, wherever the line ends are, else 0.0.

    Each tag occurs once, blank lines may come first, and text may follow: `tag_format` with `text_after=True`. Whatever
    satisfies `gsm8k_strict_format` satisfies this too.
    """
    return TagFormat(tags, prompt_opens_first, text_after=True, score=score, name="gsm8k_soft_format")


def gsm8k_tag_count(
    score: float = 0.125,
    tail_penalty: float = 0.001,
    tags: Sequence[str] = TAGS,
    prompt_opens_first: bool | None = None,
) -> TagCount:
    """`score` for each of the four tags that occurs exactly once, minus `tail_penalty` for each character after the
    last closing tag; never below 0.0.

    White space after the last tag is free. See `tag_count`.
    """
    return TagCount(tags, score, 0.0, tail_penalty, prompt_opens_first, name="gsm8k_tag_count")
