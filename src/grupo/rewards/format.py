"""Rewards for the shape of a completion: the tags it must open and close."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers import completion_text
from grupo.rewards.verifiers import with_range


class TagFormat:
    """See `tag_format`."""

    def __init__(self, tags: Sequence[str], prompt_opens_first: bool | None, text_after: bool) -> None:
        self.__name__ = "tag_format"
        self.value_range = (0.0, 1.0)
        self.tags = (tags,) if isinstance(tags, str) else tuple(tags)
        if not self.tags or len(set(self.tags)) < len(self.tags) or not all(tag.isidentifier() for tag in self.tags):
            raise ConfigError(
                f"tags={tags!r} cannot describe a format: give the names of the blocks in order, each once and without "
                "angle brackets, as in tags=('think', 'answer')."
            )
        self.prompt_opens_first = prompt_opens_first
        self.text_after = text_after
        self._warned = False

    def __call__(
        self,
        completions: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        prompt_texts: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[float]:
        """1.0 or 0.0 for each completion (a string, a list of messages, or None)."""
        faults = []
        for row, completion in enumerate(completions):
            prompt = prompt_texts[row] if prompt_texts is not None else prompts[row] if prompts is not None else None
            faults.append(self.fault(completion_text(completion) or "", self._is_open(prompt)))
        if faults and not self._warned and all(faults):
            self._warned = True
            self._warn(faults)
        return [0.0 if fault else 1.0 for fault in faults]

    def fault(self, text: str, first_is_open: bool) -> str | None:
        """What is wrong with one completion, or None; `first_is_open`: the prompt ended in the first opening tag."""
        if first_is_open:
            text = f"<{self.tags[0]}>" + text
        position = 0
        for tag in self.tags:
            for mark in (f"<{tag}>", f"</{tag}>"):
                if text.count(mark) != 1:
                    times = text.count(mark) - (first_is_open and mark == f"<{self.tags[0]}>")
                    return f"{mark} stands {times} times in it"
            opening, closing = text.index(f"<{tag}>"), text.index(f"</{tag}>")
            if opening < position or closing < opening:
                return f"<{tag}> or </{tag}> stands before what must come first"
            if text[position:opening].strip():
                return f"text stands in front of <{tag}>"
            position = closing + len(f"</{tag}>")
        if text[position:].strip() and not self.text_after:
            return f"text follows </{self.tags[-1]}>"
        return None

    def _is_open(self, prompt: Any) -> bool:
        if self.prompt_opens_first is not None:
            return self.prompt_opens_first
        return isinstance(prompt, str) and prompt.rstrip().endswith(f"<{self.tags[0]}>")

    def _warn(self, faults: list[str | None]) -> None:
        (fault, count), *_ = Counter(faults).most_common(1)
        hint = ""
        if self.prompt_opens_first is None:
            hint = (
                f" If the chat template ends the prompt in <{self.tags[0]}>, so that completions start inside it, set "
                "prompt_opens_first=True."
            )
        warnings.warn(
            f"{self.__name__} gave 0 to all {len(faults)} completions of a batch; for {count} of them because {fault}."
            f"{hint} A reward that is 0 everywhere teaches nothing.",
            stacklevel=3,
        )


def tag_format(
    tags: Sequence[str] = ("think", "answer"), prompt_opens_first: bool | None = None, text_after: bool = False
) -> TagFormat:
    """1.0 where the completion is one block per tag, `<think>...</think> <answer>...</answer>`, in order, else 0.0.

    Each tag is opened and closed exactly once. Blocks may span lines and may be empty; between and around them only
    white space is allowed (blank lines before the first tag too). Line ends may be of any kind. When a whole batch
    scores 0, the most frequent reason is given in one warning.

    Args:
        tags: names of the blocks.
        prompt_opens_first: whether the prompt already ends in the first opening tag, as templates of reasoning models
            do (TRL issue 6966), so that the completion must not repeat it. None: read it from the prompt, where that is
            text or the caller hands the rendered text over as `prompt_texts`; messages do not show it and count as
            False.
        text_after: free text may follow the last block, as in `tags=("think",)` with the answer behind it.
    """
    return TagFormat(tags, prompt_opens_first, text_after)


@with_range(0.0, 1.0)
def think_format_reward(
    completions: Sequence[Any], prompt_texts: Sequence[str] | None = None, **kwargs: Any
) -> list[float]:
    """1.0 where the completion starts with `<think>`, says it once, and closes it, as TRL's function of this name.

    Where the caller hands over rendered prompts, a prompt that ends in `<think>` has opened the block already, and the
    completion must not open it again (TRL issue 6966). `tag_format` is stricter, and takes other tags.
    """
    scores = []
    for row, completion in enumerate(completions):
        text = completion_text(completion) or ""
        if prompt_texts is not None and prompt_texts[row].rstrip().endswith("<think>"):
            text = "<think>" + text
        scores.append(float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text))
    return scores
