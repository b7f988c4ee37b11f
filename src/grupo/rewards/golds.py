r"""Gold answers as datasets hold them: whole solutions that end in `#### 72` or in `\boxed{72}`."""

from __future__ import annotations

from typing import Any

from grupo.rewards.answers import extract_boxed


def final_answer(gold: Any) -> Any:
    r"""The answer at the end of a written solution: what follows its last `####`, or its last box; else `gold` itself.

    A box that is not closed is no answer: the text stays as it is, and the rewards say that they cannot read it.
    """
    if not isinstance(gold, str):
        return gold
    tail = gold.rpartition("####")[2].strip()
    boxed = extract_boxed(tail)
    return tail if boxed is None else boxed.strip()
