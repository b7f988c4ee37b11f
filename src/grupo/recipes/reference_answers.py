"""Gold answers that a reward cannot read, found before the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from grupo.data.prompts import NumberedRows, row_numbers
from grupo.errors import DataError
from grupo.rewards.answers.ground_truth import shown_gold
from grupo.rewards.verifiers.base import JudgedByGold

logger = logging.getLogger("grupo")

SHOWN = 5
"""So many rows are named."""


def usable_rows(
    rows: list[dict[str, Any]], held_out: list[dict[str, Any]], rewards: Sequence[Callable[..., Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows, and those held-out rows whose gold answers all rewards can read.

    In training a reward abstains where it cannot read the gold answer, and the other rewards go on. An evaluation would
    compare totals of different rewards, or have none.

    Raises:
        DataError: a reward can read no gold answer at all, or none of those that are held out.
    """
    for reward in rewards:
        verifier = getattr(reward, "verifier", reward)
        if isinstance(verifier, JudgedByGold):
            _unread("training", rows, verifier, "It abstains on their completions.")
            unread = set(_unread("held-out", held_out, verifier, "They are left out of the evaluation."))
            kept = [place for place in range(len(held_out)) if place not in unread]
            numbers = row_numbers(held_out)
            held_out = NumberedRows([held_out[place] for place in kept], [numbers[place] for place in kept])
    return rows, held_out


def _unread(what: str, rows: list[dict[str, Any]], verifier: JudgedByGold, consequence: str) -> list[int]:
    """Places of the rows whose gold answer cannot be read; says which they are. A missing column is said elsewhere."""
    column = verifier.gold_column
    places = [place for place, row in enumerate(rows) if column in row and not verifier.can_read(row[column])]
    if not places:
        return []
    numbers = row_numbers(rows)
    named = ", ".join(str(numbers[place]) for place in places[:SHOWN]) + (", ..." if len(places) > SHOWN else "")
    found = (
        f"{verifier.__name__} cannot read the gold answers ('{column}') of {len(places)} of {len(rows)} {what} rows, "
        f"counted from 0: {named}; the first is {shown_gold(rows[places[0]][column])}."
    )
    if len(places) == len(rows):
        raise DataError(f"{found} {verifier.needs}")
    logger.warning("%s %s %s", found, consequence, verifier.needs)
    return places
