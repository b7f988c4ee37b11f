"""Names: of files that several parts write and read, and what a misspelt one was meant to be; and things counted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

BASE_QUANTIZATION = "base_quantization.json"
"""Beside an adapter that was trained on a quantised base model: the configuration of the quantisation."""


def nearest(name: object, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the most similar known name, or an empty string."""
    matches = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"
