"""Which completions of a group are worth training on."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def max_variance_subset(values: Sequence[float], size: int) -> list[int]:
    """Positions of the `size` values whose variance is largest (PODS, arXiv 2504.13818).

    The best subset always consists of some of the lowest values and some of the highest, so that sorting and one scan
    over `size` + 1 candidates find it. The arithmetic is exact: which completions are trained on does not depend on
    rounding. Among equal values the earlier ones count as lower, and of subsets with one variance the one with most
    low values is taken.

    Args:
        values: (n,) finite.
        size: of the subset; all positions where there are no more than that.

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
        # One low value less, one high value more.
        leaving, entering = exact[low], exact[low - size]
        total += entering - leaving
        squares += entering * entering - leaving * leaving
        spread = size * squares - total * total
        if spread > best_spread:
            best_spread, best_low = spread, low
    return sorted(ascending[:best_low] + ascending[len(values) - (size - best_low) :])
