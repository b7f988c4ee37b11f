"""Normal forms of written answers: equal values share one, different values never do."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.rewards.answers.exact_numbers import PI, ExactNumber, NotExact
from grupo.rewards.answers.latex import LatexTokens, is_prose, read_answer, same_answer


def are_same(first: str, second: str) -> bool:
    one, two = read_answer(first), read_answer(second)
    assert one is not None and two is not None
    assert same_answer(one, two) == same_answer(two, one)
    return same_answer(one, two)


SAME = [
    (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), (r"\dfrac{2}{4}", r"\tfrac{1}{2}"), (r"4\sqrt{2}", r"\sqrt{2^{5}}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
    (r"\frac{1}{1+\sqrt{2}+\sqrt{3}}", r"\frac{2+\sqrt{2}-\sqrt{6}}{4}"), (r"\frac{5}{1+\sqrt{6}}", r"\sqrt{6}-1"),
    (r"\sqrt[3]{-8}", "-2"), ("2^{1/2}", r"\sqrt 2"), (r"\frac{2\pi}{4}", r"\pi/2"), ("\u221a8", r"2\sqrt{2}"),
    ("sqrt(8)", r"2\sqrt{2}"), (r"1\frac{3}{4}", "1.75"), ("1 3/4", "7/4"), (r"2 \frac12", "5/2"),
    (r"2\,\frac{1}{2}", "2.5"), ("-2^2", "-4"), (r"3 \times 10^8", "300000000"), ("2^10", "1024"), ("1,250", "1250"),
    (r"1{,}250", "1250"), (r"10,\!000", "10000"), (r"10\,000", "10000"), (r"\left\{2,5\right\}", r"\{5, 2\}"),
    ("5, 2", r"\{2,5\}"), ("(3,7)", "( 3 , 7.0 )"), (r"\left[0,\infty\right)", r"[0, \infty)"), ("x = 5", "5"),
    ("f(x)=x^2", "x^{2}"), (r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "C"), ("**58**", "58"),
    (r"$\mathbf{58}$.", "58"), (r"x^{2}+1", "x^2 + 1"), ("58 cm", r"58\text{ cm}"), ("58 cm", "58"),
    (r"58\,\mathrm{cm}^2", r"58\text{cm}^{2}"), ("58 Hours", "58 hour"), (r"50\%", "50"), (r"90^\circ", "90"),
    (r"\$5", "5 dollars"), ("9^9^9^9", "9^{9}^{9}^{9}"), ("$5$ apples", "5 apples"), (r"\(5\) apples", "5"),
    ("**5** apples", "5"), (r"1, 2 \text{ and } 3", "3, 2, 1"), ("2 or 5", r"\{2, 5\}"), ("1, 2, and 3", "1,2,3"),
    ("5 million", "5000000"), (r"\$5 \text{ million}", "5 million dollars"),
    ("5 million square miles", "5000000 square miles"), (r"\frac{5}{2} thousand", "2500"), ("1 1/2 dozen", "18 eggs"),
    ("3 hundred thousand", "3*10^5"), ("50 percent", r"50\%"), ("5 Hundreds", "500"),
]  # fmt: skip


def test_same_values() -> None:
    assert [pair for pair in SAME if not are_same(*pair)] == []


DIFFERENT = [
    (r"\frac{1}{25}", r"\frac{12}{5}"), (r"\frac{1}{25}", r"\frac125"), ("0.333333", r"\frac13"),
    (r"\sqrt{2}", "1.41421356"), (r"\pi", r"\frac{22}{7}"), (r"2\sqrt{3}", r"3\sqrt{2}"), ("3,7", "37"), ("0,9", "9"),
    ("45,67", "4567"), ("1,2500", "12500"), ("1234{,}567", "1234567"), ("1 2", "12"), ("2{3}", "6"),
    ("(3,7)", "(7,3)"), ("(3,7)", "[3,7]"), ("(1,250)", "1250"), ("2,2,5", "2,5"), ("2ab", "2"), ("5x", "5"),
    ("x=5", "y=5"), ("58 cm", "58 m"), ("5 mW", "5 MW"), (r"50\%", "0.5"), ("$5", "\u20ac5"), ("x^{12}", "x^12"),
    (r"x^{ab}", "x^ab"), ("A", "a"), ("2^10", "20"), (r"2 \frac12", "1"), ("2**3", "23"), ("2**3", "8"),
    ("5 or 6", "6"), ("$5 and $6", "5"), ("sandy", "s, y"), ("5 and a half", "5"), ("5 million", "5"),
    ("5 million", "5 billion"), ("2 dozen eggs", "2 eggs"), ("5 million^2", "5000000"),
    (r"\$5 \text{ million}", "5000000 euros"),
]  # fmt: skip


def test_different_values() -> None:
    assert [pair for pair in DIFFERENT if are_same(*pair)] == []


@pytest.mark.parametrize("text", ["", " ", "{}", r"\text{}", "$$", r"\,", "**  **", "."])
def test_nothing_is_no_answer(text: str) -> None:
    assert read_answer(text) is None


@settings(deadline=None)
@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_the_same_exactly_when_they_are_equal(first: Fraction, second: Fraction) -> None:
    def written(value: Fraction) -> str:
        return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"

    assert are_same(written(first), str(second)) == (first == second)


@settings(deadline=None)
@given(st.integers(0, 10**12))
def test_any_way_of_grouping_is_the_number(number: int) -> None:
    grouped = f"{number:,}"
    for separator in (",", "{,}", r",\!", r"\,"):
        assert are_same(grouped.replace(",", separator), str(number))


small = st.fractions(min_value=-20, max_value=20, max_denominator=12)
radicands = st.sampled_from([1, 2, 3, 5, 6, 8, 12, 50])


@st.composite
def numbers(draw: st.DrawFn) -> tuple[ExactNumber, float]:
    """A sum of two terms, and its value as a float computed independently."""
    exact, value = ExactNumber.from_rational(0), 0.0
    for _ in range(2):
        coefficient, radicand = draw(small), draw(radicands)
        exact = exact + ExactNumber.from_rational(coefficient) * ExactNumber.from_rational(radicand).root(2)
        value += float(coefficient) * math.sqrt(radicand)
    return exact, value


def as_float(number: ExactNumber) -> float:
    return math.fsum(float(c) * math.sqrt(radicand) * math.pi**power for (radicand, power), c in number.terms)


@settings(deadline=None)
@given(numbers(), numbers())
def test_exact_arithmetic_agrees_with_floats(
    first: tuple[ExactNumber, float], second: tuple[ExactNumber, float]
) -> None:
    (a, x), (b, y) = first, second
    assert as_float(a + b) == pytest.approx(x + y, abs=1e-9)
    assert as_float(a * b) == pytest.approx(x * y, rel=1e-9, abs=1e-9)
    assert a * b == b * a
    if b.terms:
        assert a / b * b == a


@settings(deadline=None)
@given(numbers())
def test_normal_forms_are_unique(number: tuple[ExactNumber, float]) -> None:
    a, _ = number
    two = ExactNumber.from_rational(2)
    assert (a + a) == a * two
    assert ((a + two) == a) is False
    assert (a - a) == ExactNumber.from_rational(0)


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9",
        "2^{100000}",
        "(1+\\sqrt{2})^{4000}",
        "\\sqrt{" + "9" * 300 + "7}",
        "9" * 399,
        "9" * 10_000,
        "2^" * 150 + "2",
        "(" * 199 + "1" + ")" * 199,
        "\\sqrt" * 79 + "2",
        "\\frac" * 79,
        "{" * 399,
        "\\{" * 199,
        "1," * 199 + "1",
        "1" + "0" * 300 + "/" + "7" * 90,
        "\\text{" * 66,
        "a " * 199,
    ],
)
def test_hostile_texts_end_quickly_and_never_raise(text: str) -> None:
    started = time.perf_counter()
    read_answer(text)
    assert time.perf_counter() - started < 5.0


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,/-+^_{}()[]$\\ *=sqrtfacpi%", max_size=60))
def test_no_text_raises(text: str) -> None:
    answer = read_answer(text)
    assert answer is None or same_answer(answer, answer)


def test_python_is_never_evaluated() -> None:
    answer = read_answer("__import__('os').getcwd()")
    assert answer is not None and isinstance(answer.form, LatexTokens)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: ExactNumber.from_rational(0).inverse(),
        lambda: ExactNumber.from_rational(-2).root(2),
        lambda: ExactNumber.from_rational(2).root(3),
        lambda: (ExactNumber.from_rational(1) + PI).inverse(),
        lambda: ExactNumber.from_rational(2).raised_to(PI),
        lambda: ExactNumber.from_rational(0).raised_to(ExactNumber.from_rational(0)),
        lambda: ExactNumber.from_rational(2).raised_to(ExactNumber.from_rational(10**9)),
    ],
)
def test_what_is_not_exact_is_refused(operation: object) -> None:
    with pytest.raises(NotExact):
        operation()  # type: ignore[operator]


def test_prose() -> None:
    assert is_prose("see the figure")
    assert is_prose(r"\text{see the figure}")
    assert not is_prose(r"\frac{a}{b} + \text{Evelyn}")
    assert not is_prose("2, 5")
