"""The times tables: every fact once, and both orders of a product on one side of the split."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grupo.tasks.times_tables import times_tables


def facts(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(a, b) of each question, after a check of its answer."""
    found = []
    for row in rows:
        (message,) = row["prompt"]
        a, b = (int(number) for number in re.fullmatch(r"What is (\d+) \* (\d+)\?", message["content"]).groups())  # type: ignore[union-attr]
        assert message["role"] == "user" and row["answer"] == str(a * b)
        found.append((a, b))
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_times_tables_hold_out_whole_facts(seed: int) -> None:
    task = times_tables(seed)
    train, held_out = facts(task.train), facts(task.held_out)
    everything = {(a, b) for a in range(2, 13) for b in range(2, 13)}
    assert len(train) + len(held_out) == len(everything) and {*train, *held_out} == everything
    unordered = [{tuple(sorted(fact)) for fact in side} for side in (train, held_out)]
    assert [len(side) for side in unordered] == [46, 20]
    assert not unordered[0] & unordered[1], "the mirror of a held-out product would give it away"
    assert {(b, a) for a, b in held_out} == set(held_out)


def test_times_tables_depend_on_the_seed_alone() -> None:
    assert times_tables(3) == times_tables(3)
    assert times_tables(3).held_out != times_tables(4).held_out


def test_levels_have_larger_tables() -> None:
    for level, largest in enumerate((12, 20, 40, 99), start=1):
        task = times_tables(0, level=level)
        everything = facts(task.train) + facts(task.held_out)
        assert max(map(max, everything)) == largest and len(everything) == (largest - 1) ** 2
        assert 0.25 < len(task.held_out) / (largest - 1) ** 2 < 0.35
