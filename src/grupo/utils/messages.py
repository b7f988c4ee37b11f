"""Wording shared by all messages: spelling suggestions, plurals, and a file name that several packages use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

BASE_QUANTIZATION = "base_quantization.json"
"""File next to an adapter that was trained on a quantised base model; holds the quantisation config."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the most similar known name, or an empty string."""
    matches = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def pluralize(number: int, noun: str) -> str:
    """`1 step`, `2 steps`, `2 batches`."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"
