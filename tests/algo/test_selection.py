"""The subset of largest variance, against all subsets."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from grupo.algo.selection import max_variance_subset


def variance(values: list[float]) -> Fraction:
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    return sum((value - mean) ** 2 for value in exact) / len(exact)


def groups(size: int) -> list[list[float]]:
    generator = random.Random(size)
    pools = ([0, 1], [0, 0.1, 0.3], [-2.5, 1e-3, 7])
    drawn = [[generator.choice(pool) for _ in range(size)] for pool in pools for _ in range(12)]
    return [
        *drawn,
        *([generator.gauss(0, 1) for _ in range(size)] for _ in range(12)),
        [0.1] * size,
        [1e9 + generator.random() for _ in range(size)],
        [generator.random() * 10.0 ** generator.randrange(-12, 12) for _ in range(size)],
    ]


@pytest.mark.parametrize("group_size", range(2, 9))
def test_no_subset_has_a_larger_variance(group_size: int) -> None:
    for values in groups(group_size):
        for size in range(2, group_size + 1):
            chosen = max_variance_subset(values, size)
            assert chosen == sorted(set(chosen)) and len(chosen) == size
            best = max(variance([values[i] for i in some]) for some in itertools.combinations(range(group_size), size))
            assert variance([values[i] for i in chosen]) == best, (values, size)


def test_known_subsets() -> None:
    assert max_variance_subset([0.0, 1.0, 0.5, 0.4], 2) == [0, 1]
    # One right answer among wrong ones is kept, and so is one wrong among right ones.
    assert 5 in max_variance_subset([0, 0, 0, 0, 0, 1, 0, 0], 4)
    assert 2 in max_variance_subset([1, 1, 0, 1, 1, 1, 1, 1], 4)
    # Half and half, where both are there.
    assert max_variance_subset([1, 0, 1, 0, 1, 0, 1, 0], 4) == [1, 3, 4, 6]
    # The distance from the mean decides, not the order: two high ones outweigh three low ones here.
    assert max_variance_subset([0.0, 0.1, 0.2, 10.0, 10.1], 3) == [0, 3, 4]


def test_ties_are_decided_by_position() -> None:
    assert max_variance_subset([0.5] * 6, 3) == [0, 1, 2]
    # Three zeros and the one, whether the one is counted with one low value less or more.
    assert max_variance_subset([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], 3) == [0, 1, 2]
    # In floating point 0.1 + 0.2 + 0.3 depends on the order of its terms, and here a tie would depend on that.
    assert max_variance_subset([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 4) == [0, 2, 3, 5]


def test_a_small_group_is_taken_whole() -> None:
    assert max_variance_subset([3.0, 1.0], 4) == [0, 1]
    assert max_variance_subset([], 2) == []
