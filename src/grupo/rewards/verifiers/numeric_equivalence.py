"""Whether two sympy expressions have the same values at a few fixed points, to 60 digits.

The points have no pattern, and variables are positive at some and negative at others: expressions that agree only where
all variables are positive, such as `sqrt(x**2)` and `x`, are undecided. So is everything without a value that can be
computed quickly: inequalities, matrices, sums, integrals, percentages, large factorials.

Importing this imports sympy, which takes a while: only worker processes do (`math_verify.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.numbers import ImaginaryUnit
from sympy.functions.elementary.hyperbolic import HyperbolicFunction
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

POSITIVE, NEGATIVE, POINTS = 2, 3, 4
"""Four points: all variables are positive at the first two, negative at the third, and of either sign at the fourth."""
DIGITS = 60
TOLERANCE = sympy.Float("1e-45")
"""Largest relative difference of equal values."""
MAX_MAGNITUDE = sympy.Float("1e40")
"""Largest value that is compared: above it, 60 digits do not distinguish neighbouring integers."""
MAX_FACTORIAL = 30

_EVALUATED = (
    *(sympy.Number, sympy.NumberSymbol, ImaginaryUnit, sympy.Symbol, sympy.Add, sympy.Mul, sympy.Pow, sympy.Abs),
    *(sympy.exp, sympy.log, TrigonometricFunction, InverseTrigonometricFunction, HyperbolicFunction, sympy.factorial),
)
"""Every part of an expression that has a value here is one of these."""
_LISTS = (sympy.FiniteSet, sympy.Interval, sympy.Tuple)


class _Undecided(ValueError):
    """The expression has no value within the limits of this module."""


def numerically_equal(a: Any, b: Any) -> bool | None:
    """Whether two sympy objects have the same values; None where that is undecided."""
    (a_name, a), (b_name, b) = _named(a), _named(b)
    if a_name and b_name and a_name != b_name:
        return None
    a, b = _pair_as_tuple(a, b), _pair_as_tuple(b, a)
    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        return _same_items(*(getattr(side, "_unsorted_args", side.args) for side in (a, b)))
    if isinstance(a, sympy.Tuple) and isinstance(b, sympy.Tuple):
        return len(a) == len(b) and _all(map(numerically_equal, a, b))
    if isinstance(a, sympy.Interval) and isinstance(b, sympy.Interval):
        if (a.left_open, a.right_open) != (b.left_open, b.right_open):
            return False
        return _all(map(numerically_equal, (a.start, a.end), (b.start, b.end)))
    if isinstance(a, _LISTS) or isinstance(b, _LISTS):
        several = [side for side in (a, b) if isinstance(side, (sympy.FiniteSet, sympy.Tuple)) and len(side) > 1]
        # {5} may be meant as 5, and the items of a set as those of a tuple.
        return False if several and not (isinstance(a, _LISTS) and isinstance(b, _LISTS)) else None
    if isinstance(a, sympy.Eq) != isinstance(b, sympy.Eq):  # `y = 2x` names a value, and `2x - y = 0` does not
        return None if a_name or b_name else False
    try:
        return _proportional(a, b) if isinstance(a, sympy.Eq) else _same_values(a, b)
    except _Undecided:
        return None


def _named(side: Any) -> tuple[str | None, Any]:
    """(name, value) of `y = 2x`; (None, `side`) of everything else."""
    if isinstance(side, sympy.Eq) and isinstance(side.lhs, (sympy.Symbol, AppliedUndef)):
        return str(side.lhs), side.rhs
    return None, side


def _pair_as_tuple(side: Any, other: Any) -> Any:
    """The pair (3, 7) is parsed as an open interval or as a tuple."""
    is_pair = isinstance(side, sympy.Interval) and side.left_open and side.right_open and isinstance(other, sympy.Tuple)
    return sympy.Tuple(side.start, side.end) if is_pair else side


def _same_items(first: Sequence[Any], second: Sequence[Any]) -> bool | None:
    """Whether two lists have equal items, in any order. (latex2sympy keeps those of `2, 2, 5` as they were written.)"""
    if len(first) != len(second):
        return False
    left, unmatched = list(second), []
    for item in first:
        verdicts = [numerically_equal(item, other) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        else:
            unmatched.append(item)
    possible = [[numerically_equal(item, other) is None for other in left] for item in unmatched]
    # An item that cannot be equal to any other, on either side, makes the sets different.
    if possible and all(map(any, possible)) and all(map(any, zip(*possible, strict=True))):
        return None
    return not unmatched


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all are True: False beats None."""
    found = set(verdicts)
    return False if False in found else None if None in found else True


def _same_values(a: Any, b: Any) -> bool | None:
    for point in range(POINTS):
        if not _close(_value(a, point), _value(b, point)):
            return False if point < POSITIVE else None
    return True


def _proportional(a: Any, b: Any) -> bool | None:
    """Equations are the same if the differences of their sides are proportional; there are other ways to be the same,
    such as a common factor."""
    x, y = ([_value(side.lhs, point) - _value(side.rhs, point) for point in range(POINTS)] for side in (a, b))
    if _close(x[0], sympy.S.Zero) or _close(y[0], sympy.S.Zero):
        return None
    return all(_close(p * y[0], q * x[0]) for p, q in zip(x, y, strict=True)) or None


def _value(expression: Any, point: int) -> Any:
    if not isinstance(expression, sympy.Expr) or not all(map(_is_evaluated, sympy.preorder_traversal(expression))):
        raise _Undecided
    # Decimals were written: 0.1 is 1/10, not the float nearest to it.
    expression = expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})
    symbols = {symbol: _coordinate(symbol.name, point) for symbol in expression.free_symbols}
    value = expression.evalf(DIGITS, subs=symbols)
    if value in (sympy.oo, -sympy.oo):
        return value
    real, imaginary = value.as_real_imag()
    if not (real.is_Number and imaginary.is_Number and abs(real) + abs(imaginary) <= MAX_MAGNITUDE):
        raise _Undecided
    # The cube root of -8 is -2 to many, and complex to sympy.
    if imaginary != 0 and any(power.exp.is_Rational and power.exp.q > 2 for power in expression.atoms(sympy.Pow)):
        raise _Undecided
    return value


def _is_evaluated(part: Any) -> bool:
    if isinstance(part, sympy.factorial):
        return bool(part.args[0].is_Integer and 0 <= part.args[0] <= MAX_FACTORIAL)
    return isinstance(part, _EVALUATED)


def _close(x: Any, y: Any) -> bool:
    if sympy.oo in (x, -x, y, -y):
        return bool(x == y)
    return bool(abs(x - y) <= TOLERANCE * max(sympy.Float("1e-5"), abs(x), abs(y)))


def _coordinate(name: str, point: int) -> Any:
    """The value of a variable at a point: between 1/2 and 3/2, with a sign. `i` is the imaginary unit."""
    if name == "i":
        return sympy.I
    digest = hashlib.sha256(f"{name}@{point}".encode()).digest()
    value = sympy.Rational(int.from_bytes(digest[:8], "big"), 2**64) + sympy.Rational(1, 2)
    negative = point >= POSITIVE and (point < NEGATIVE or digest[8] % 2 == 1)
    return -value if negative else value
