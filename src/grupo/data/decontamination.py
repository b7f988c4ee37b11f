"""Held-out rows with the question of a training row are dropped, also if case, white space or punctuation differ."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from grupo.data.prompts import original_indices, select_rows
from grupo.errors import DataError
from grupo.types import content_text

logger = logging.getLogger("grupo")

MAX_NAMED = 3
"""Duplicates that the warning names."""

_DASHES = {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2212"}
_TOKEN = re.compile(
    r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?:\.[0-9]+)?"
    r"|(?:[^\W\d_]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2}))+|\S"  # the hyphen of a word, not the minus of x - y
)
_PROSE = frozenset(".,;:!?'\"`…\u2014\u201c\u201d\u2018\u2019\u201e\u00ab\u00bb¿¡")


def normalize_text(text: str) -> str:
    """The words, numbers and operators of a text, separated by single spaces.

    Case, white space, the punctuation of prose, hyphens within words and thousands separators do not count. Characters
    that mean something between numbers do: 2 + 3 is not 2 - 3, and 2.5 is not 25. In doubt, as with `5!` and `5`, texts
    count as the same: a missing held-out row does less harm than one that was trained on.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_DASHES)
    folded = re.sub(r"(?<=\w)['\u2019](?=\w)", "", folded)
    return " ".join(_normalize_token(token) for token in _TOKEN.findall(folded) if token not in _PROSE)


def _normalize_token(token: str) -> str:
    if token[0].isdigit():
        return token.replace(",", "")
    return token.replace("-", " ") if len(token) > 1 else token


def question_text(prompt: Any) -> str:
    """The question of a prompt: its text, or the texts of all messages except the system's."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence):
        return ""
    messages = [message for message in prompt if isinstance(message, dict) and message.get("role") != "system"]
    return "\n".join(filter(None, (content_text(message.get("content")) for message in messages)))


def find_overlap(train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Position of each held-out row with the question of a training row -> position of the first such training row."""
    questions = [normalize_text(question_text(row.get("prompt"))) for row in held_out]
    wanted = set(questions) - {""}
    first: dict[str, int] = {}
    for position, row in enumerate(train):
        question = normalize_text(question_text(row.get("prompt")))
        if question in wanted:
            first.setdefault(question, position)
    return {position: first[question] for position, question in enumerate(questions) if question in first}


def decontaminate(train: Sequence[dict[str, Any]], held_out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The held-out rows whose questions no training row asks; a warning names the others.

    Duplicates are dropped from the held-out rows, not from the training rows, so that the evaluation stays honest and
    training sees all its data.

    Raises:
        DataError: no held-out row is left.
    """
    overlap = find_overlap(train, held_out)
    if not overlap:
        return held_out
    train_indices, indices = original_indices(train), original_indices(held_out)
    named = "; ".join(
        f"row {indices[position]} is row {train_indices[twin]}: {question_text(held_out[position]['prompt'])[:60]!r}"
        for position, twin in list(overlap.items())[:MAX_NAMED]
    )
    found = (
        f"{len(overlap)} of {len(held_out)} held-out rows have the question of a training row, apart from case, white "
        f"space and punctuation ({named}{'; ...' if len(overlap) > MAX_NAMED else ''})."
    )
    kept = [position for position in range(len(held_out)) if position not in overlap]
    if not kept:
        raise DataError(
            f"{found} No row is left to evaluate on: remove duplicates from the data, or hold out more rows."
        )
    logger.warning("%s They are left out of the evaluation.", found)
    return select_rows(held_out, kept)
