"""Selection of the completions of a group to train on."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def max_variance_subset(values: Sequence[float], size: int) -> list[int]:
    """Positions of the `size` values with the largest variance (PODS, arXiv 2504.13818).

    The best subset always consists of the lowest values and the highest values, so sorting and one scan over `size` + 1
    candidates find it. The arithmetic is exact, so the selection does not depend on rounding. Of equal values the
    earlier ones count as lower, and of subsets with equal variance the one with the most low values is returned.

    Args:
        values: (n,) finite.
        size: number of positions to return; all n where n is not larger.

    Returns:
        (min(n, size),) positions in ascending order.
    """
    ascending = sorted(range(len(values)), key=lambda position: (values[position], position))
    if size >= len(values):
        return sorted(ascending)
    exact = [Fraction(values[position]) for position in ascending]
    total = sum(exact[:size], Fraction())
    squares = sum((value * value for value in exact[:size]), Fraction())
    best_spread, best_low = size * squares - total * total, size
    for low in reversed(range(size)):
        # One fewer low value, one more high value.
        leaving, entering = exact[low], exact[low - size]
        total += entering - leaving
        squares += entering * entering - leaving * leaving
        spread = size * squares - total * total
        if spread > best_spread:
            best_spread, best_low = spread, low
    return sorted(ascending[:best_low] + ascending[len(values) - (size - best_low) :])
