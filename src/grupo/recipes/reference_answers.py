"""Gold answers that a reward cannot read, found before the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from grupo.data.prompts import original_indices, select_rows
from grupo.errors import DataError
from grupo.rewards.answers.extraction import quote_value
from grupo.rewards.verifiers.base import GroundTruthComparator

logger = logging.getLogger("grupo")

MAX_NAMED = 5
"""Rows that a message names."""


def drop_unreadable_answers(
    rows: list[dict[str, Any]], held_out: list[dict[str, Any]], rewards: Sequence[Callable[..., Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows, and the held-out rows whose gold answers all rewards can read.

    In training a reward abstains if it cannot read the gold answer, and the other rewards still count. An
    evaluation would compare totals of different rewards, or have none.

    Raises:
        DataError: a reward can read no gold answer at all, or none of the held-out ones.
    """
    for reward in rewards:
        verifier = getattr(reward, "verifier", reward)
        if isinstance(verifier, GroundTruthComparator):
            _unreadable("training", rows, verifier, "It abstains on their completions.")
            dropped = _unreadable("held-out", held_out, verifier, "They are left out of the evaluation.")
            held_out = select_rows(held_out, sorted({*range(len(held_out))}.difference(dropped)))
    return rows, held_out


def _unreadable(what: str, rows: list[dict[str, Any]], verifier: GroundTruthComparator, consequence: str) -> list[int]:
    """Positions of the rows whose gold answer cannot be read, with a warning; a missing column is reported later.

    Raises:
        DataError: no gold answer can be read.
    """
    column = verifier.gold_column
    found = [position for position, row in enumerate(rows) if column in row and not verifier.can_read(row[column])]
    if not found:
        return []
    indices = original_indices(rows)
    named = ", ".join(str(indices[position]) for position in found[:MAX_NAMED])
    summary = (
        f"{verifier.__name__} cannot read the gold answers ('{column}') of {len(found)} of {len(rows)} {what} "
        f"rows, counted from 0: {named}{', ...' if len(found) > MAX_NAMED else ''}; the first is "
        f"{quote_value(rows[found[0]][column])}."
    )
    if len(found) == len(rows):
        raise DataError(f"{summary} {verifier.answer_requirement}")
    logger.warning("%s %s %s", summary, consequence, verifier.answer_requirement)
    return found
