"""Guessing what a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
