"""Rewards for the format of a completion: the tags it must open and close.

A tag is a name, `think` for `<think>` and `</think>`, or a pair of delimiters, as in `("<start>", "<end>")`.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers.extraction import completion_texts, last_block
from grupo.rewards.value_range import checked_range, declare_range
from grupo.utils.messages import pluralize

Tag = str | Sequence[str]


def tag_delimiters(tags: Sequence[Tag]) -> tuple[tuple[str, str], ...]:
    """The (opening, closing) delimiters of tags in their order.

    Raises:
        ConfigError: no tag, a name with other characters than letters, digits and underscores, or delimiters that are
            equal or part of one another, so that they cannot be counted.
    """
    delimiters = []
    for tag in (tags,) if isinstance(tags, str) else tags:
        if isinstance(tag, str):
            delimiters.append((f"<{tag}>", f"</{tag}>") if tag.isidentifier() else ("", ""))
        else:
            is_pair = isinstance(tag, (list, tuple)) and len(tag) == 2 and all(isinstance(part, str) for part in tag)
            delimiters.append((tag[0], tag[1]) if is_pair else ("", ""))
    pairs = itertools.permutations(itertools.chain.from_iterable(delimiters), 2)
    if not delimiters or any(one in other for one, other in pairs):
        raise ConfigError(
            f"tags={tags!r} cannot describe a format: give the names of the blocks in order, each once and without "
            "angle brackets, as in tags=('think', 'answer'), or pairs of delimiters none of which is part of another, "
            "as in tags=[('<start>', '<end>')]."
        )
    return tuple(delimiters)


def block_content(text: str, tag: Tag) -> str | None:
    """The stripped content of the last block of this tag; None if its last opening delimiter is not closed."""
    ((opening, closing),) = tag_delimiters((tag,))
    return last_block(text, opening, closing)


class TagReward:
    """A reward for blocks between tags, the first of which the prompt may have opened already."""

    def __init__(self, name: str, tags: Sequence[Tag], prompt_opens_first: bool | None) -> None:
        self.__name__ = name
        self.delimiters = tag_delimiters(tags)
        self.prompt_opens_first = prompt_opens_first

    def texts(
        self, completions: Sequence[Any], prompts: Sequence[Any] | None, prompt_texts: Sequence[str] | None
    ) -> list[tuple[str, bool]]:
        """(text, whether its prompt ended in the first opening delimiter) of each completion."""
        given = prompts if prompt_texts is None else prompt_texts
        return [
            (text, self._is_open(None if given is None else given[index]))
            for index, text in enumerate(completion_texts(completions))
        ]

    def _is_open(self, prompt: Any) -> bool:
        if self.prompt_opens_first is not None:
            return self.prompt_opens_first
        return isinstance(prompt, str) and prompt.rstrip().endswith(self.delimiters[0][0].rstrip())


class TagFormat(TagReward):
    """See `tag_format`."""

    def __init__(
        self,
        tags: Sequence[Tag],
        prompt_opens_first: bool | None,
        text_after: bool,
        score: float = 1.0,
        name: str = "tag_format",
    ) -> None:
        super().__init__(name, tags, prompt_opens_first)
        self.text_after = text_after
        self.value_range = checked_range(name, wrong=0.0, score=score)
        self.score = float(score)
        self._warned = False

    def __call__(
        self,
        completions: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        prompt_texts: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[float]:
        """`score` or 0.0 for each completion (a string, a list of messages, or None)."""
        texts = self.texts(completions, prompts, prompt_texts)
        violations = [self.violation(text, is_open) for text, is_open in texts]
        if violations and not self._warned and all(violations):
            self._warned = True
            self._warn(violations)
        return [0.0 if violation else self.score for violation in violations]

    def violation(self, text: str, first_is_open: bool) -> str | None:
        """The first deviation from the format, or None; `first_is_open`: the prompt ended in the first opening tag."""
        if first_is_open:
            text = self.delimiters[0][0] + text
        position = 0
        for opening, closing in self.delimiters:
            for delimiter in (opening, closing):
                if text.count(delimiter) != 1:
                    times = text.count(delimiter) - (first_is_open and delimiter == self.delimiters[0][0])
                    return f"{delimiter} occurs {pluralize(times, 'time')}"
            start, end = text.index(opening), text.index(closing)
            if start < position or end < start:
                return f"{opening} or {closing} is not in order"
            if text[position:start].strip():
                return f"there is text before {opening}"
            position = end + len(closing)
        if text[position:].strip() and not self.text_after:
            return f"there is text after {self.delimiters[-1][1]}"
        return None

    def _warn(self, violations: list[str | None]) -> None:
        (violation, count), *_ = Counter(violations).most_common(1)
        hint = ""
        if self.prompt_opens_first is None:
            hint = (
                f" If the chat template ends the prompt in {self.delimiters[0][0]}, so that completions start inside "
                "it, set prompt_opens_first=True."
            )
        warnings.warn(
            f"{self.__name__} gave 0 to all {len(violations)} completions of a batch, {count} of them because "
            f"{violation}.{hint} A reward that is always 0 teaches nothing.",
            stacklevel=3,
        )


class TagCount(TagReward):
    """See `tag_count`."""

    def __init__(
        self,
        tags: Sequence[Tag],
        present: float,
        absent: float,
        tail_penalty: float,
        prompt_opens_first: bool | None,
        name: str = "tag_count",
    ) -> None:
        super().__init__(name, tags, prompt_opens_first)
        count = 2 * len(self.delimiters)
        checked_range(name, absent=absent, present=present, tail_penalty=tail_penalty)
        if absent > 0 or present < 0 or tail_penalty < 0:
            raise ConfigError(
                f"{name}(present={present}, absent={absent}, tail_penalty={tail_penalty}) would pay for missing tags: "
                "`present` and `tail_penalty`, which is subtracted, are 0 or above, `absent` is 0 or below."
            )
        self.present, self.absent, self.tail_penalty = float(present), float(absent), float(tail_penalty)
        self.value_range = (count * self.absent + 0.0, count * self.present)

    def __call__(
        self,
        completions: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        prompt_texts: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[float]:
        return [self.count(text, is_open) for text, is_open in self.texts(completions, prompts, prompt_texts)]

    def count(self, text: str, first_is_open: bool) -> float:
        times = [text.count(mark) for mark in itertools.chain.from_iterable(self.delimiters)]
        # An opening tag of the prompt earns the model nothing, and must not be repeated.
        wrong = (times.pop(0) > 0) if first_is_open else 0
        earned = self.present * sum(number == 1 for number in times)
        lost = self.absent * (wrong + sum(number != 1 for number in times))
        tail = len(text.partition(self.delimiters[-1][1])[2].strip()) if times[-1] == 1 else 0
        return earned - min(self.tail_penalty * tail, earned) + lost


def tag_format(
    tags: Sequence[Tag] = ("think", "answer"),
    prompt_opens_first: bool | None = None,
    text_after: bool = False,
    score: float = 1.0,
) -> TagFormat:
    """`score` where the completion is one block per tag, `<think>...</think> <answer>...</answer>`, in order, else 0.0.

    Each tag is opened and closed exactly once. Blocks may span lines and may be empty; between and around them only
    white space is allowed (blank lines before the first tag too). Line ends may be of any kind. When a whole batch
    scores 0, one warning gives the most frequent reason.

    Args:
        tags: names of the blocks, or pairs of delimiters: `[("<start_working_out>", "<end_working_out>"), "SOLUTION"]`.
        prompt_opens_first: True if the prompt already ends in the first opening tag, as with templates of reasoning
            models (TRL issue 6966), so that the completion must not repeat it. None: read it from the prompt if that is
            text or the caller passes the rendered text as `prompt_texts`; messages do not show it and count as False.
        text_after: allow text after the last block, as in `tags=("think",)` followed by the answer.
        score: reward for the right format; keep it far below the right answer's, or format is all that is learned.
    """
    return TagFormat(tags, prompt_opens_first, text_after, score)


@declare_range(0.0, 1.0)
def think_format_reward(
    completions: Sequence[Any], prompt_texts: Sequence[str] | None = None, **kwargs: Any
) -> list[float]:
    """1.0 where the completion starts with its only `<think>` and closes it, as TRL's function of this name.

    If the caller passes rendered prompts, a prompt that ends in `<think>` has opened the block already, and the
    completion must not open it again (TRL issue 6966). `tag_format` is stricter, and takes other tags.
    """
    scores = []
    for index, text in enumerate(completion_texts(completions)):
        if prompt_texts is not None and prompt_texts[index].rstrip().endswith("<think>"):
            text = "<think>" + text
        scores.append(float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text))
    return scores


def tag_count(
    tags: Sequence[Tag] = ("think", "answer"),
    present: float = 0.5,
    absent: float = -1.0,
    tail_penalty: float = 0.0,
    prompt_opens_first: bool | None = None,
) -> TagCount:
    """`present` for each opening or closing tag that occurs exactly once, `absent` for each other one.

    The approximate format reward of notebooks: it pays for parts of a format that is not complete yet. It ignores the
    order of the tags and the text between them; `tag_format` checks both.

    Args:
        tags, prompt_opens_first: as in `tag_format`. A tag that the prompt opened pays nothing, and costs `absent` if
            the completion repeats it.
        tail_penalty: subtracted for each character after the last closing tag, surrounding white space excepted; at
            most what the tags have earned.
    """
    return TagCount(tags, present, absent, tail_penalty, prompt_opens_first)
