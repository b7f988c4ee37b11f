"""Products of two numbers: the task of the quickstart, which needs no other package."""

from __future__ import annotations

import itertools
import random

from grupo.tasks import Row, Task, check_levels, user_prompt

HELD_OUT_SHARE = 0.3
LARGEST_FACTORS = (12, 20, 40, 99)


def times_tables(seed: int, level: int = 1) -> Task:
    """Products of two numbers from 2 on.

    A product and its mirror image are one fact, so both orders of a pair are on the same side of the split. The table
    is cut into runs of neighbouring pairs and one pair of each run is held out, so that held-out products are as hard
    as the others.
    """
    check_levels("times-tables", [level], len(LARGEST_FACTORS))
    largest = LARGEST_FACTORS[level - 1]
    factors = itertools.combinations_with_replacement(range(2, largest + 1), 2)
    pairs = sorted(factors, key=lambda pair: (pair[1], pair[0]))
    choice = random.Random(f"times-tables, seed {seed}").choice
    parts = round(HELD_OUT_SHARE * len(pairs))
    bounds = [round(index * len(pairs) / parts) for index in range(parts + 1)]
    held_out = [choice(pairs[start:end]) for start, end in itertools.pairwise(bounds)]
    kept = set(pairs).difference(held_out)
    return Task(
        name="times-tables",
        description=f"What is a * b? with 2 <= a, b <= {largest}; {parts} of the {len(pairs)} pairs are held out, in "
        "both orders.",
        train=_products([pair for pair in pairs if pair in kept]),
        held_out=_products(held_out),
        rewards={"number_match": {}},
        levels=tuple(f"up to {factor}" for factor in LARGEST_FACTORS),
    )


def _products(pairs: list[tuple[int, int]]) -> list[Row]:
    orders = [order for a, b in pairs for order in ([(a, b), (b, a)] if a != b else [(a, b)])]
    return [{"prompt": user_prompt(f"What is {a} * {b}?"), "answer": str(a * b)} for a, b in orders]
