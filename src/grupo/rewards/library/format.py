"""Rewards for the shape of a completion: the tags it must open and close.

A tag is a name, `think` for `<think>` and `</think>`, or a pair of marks, as in `("<start>", "<end>")`.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers.extraction import completion_texts, last_block
from grupo.rewards.value_range import score_range, with_range

Tag = str | Sequence[str]


def tag_marks(tags: Sequence[Tag]) -> tuple[tuple[str, str], ...]:
    """The (opening, closing) marks of tags in their order.

    Raises:
        ConfigError: no tag, a name with other characters than letters, digits and underscores, or marks that are equal
            or part of one another, so that they cannot be counted.
    """
    marks = []
    for tag in (tags,) if isinstance(tags, str) else tags:
        if isinstance(tag, str):
            marks.append((f"<{tag}>", f"</{tag}>") if tag.isidentifier() else ("", ""))
        else:
            is_pair = isinstance(tag, (list, tuple)) and len(tag) == 2 and all(isinstance(mark, str) for mark in tag)
            marks.append((tag[0], tag[1]) if is_pair else ("", ""))
    pairs = itertools.permutations(itertools.chain.from_iterable(marks), 2)
    if not marks or any(one in other for one, other in pairs):
        raise ConfigError(
            f"tags={tags!r} cannot describe a format: give the names of the blocks in order, each once and without "
            "angle brackets, as in tags=('think', 'answer'), or pairs of marks of which none is part of another, as in "
            "tags=[('<start>', '<end>')]."
        )
    return tuple(marks)


def block_content(text: str, tag: Tag) -> str | None:
    """What stands in the last block of this tag, stripped; None where its last opening mark is not closed."""
    ((opening, closing),) = tag_marks((tag,))
    return last_block(text, opening, closing)


class Tagged:
    """A reward on blocks between tags, the first of which the prompt may have opened already."""

    def __init__(self, name: str, tags: Sequence[Tag], prompt_opens_first: bool | None) -> None:
        self.__name__ = name
        self.marks = tag_marks(tags)
        self.prompt_opens_first = prompt_opens_first

    def rows(
        self, completions: Sequence[Any], prompts: Sequence[Any] | None, prompt_texts: Sequence[str] | None
    ) -> list[tuple[str, bool]]:
        """(text, whether its prompt ended in the first opening mark) of each completion."""
        given = prompts if prompt_texts is None else prompt_texts
        return [
            (text, self._is_open(None if given is None else given[row]))
            for row, text in enumerate(completion_texts(completions))
        ]

    def _is_open(self, prompt: Any) -> bool:
        if self.prompt_opens_first is not None:
            return self.prompt_opens_first
        return isinstance(prompt, str) and prompt.rstrip().endswith(self.marks[0][0].rstrip())


class TagFormat(Tagged):
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
        self.value_range = score_range(name, wrong=0.0, score=score)
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
        faults = [self.fault(text, is_open) for text, is_open in self.rows(completions, prompts, prompt_texts)]
        if faults and not self._warned and all(faults):
            self._warned = True
            self._warn(faults)
        return [0.0 if fault else self.score for fault in faults]

    def fault(self, text: str, first_is_open: bool) -> str | None:
        """What is wrong with one completion, or None; `first_is_open`: the prompt ended in the first opening mark."""
        if first_is_open:
            text = self.marks[0][0] + text
        position = 0
        for opening, closing in self.marks:
            for mark in (opening, closing):
                if text.count(mark) != 1:
                    times = text.count(mark) - (first_is_open and mark == self.marks[0][0])
                    return f"{mark} stands {times} times in it"
            start, end = text.index(opening), text.index(closing)
            if start < position or end < start:
                return f"{opening} or {closing} stands before what must come first"
            if text[position:start].strip():
                return f"text stands in front of {opening}"
            position = end + len(closing)
        if text[position:].strip() and not self.text_after:
            return f"text follows {self.marks[-1][1]}"
        return None

    def _warn(self, faults: list[str | None]) -> None:
        (fault, count), *_ = Counter(faults).most_common(1)
        hint = ""
        if self.prompt_opens_first is None:
            hint = (
                f" If the chat template ends the prompt in {self.marks[0][0]}, so that completions start inside it, "
                "set prompt_opens_first=True."
            )
        warnings.warn(
            f"{self.__name__} gave 0 to all {len(faults)} completions of a batch; for {count} of them because {fault}."
            f"{hint} A reward that is 0 everywhere teaches nothing.",
            stacklevel=3,
        )


class TagCount(Tagged):
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
        count = 2 * len(self.marks)
        score_range(name, absent=absent, present=present, tail_penalty=tail_penalty)
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
        return [self.count(text, is_open) for text, is_open in self.rows(completions, prompts, prompt_texts)]

    def count(self, text: str, first_is_open: bool) -> float:
        times = [text.count(mark) for mark in itertools.chain.from_iterable(self.marks)]
        # An opening mark of the prompt is not the model's merit, and must not be repeated.
        wrong = (times.pop(0) > 0) if first_is_open else 0
        earned = self.present * sum(number == 1 for number in times)
        lost = self.absent * (wrong + sum(number != 1 for number in times))
        tail = len(text.partition(self.marks[-1][1])[2].strip()) if times[-1] == 1 else 0
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
    scores 0, the most frequent reason is given in one warning.

    Args:
        tags: names of the blocks, or pairs of marks: `[("<start_working_out>", "<end_working_out>"), "SOLUTION"]`.
        prompt_opens_first: whether the prompt already ends in the first opening tag, as templates of reasoning models
            do (TRL issue 6966), so that the completion must not repeat it. None: read it from the prompt, where that is
            text or the caller hands the rendered text over as `prompt_texts`; messages do not show it and count as
            False.
        text_after: free text may follow the last block, as in `tags=("think",)` with the answer behind it.
        score: what the right format is worth; much less than the right answer, or format is all that is learned.
    """
    return TagFormat(tags, prompt_opens_first, text_after, score)


@with_range(0.0, 1.0)
def think_format_reward(
    completions: Sequence[Any], prompt_texts: Sequence[str] | None = None, **kwargs: Any
) -> list[float]:
    """1.0 where the completion starts with `<think>`, says it once, and closes it, as TRL's function of this name.

    Where the caller hands over rendered prompts, a prompt that ends in `<think>` has opened the block already, and the
    completion must not open it again (TRL issue 6966). `tag_format` is stricter, and takes other tags.
    """
    scores = []
    for row, text in enumerate(completion_texts(completions)):
        if prompt_texts is not None and prompt_texts[row].rstrip().endswith("<think>"):
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
    """`present` for each opening or closing mark that stands in the completion exactly once, `absent` for each other.

    The approximate format reward of notebooks: it pays for parts of a format that is not complete yet. It does not look
    at the order of the marks, nor at what is between them; `tag_format` does.

    Args:
        tags, prompt_opens_first: as in `tag_format`. A mark that the prompt opened pays nothing, and costs `absent`
            where it is repeated.
        tail_penalty: subtracted for each character behind the last closing mark, white space around it aside; at most
            what the marks have earned.
    """
    return TagCount(tags, present, absent, tail_penalty, prompt_opens_first)
