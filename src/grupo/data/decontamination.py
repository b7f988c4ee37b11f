"""Training and held-out rows share no item, whatever differs in case, white space and punctuation."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from grupo.data.prompts import NumberedRows, row_numbers
from grupo.errors import DataError
from grupo.types import content_text

logger = logging.getLogger("grupo")

SHOWN = 3
"""So many duplicates are named."""

_DASHES = {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2212"}
_TOKEN = re.compile(
    r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?:\.[0-9]+)?"
    r"|(?:[^\W\d_]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2}))+|\S"  # the hyphen of a word, not the minus of x - y
)
_PROSE = frozenset(".,;:!?'\"`…\u2014\u201c\u201d\u2018\u2019\u201e\u00ab\u00bb¿¡")


def normalised(text: str) -> str:
    """The words, numbers and operators of a text, one space between them.

    Case, white space, the punctuation of prose, hyphens within words and thousands separators do not count. What means
    something between numbers does: 2 + 3 is not 2 - 3, and 2.5 is not 25. Where in doubt, as with `5!` and `5`, texts
    count as the same: a held-out row too few does less harm than one that was trained on.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_DASHES)
    folded = re.sub(r"(?<=\w)['\u2019](?=\w)", "", folded)
    return " ".join(_plain(token) for token in _TOKEN.findall(folded) if token not in _PROSE)


def _plain(token: str) -> str:
    if token[0].isdigit():
        return token.replace(",", "")
    return token.replace("-", " ") if len(token) > 1 else token


def question_text(prompt: Any) -> str:
    """What a prompt asks: its text, or those of all messages but the system's."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence):
        return ""
    messages = [message for message in prompt if isinstance(message, dict) and message.get("role") != "system"]
    return "\n".join(filter(None, (content_text(message.get("content")) for message in messages)))


def shared_items(train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Places of the held-out rows that ask what a training row asks -> place of the first such training row."""
    wanted = {normalised(question_text(row.get("prompt"))) for row in held_out} - {""}
    first: dict[str, int] = {}
    for place, row in enumerate(train):
        text = normalised(question_text(row.get("prompt")))
        if text in wanted:
            first.setdefault(text, place)
    texts = [normalised(question_text(row.get("prompt"))) for row in held_out]
    return {place: first[text] for place, text in enumerate(texts) if text in first}


def without_shared(train: Sequence[dict[str, Any]], held_out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The held-out rows that ask nothing that a training row asks; says which ones are left out.

    They are taken from the held-out rows, not from the training rows: the evaluation stays honest, and training sees
    all that it was given.

    Raises:
        DataError: no held-out row is left.
    """
    if not held_out:
        return held_out
    shared = shared_items(train, held_out)
    if not shared:
        return held_out
    train_numbers, numbers = row_numbers(train), row_numbers(held_out)
    named = "; ".join(
        f"row {numbers[place]} as row {train_numbers[twin]}: {question_text(held_out[place]['prompt'])[:60]!r}"
        for place, twin in list(shared.items())[:SHOWN]
    )
    found = (
        f"{len(shared)} of {len(held_out)} held-out rows ask what a training row asks, up to case, white space and "
        f"punctuation ({named}{'; ...' if len(shared) > SHOWN else ''})."
    )
    kept = [place for place in range(len(held_out)) if place not in shared]
    if not kept:
        raise DataError(
            f"{found} Nothing is left to evaluate on: remove duplicates from the data, or hold out more rows."
        )
    logger.warning("%s They are left out of the evaluation.", found)
    return NumberedRows([held_out[place] for place in kept], [numbers[place] for place in kept])
