r"""A second opinion on formulas: their values at a few points, to 60 digits, without `math-verify` and `exact.py`.

Two formulas are the same if their values agree wherever they are evaluated. Variables get fixed values without any
pattern, positive and negative ones: formulas that agree only where all variables are positive, such as
`\sqrt{x^2}` and `x`, are undecided. So is everything that this module does not read: words, units, inequalities,
matrices, sums, integrals. Every step is bounded, so nothing here needs a process of its own.

Meant for `agreement.disagreement`, beside a verifier that shares no code for reading formulas with it. `symbolic.py`
asks it before math-verify.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grupo.rewards.answers.extraction import BOX_ELSE_NUMBER, Extraction, rounding
from grupo.rewards.answers.ground_truth import ANSWER_NEEDED, gold_text, read_gold, shown_gold
from grupo.rewards.verifiers.base import GoldVerifier, Verdict, compared, unreadable, without_answer

MAX_LENGTH = 300
MAX_DEPTH = 30
MAX_MAGNITUDE = 1e40
"""Larger values are undecided: at 60 digits, neighbouring integers could no longer be told apart."""
MAX_FACTORIAL = 30
DIGITS = 60
TOLERANCE = 1e-45
"""Largest relative difference of equal values."""
POSITIVE, NEGATIVE, POINTS = 2, 3, 4
"""Points in all; all variables are positive at the first two, negative at the third, of either sign at the fourth."""


class Unreadable(ValueError):
    """A text that this module does not read, or a value beyond its limits."""


class NumericCheck(GoldVerifier):
    """Has the answer of a completion the values of the gold answer? Undecided where it cannot tell."""

    needs = ANSWER_NEEDED

    def __init__(
        self, gold_column: str = "answer", *, extraction: Extraction = BOX_ELSE_NUMBER, name: str = "numeric_check"
    ) -> None:
        super().__init__(name, gold_column)
        self.extraction = extraction

    def can_read(self, gold: Any) -> bool:
        return read_gold(gold) is not None

    def judge(self, text: str, gold: Any) -> Verdict:
        expected = gold_text(gold) if self.can_read(gold) else None
        if expected is None:
            return unreadable(gold)
        found = self.extraction.find(text)
        if found.answer is None:
            return without_answer(found)
        same = same_values(found.answer, expected)
        if same is False and rounding(gold):
            return Verdict("undecided", f"{shown_gold(gold)} is a float, and this comparison is exact")
        if same is None:
            return Verdict("undecided", f"{found.answer!r:.80} or {shown_gold(gold)} has no value here")
        return compared(same, found.answer, gold)


def same_values(answer: str, gold: str) -> bool | None:
    """Whether two written answers have the same values; None where one cannot be read, or where that depends."""
    with _LOCK:  # mpmath changes its precision while it computes
        try:
            return _same(_read(answer), _read(gold))
        except Unreadable:
            return None


@dataclass(frozen=True)
class _Values:
    """One formula: its value at each point, and whether it is an equation, whose two sides may be scaled together."""

    at: tuple[Any, ...]
    equation: bool = False
    name: str | None = None


@dataclass(frozen=True)
class _List:
    delimiters: str
    items: tuple[_Values | _List, ...]


_LOCK = threading.Lock()
_UNORDERED = ("{}", ",")


@functools.cache
def _context() -> Any:
    import mpmath  # a dependency of torch's sympy

    context = mpmath.MPContext()
    context.dps = DIGITS
    return context


# Comparison ----------------------------------------------------------------------------------------------------------


def _same(a: _Values | _List, b: _Values | _List) -> bool | None:
    if isinstance(a, _Values) and isinstance(b, _Values):
        return _same_formula(a, b)
    if isinstance(a, _List) and isinstance(b, _List):
        if len(a.items) != len(b.items):
            return False
        if a.delimiters in _UNORDERED and b.delimiters in _UNORDERED:
            return _same_set(a, b)
        if a.delimiters != b.delimiters:
            return None if "," in (a.delimiters, b.delimiters) else False
        return _all(map(_same, a.items, b.items))
    listing = a if isinstance(a, _List) else b
    return None if isinstance(listing, _List) and len(listing.items) == 1 else False  # {5} may be meant as 5


def _same_formula(a: _Values, b: _Values) -> bool | None:
    if a.equation != b.equation:  # `y = 2x` names a value, and `2x - y = 0` does not
        return None if a.name or b.name else False
    if a.name and b.name and a.name != b.name:
        return None
    if a.equation:
        # Proportional equations are the same; there are other ways to be, such as a common factor.
        if _close(a.at[0], 0) or _close(b.at[0], 0):
            return None
        return all(_close(x * b.at[0], y * a.at[0]) for x, y in zip(a.at, b.at, strict=True)) or None
    agree = [_close(x, y) for x, y in zip(a.at, b.at, strict=True)]
    if all(agree):
        return True
    return None if all(agree[:POSITIVE]) else False


def _same_set(a: _List, b: _List) -> bool | None:
    left, rest = list(b.items), []
    for item in a.items:
        verdicts = [_same(item, other) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        else:
            rest.append(item)
    possible = [[_same(item, other) is None for other in left] for item in rest]
    # What has no possible partner, on either side, makes the sets different.
    return None if possible and all(map(any, possible)) and all(map(any, zip(*possible, strict=True))) else not rest


def _all(verdicts: Any) -> bool | None:
    """Whether all are True: False beats None."""
    found = set(verdicts)
    return False if False in found else None if None in found else True


def _close(x: Any, y: Any) -> bool:
    context = _context()
    if context.isinf(x) or context.isinf(y):
        return bool(x == y)
    return bool(abs(x - y) <= TOLERANCE * max(context.mpf("1e-5"), abs(x), abs(y)))


# Structure -----------------------------------------------------------------------------------------------------------

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=[0-9])(?:\{,\}(?:\\!)?|(?:\\!)?,\\!|\\!,)(?=[0-9]{3}(?![0-9]))"), ""),
    (
        re.compile(
            r"\\(?:left|right|displaystyle|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])|\\[!,;:> ]|\\q?quad|[~\u00a0\u200b]"
        ),
        " ",
    ),
    (re.compile(r"[\u2212\uff0d]|(?<![\w)\]}])[\u2010-\u2013](?=\s?[0-9.\\$])"), "-"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{\s*([0-9.+\-]+)\s*\}"), r"{\1}"),
    (re.compile(r"\\(?:cdot|times)(?![A-Za-z])|[·×⋅]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"√"), r"\\sqrt "),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"²"), "^2"),
    (re.compile(r"³"), "^3"),
    (re.compile(r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\s+"), " "),
)
_GROUPED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[A-Za-z]+\s+[A-Za-z])|[0-9]\s+[A-Za-z]{2}|[0-9](?:mm|cm|km|kg)(?![A-Za-z])"
)
_ONLY_LETTERS = re.compile(r"[A-Za-z\s{}]{2,}")
_RELATION = re.compile(r"[<>≤≥≠≈]|\\(?:leq?|geq?|neq?|approx|equiv|sim|in|cup|cap|to)(?![A-Za-z])")
_NAMED = re.compile(r"\s*(\\?[A-Za-z]+(?:_\w|_\{\w+\})?(?:\([A-Za-z]\))?)\s*=(?P<value>[^=]+)")
_SIGNS = re.compile(r"\\pm(?![A-Za-z])|±")


def _read(text: str) -> _Values | _List:
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("$").strip().removesuffix(".").strip()
    return _structure(text, 0)


def _structure(text: str, depth: int) -> _Values | _List:
    text = text.strip()
    if depth > 4 or not text or _RELATION.search(text):
        raise Unreadable("nothing that has a value")
    if depth == 0:
        text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
        items = _split(text)
        if len(items) > 1:
            return _List(",", tuple(_structure(item, 1) for item in items))
    opening = "\\{" if text.startswith("\\{") else text[0]
    closing = "\\}" if text.endswith("\\}") else text[-1]
    if opening in ("(", "[", "\\{") and closing in (")", "]", "\\}") and (opening == "\\{") == (closing == "\\}"):
        items = _split(text[len(opening) : len(text) - len(closing)])
        if len(items) > 1 or opening == "\\{":
            return _List((opening + closing).replace("\\", ""), tuple(_structure(item, depth + 1) for item in items))
    if _SIGNS.search(text):
        both = tuple(_structure(_SIGNS.sub(sign, text), depth + 1) for sign in ("+", "-"))
        return _List("," if depth == 0 else "{}", both)
    return _formula(text)


def _split(text: str) -> list[str]:
    """The parts between commas outside all brackets; the whole text where brackets do not match."""
    parts, start, depth = [], 0, 0
    for match in re.finditer(r"\\.|[()\[\]{},]", text, re.DOTALL):
        token = match[0]
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if depth < 0:
            return [text]
        if token == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]] if depth == 0 else [text]


def _formula(text: str) -> _Values:
    if _WORD.search(text) or _ONLY_LETTERS.fullmatch(text):
        raise Unreadable("words")
    name = None
    if named := _NAMED.fullmatch(text):
        name, text = named[1], named["value"]
    sides = text.split("=")
    if len(sides) > 2:
        raise Unreadable("a chain of equations")
    values = [tuple(_Evaluator(side, point).value() for point in range(POINTS)) for side in sides]
    if len(values) == 1:
        return _Values(values[0], name=name)
    if any(map(_context().isinf, itertools.chain(*values))):
        raise Unreadable("an infinite side of an equation")
    return _Values(tuple(left - right for left, right in zip(*values, strict=True)), equation=True)


# Values --------------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_MACRO = re.compile(r"\\([A-Za-z]+)")
_SUBSCRIPT = re.compile(r"_(\w|\{\w+\})")
_FUNCTIONS = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
"""LaTeX names whose function is called otherwise here."""
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)|cot|sec|csc|(?:sin|cos|tan)h|ln|exp")
_GREEK = re.compile(
    r"alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|[lL]ambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi"
    r"|chi|psi|[oO]mega"
)


class _Evaluator:
    """Recursive descent over one formula, straight to its value at one point."""

    def __init__(self, text: str, point: int) -> None:
        self.text = text
        self.point = point
        self.position = 0
        self.depth = 0
        self.context = _context()

    def value(self) -> Any:
        value = self.sum()
        if self.peek():
            raise Unreadable(f"unexpected {self.peek()!r}")
        return value

    def peek(self) -> str:
        while self.text.startswith(" ", self.position):
            self.position += 1
        return self.text[self.position : self.position + 1]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.peek()
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def skip(self, character: str) -> bool:
        found = self.peek() == character
        self.position += found
        return found

    def bounded(self, value: Any) -> Any:
        if not self.context.isinf(value) and not abs(value) <= MAX_MAGNITUDE:
            raise Unreadable("too large")
        return value

    def sum(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        value = self.product()
        while (sign := self.peek()) and sign in "+-":
            self.position += 1
            term = self.product()
            value = self.bounded(value + term if sign == "+" else value - term)
        self.depth -= 1
        return value

    def product(self) -> Any:
        sign = 1
        while (written := self.peek()) and written in "+-":
            self.position += 1
            sign = -sign if written == "-" else sign
        value = sign * self.power()
        while True:
            if self.skip("*"):
                value = self.bounded(value * self.signed())
            elif self.skip("/"):
                value = self.quotient(value, self.signed())
            elif self.starts_operand():
                value = self.bounded(value * self.power())
            else:
                return value

    def signed(self) -> Any:
        return -self.power() if self.skip("-") else self.power()

    def quotient(self, top: Any, bottom: Any) -> Any:
        if bottom == 0 or self.context.isinf(bottom):
            raise Unreadable("a division by zero or infinity")
        return self.bounded(top / bottom)

    def starts_operand(self) -> bool:
        following = self.peek()
        if following == "\\":
            return _MACRO.match(self.text, self.position) is not None
        return bool(following) and (following in "([{" or following.isalpha() or following.isdigit())

    def power(self) -> Any:
        base = self.operand()
        while self.skip("!"):
            base = self.factorial(base)
        if not self.skip("^"):
            return base
        degrees = self.text[self.position :].lstrip()
        if degrees.startswith(("\\circ", "{\\circ}")):
            raise Unreadable("degrees")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        exponent = self.signed()
        self.depth -= 1
        return self.raised(base, exponent)

    def digit(self) -> Any:
        self.position += 1
        return self.context.mpf(self.text[self.position - 1])

    def raised(self, base: Any, exponent: Any) -> Any:
        context = self.context
        if base == 0 or context.isinf(base) or context.isinf(exponent):
            if base == 0 and not context.isinf(exponent) and context.re(exponent) > 0:
                return context.mpf(0)
            raise Unreadable("a power of zero or infinity")
        if abs(exponent * context.log(base)) > 1000:
            raise Unreadable("too large")
        return self.bounded(base**exponent)

    def factorial(self, value: Any) -> Any:
        if not self.context.isint(value) or not 0 <= self.context.re(value) <= MAX_FACTORIAL:
            raise Unreadable("a factorial of something else than a small integer")
        return self.context.factorial(self.context.re(value))

    def operand(self) -> Any:
        if number := self.take(_NUMBER):
            return self.number(number[0])
        following = self.peek()
        if following in ("(", "[", "{"):
            return self.group()
        if following == "|":
            self.position += 1
            value = self.sum()
            if not self.skip("|"):
                raise Unreadable("an absolute value that is not closed")
            return abs(value)
        if following.isalpha() and following.isascii():
            self.position += 1
            return self.variable(following)
        if macro := self.take(_MACRO):
            return self.macro(macro[1])
        raise Unreadable(f"unexpected {following!r}")

    def number(self, written: str) -> Any:
        if len(written) > DIGITS // 2:
            raise Unreadable("too many digits")
        value = self.bounded(self.context.mpf(written))
        mixed = self.text[self.position :]
        if re.match(r"\s*\\frac", mixed) or re.match(r" [0-9]", mixed):
            raise Unreadable("a mixed number, or a product")
        return value

    def group(self) -> Any:
        closing = {"(": ")", "[": "]", "{": "}"}[self.peek()]
        self.position += 1
        value = self.sum()
        if not self.skip(closing):
            raise Unreadable(f"a bracket that {closing!r} does not close")
        return value

    def argument(self) -> Any:
        """What a macro takes: a group, another macro, or one character."""
        following = self.peek()
        if following.isdigit() and following.isascii():
            return self.digit()
        return self.group() if following in ("(", "{") else self.operand()

    def variable(self, name: str) -> Any:
        if name == "e" and not self.text.startswith("_", self.position):
            return self.context.e
        if name == "i":
            return self.context.mpc(0, 1)
        if subscript := self.take(_SUBSCRIPT):
            name += "_" + subscript[1].strip("{}")
        return _coordinate(name, self.point)

    def macro(self, name: str) -> Any:
        context = self.context
        if name == "pi":
            return +context.pi
        if name == "infty":
            return context.inf
        if name == "frac":
            top = self.argument()
            return self.quotient(top, self.argument())
        if name == "sqrt":
            index = context.mpf(2)
            if self.peek() == "[":
                index = context.re(self.group())
                if not context.isint(index) or not 2 <= index <= 1000:
                    raise Unreadable("the index of a root")
            radicand = self.argument()
            if context.im(radicand) == 0 and context.re(radicand) < 0 and index % 2 == 1:
                return -((-context.re(radicand)) ** (1 / index))
            return context.sqrt(radicand) if index == 2 else self.bounded(radicand ** (1 / index))
        if name == "log":
            return self.logarithm()
        if _FUNCTION.fullmatch(name):
            return self.function(getattr(context, _FUNCTIONS.get(name, name)))
        if _GREEK.fullmatch(name):
            return self.variable("\\" + name)
        raise Unreadable(f"\\{name}")

    def logarithm(self) -> Any:
        base = None
        if self.skip("_"):
            base = self.argument()
        argument = self.function_argument()
        if argument == 0 or (base is not None and base in (0, 1)):
            raise Unreadable("a logarithm without a value")
        if base is None:
            raise Unreadable("a logarithm without its base")
        return self.context.log(argument) / self.context.log(base)

    def function(self, compute: Callable[[Any], Any]) -> Any:
        exponent = None
        if self.skip("^"):
            exponent = self.argument()
            if exponent == -1:
                raise Unreadable("an inverse function, or a reciprocal")
        argument = self.function_argument()
        if self.context.isinf(argument) or abs(argument) > 1000:
            raise Unreadable("too large an argument")
        try:
            value = self.bounded(compute(argument))
        except (ValueError, ZeroDivisionError) as error:
            raise Unreadable(str(error)) from None
        return value if exponent is None else self.raised(value, exponent)

    def function_argument(self) -> Any:
        if self.peek() in ("(", "{"):
            value = self.group()
            if self.peek() == "^":
                raise Unreadable("a power of the argument, or of the function")
            return value
        value = self.power()
        while (following := self.peek()) and (following.isalnum() or re.match(r"\\pi", self.text[self.position :])):
            value = self.bounded(value * self.power())
        return value


def _coordinate(name: str, point: int) -> Any:
    """The value of a variable at a point: between 1/2 and 3/2, with a sign."""
    digest = hashlib.sha256(f"{name}@{point}".encode()).digest()
    value = _context().mpf(int.from_bytes(digest[:16], "big")) / _context().mpf(2) ** 128 + 0.5
    negative = point >= POSITIVE and (point < NEGATIVE or digest[16] % 2 == 1)
    return -value if negative else value
