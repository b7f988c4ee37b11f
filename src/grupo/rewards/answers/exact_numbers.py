"""Exact arithmetic of written answers: sums of rational multiples of √n and powers of π.

Square roots of different square-free integers are linearly independent over the rationals, and π is transcendental over
them, so every number here has one normal form: two are equal exactly when their terms are equal. Whatever leaves this
field, or exceeds the limits below, raises `NotExact` instead of being approximated or computed for minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_BITS = 4096
"""Largest size of a numerator or denominator, in bits (about 1,200 digits)."""
MAX_TERMS = 32
MAX_RADICAND = 10**10
"""Largest radicand: factoring by trial division takes milliseconds at this size."""


class NotExact(ArithmeticError):
    """The expression is malformed, or its value cannot be represented exactly within the limits of this module."""


@dataclass(frozen=True)
class ExactNumber:
    """A sum of terms `coefficient · √radicand · π^power`, radicands square-free, coefficients not zero."""

    terms: tuple[tuple[tuple[int, int], Fraction], ...]
    """((radicand, power), coefficient), sorted by key; empty for zero."""

    @staticmethod
    def from_terms(terms: Mapping[tuple[int, int], Fraction]) -> ExactNumber:
        kept = sorted((key, coefficient) for key, coefficient in terms.items() if coefficient)
        if len(kept) > MAX_TERMS:
            raise NotExact(f"more than {MAX_TERMS} terms")
        for _, coefficient in kept:
            if max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length()) > MAX_BITS:
                raise NotExact(f"more than {MAX_BITS} bits")
        return ExactNumber(tuple(kept))

    @staticmethod
    def from_rational(value: Fraction | int) -> ExactNumber:
        return ExactNumber.from_terms({(1, 0): Fraction(value)})

    @property
    def rational(self) -> Fraction | None:
        """The value if it is rational, else None."""
        if not self.terms:
            return Fraction(0)
        (key, coefficient), *others = self.terms
        return coefficient if key == (1, 0) and not others else None

    def __add__(self, other: ExactNumber) -> ExactNumber:
        return ExactNumber.from_terms(_collect([*self.terms, *other.terms]))

    def __neg__(self) -> ExactNumber:
        return ExactNumber(tuple((key, -coefficient) for key, coefficient in self.terms))

    def __sub__(self, other: ExactNumber) -> ExactNumber:
        return self + -other

    def __mul__(self, other: ExactNumber) -> ExactNumber:
        products = []
        for (radicand, power), coefficient in self.terms:
            for (other_radicand, other_power), other_coefficient in other.terms:
                shared = math.gcd(radicand, other_radicand)
                key = (radicand * other_radicand // shared**2, power + other_power)
                products.append((key, coefficient * other_coefficient * shared))
        return ExactNumber.from_terms(_collect(products))

    def __truediv__(self, other: ExactNumber) -> ExactNumber:
        return self * other.inverse()

    def inverse(self) -> ExactNumber:
        """1 / self: conjugates make the denominator rational, for one prime under the roots after another."""
        if not self.terms:
            raise NotExact("division by zero")
        if len({power for (_, power), _ in self.terms}) > 1:
            raise NotExact("division by a sum of different powers of pi")
        numerator, denominator = ExactNumber.from_rational(1), self
        while len(denominator.terms) > 1:
            prime = max(_prime_factors(radicand)[-1] for (radicand, _), _ in denominator.terms if radicand > 1)
            conjugate = ExactNumber(
                tuple((key, -value if key[0] % prime == 0 else value) for key, value in denominator.terms)
            )
            numerator, denominator = numerator * conjugate, denominator * conjugate
        ((radicand, power), coefficient), *_ = denominator.terms
        return numerator * ExactNumber.from_terms({(radicand, -power): 1 / (coefficient * radicand)})

    def raised_to(self, exponent: ExactNumber) -> ExactNumber:
        """self ** exponent for a rational exponent, by squaring; each product is checked, so none can grow large."""
        rational = exponent.rational
        if rational is None:
            raise NotExact("an exponent that is not rational")
        base = self if rational.denominator == 1 else self.root(rational.denominator)
        if not base.terms and rational <= 0:
            raise NotExact("zero to a power that is not positive")
        if rational < 0:
            base = base.inverse()
        count, result = abs(rational.numerator), ExactNumber.from_rational(1)
        while count:
            if count & 1:
                result = result * base
            count >>= 1
            if count:
                base = base * base
        return result

    def root(self, index: int) -> ExactNumber:
        """The real `index`-th root: of every rational for index 2, of perfect powers otherwise."""
        if not self.terms:
            return self
        ((radicand, power), coefficient), *others = self.terms
        if others or radicand != 1 or power % index:
            raise NotExact("a root of something that is not rational")
        if index == 2:
            if coefficient < 0:
                raise NotExact("a square root of a negative number")
            outside, inside = _square_free(coefficient.numerator * coefficient.denominator)
            return ExactNumber.from_terms({(inside, power // 2): Fraction(outside, coefficient.denominator)})
        if coefficient < 0 and index % 2 == 0:
            raise NotExact("an even root of a negative number")
        size = Fraction(_perfect_root(abs(coefficient.numerator), index), _perfect_root(coefficient.denominator, index))
        return ExactNumber.from_terms({(1, power // index): size if coefficient > 0 else -size})

    def __float__(self) -> float:
        """About the nearest float; `OverflowError` if there is none."""
        return math.fsum(float(c) * math.sqrt(radicand) * math.pi**power for (radicand, power), c in self.terms)

    def __str__(self) -> str:
        parts = []
        for (radicand, power), coefficient in self.terms:
            root = f"*sqrt({radicand})" if radicand > 1 else ""
            pi = f"*pi^{power}" if power else ""
            parts.append(f"{coefficient}{root}{pi}")
        return " + ".join(parts) or "0"


PI = ExactNumber.from_terms({(1, 1): Fraction(1)})


def within_tolerance(value: Fraction, gold: Fraction, tolerance: float) -> bool:
    """Whether |value - gold| <= tolerance · |gold|; two whole numbers must be equal, as a count is right or wrong."""
    if not tolerance or (value.denominator == 1 and gold.denominator == 1):
        return value == gold
    return abs(value - gold) <= Fraction(str(tolerance)) * abs(gold)


def _collect(terms: Iterable[tuple[tuple[int, int], Fraction]]) -> dict[tuple[int, int], Fraction]:
    total: dict[tuple[int, int], Fraction] = {}
    for key, coefficient in terms:
        total[key] = total.get(key, Fraction(0)) + coefficient
    return total


def _prime_factors(number: int) -> list[int]:
    """Prime factors with repetition, ascending."""
    if number > MAX_RADICAND:
        raise NotExact(f"{number} is too large to factor")
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1 if divisor == 2 else 2
    return [*factors, number] if number > 1 else factors


def _square_free(number: int) -> tuple[int, int]:
    """(outside, inside) with number = outside² · inside and inside square-free; number > 0."""
    whole = math.isqrt(number)
    if whole * whole == number:
        return whole, 1
    outside, inside = 1, 1
    for prime in _prime_factors(number):
        if inside % prime:
            inside *= prime
        else:
            outside, inside = outside * prime, inside // prime
    return outside, inside


def _perfect_root(number: int, index: int) -> int:
    """The integer whose `index`-th power is `number` (> 0), by bisection."""
    if number > 1 and index >= number.bit_length():
        raise NotExact(f"{number} has no whole {index}-th root")
    low, high = 1, 1 << (number.bit_length() // index + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**index < number:
            low = middle + 1
        else:
            high = middle
    if low**index != number:
        raise NotExact(f"{number} has no whole {index}-th root")
    return low
