r"""Normal forms of written mathematical answers: numbers, tuples, sets, and other LaTeX as it is written.

No text is ever evaluated by Python. Numbers are compared exactly (`exact_numbers.py`); everything else is compared as a
sequence of LaTeX tokens after changes that LaTeX itself does not see (spacing, `\left`, `\dfrac`, braces around one
token), so different values never share a normal form.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from grupo.rewards.answers.exact_numbers import PI, ExactNumber, NotExact, within_tolerance

MAX_LENGTH = 400
"""Length in characters above which texts are compared token by token only."""
MAX_DEPTH = 32

_GROUP_MARK = "\x01"
"""Placeholder for a comma that is known to separate thousands."""


@dataclass(frozen=True)
class LatexTokens:
    """LaTeX tokens of an answer that is not a number."""

    tokens: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.tokens)


@dataclass(frozen=True)
class AnswerList:
    """Several answers between delimiters; the items of sets, and of lists without delimiters, are sorted."""

    delimiters: str
    items: tuple[NormalForm, ...]

    def __str__(self) -> str:
        return self.delimiters[0] + ", ".join(map(str, self.items)) + self.delimiters[1]


NormalForm = ExactNumber | AnswerList | LatexTokens


@dataclass(frozen=True)
class Answer:
    """A written answer in normal form."""

    form: NormalForm
    unit: str | None = None
    """Unit of a number, as in `58 cm` and `50\\%`; compared only where both answers have one. A word that scales, as in
    `5 million`, is part of the number."""
    name: str | None = None
    """Left side of an equation, as the x of `x = 5`; compared only where both answers have one."""

    @property
    def rational(self) -> Fraction | None:
        """The value where the answer is one rational number."""
        return self.form.rational if isinstance(self.form, ExactNumber) else None

    def __str__(self) -> str:
        return f"{self.name + ' = ' if self.name else ''}{self.form}{' ' + self.unit if self.unit else ''}"


def read_answer(text: str) -> Answer | None:
    """The normal form of a written answer; None if it is nothing but spacing and decoration."""
    text = normalize_unicode(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _unwrapped(text)
    name = None
    if named := _NAMED.fullmatch(text):
        name, text = named["name"], _unwrapped(named["value"])
    if not text:
        return None
    form: NormalForm = _form(text)
    unit = None
    if isinstance(form, LatexTokens) and len(text) <= MAX_LENGTH:
        form, unit = _quantity(text) or (form, None)
    if form == LatexTokens(()):
        return None
    return Answer(form, unit, name)


def same_answer(answer: Answer, gold: Answer, tolerance: float = 0.0) -> bool:
    """Whether two answers are the same: equal forms, and no conflict of units or names where both have one.

    With a tolerance, numbers that are not both whole may differ by that share of the gold number, except for numbers
    inside of tuples and sets.
    """
    return (
        (answer.form == gold.form or (tolerance > 0 and _close(answer.form, gold.form, tolerance)))
        and (answer.unit is None or gold.unit is None or answer.unit == gold.unit)
        and (answer.name is None or gold.name is None or answer.name == gold.name)
    )


def _close(form: NormalForm, gold: NormalForm, tolerance: float) -> bool:
    if not (isinstance(form, ExactNumber) and isinstance(gold, ExactNumber)):
        return False
    try:
        return within_tolerance(_as_fraction(form), _as_fraction(gold), tolerance)
    except (OverflowError, ValueError):  # no float is close to one of them
        return False


def _as_fraction(number: ExactNumber) -> Fraction:
    rational = number.rational
    return Fraction(float(number)) if rational is None else rational


def is_prose(text: str) -> bool:
    """Whether a text has two words in a row: a sentence, not a formula. `x y` is not a sentence."""
    return _PROSE.search(_MACRO_NAME.sub("\\\\", text)) is not None


# Characters ----------------------------------------------------------------------------------------------------------

_INVISIBLE = re.compile(r"[\x00-\x08\x0e-\x1f\xad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_INVISIBLE_ASCII = bytes(code for code in range(128) if _INVISIBLE.match(chr(code)))
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_FRACTION_CHARACTER = re.compile(r" ?([¼-¾⅐-⅞])")
_ASCII_FORMS = {0xFF01 + place: 0x21 + place for place in range(94)} | {
    0x066B: ".",
    0x066C: ",",
    0x2044: "/",
    0x2215: "/",
}
"""Full-width forms of ASCII, the separators of Arabic numbers, and other slashes."""


def normalize_unicode(text: str) -> str:
    r"""`text` without invisible characters, with digits of all scripts as 0 to 9, wide forms as ASCII, and ½ as 1/2.

    Otherwise `4\u200b2` would end in 2, and an earlier number would be read instead of a full-width or Arabic 42.
    """
    if text.isascii():  # without a pattern: twenty times as fast
        return text.encode("ascii").translate(None, _INVISIBLE_ASCII).decode("ascii")
    text = _INVISIBLE.sub("", text)
    text = _FRACTION_CHARACTER.sub(lambda fraction: " " + unicodedata.normalize("NFKC", fraction[1]), text)
    return _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_ASCII_FORMS))


# Decoration ----------------------------------------------------------------------------------------------------------

_WRAPPER = r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)|text|boldsymbol|bm|mbox|underline|operatorname|boxed|fbox)\s*"
_WRAPPED = re.compile(rf"(?:{_WRAPPER})?\{{(?P<inside>(?:[^{{}}\\]|\\.|\{{(?:[^{{}}\\]|\\.)*\}})*)\}}", re.DOTALL)
_NAMED = re.compile(
    r"(?P<name>\\?[A-Za-z]+(?:_\w|_\{\w+\})?(?:\([A-Za-z]\))?)\s*(?:=|\\in(?![A-Za-z]))(?P<value>[^=]+)", re.DOTALL
)
THOUSANDS_MARK = re.compile(
    r"(?<=[0-9])(?:\{,\}(?:\\!)?|(?:\\!)?,\\!|\\[,:; ]|[~'\u2019\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"
)
"""Everything but a comma that separates thousands in LaTeX."""
_MACRO_NAME = re.compile(r"\\[A-Za-z]+")
_PROSE = re.compile(r"(?<![A-Za-z])(?:[A-Za-z]{2,}\s+[A-Za-z]|[A-Za-z]\s+[A-Za-z]{2})")
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Math delimiters around a part of it, as in `$5$ apples`, and bold markers; not a currency sign, not a power.
    (re.compile(r"(?<!\\)(\$\$?)([^$]*)(?<!\\)\1"), r" \2 "),
    (re.compile(r"\\\(((?:(?!\\[()]).)*)\\\)", re.DOTALL), r" \1 "),
    (re.compile(r"(?<![\w)\]}])\*\*\*?(?=\S)|(?<=\S)\*\*\*?(?![\w(\[{\\])"), ""),
    (THOUSANDS_MARK, _GROUP_MARK),
    # Text macros around a number or a sign alone, next to something else: `\mathbf{58}\,\mathrm{cm}`, `58\text{\%}`.
    (re.compile(rf"(?<![\w^}}]){_WRAPPER}\{{\s*([0-9][0-9.,]*)\s*\}}(?!\s?[\w^{{])"), r"{\1}"),
    (re.compile(rf"{_WRAPPER}\{{\s*(\\?[$%]|[€£¥°.])\s*\}}"), r"\1"),
    (re.compile(r"\\(?:[,;:!> ]|(?:q?quad|displaystyle)(?![A-Za-z]))|[~\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"[\u2212\uff0d\ufe63]"), "-"),
    (re.compile(r"(?<![\w)\]}])[\u2010-\u2013](?=\s?[0-9.\\$])"), "-"),  # a minus; between numbers it means "to"
    (re.compile(r"(?<![\\A-Za-z])(sqrt|pi)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"√"), r"\\sqrt "),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"\s+"), " "),
    (re.compile(r",? ?\\(?:text|textrm|mathrm|mbox) ?\{ ?(?:and|or) ?\} ?|(?<=[^ ,]),? (?:and|or) "), ", "),
)


def _unwrapped(text: str) -> str:
    """`text` without decoration: one full stop, and math delimiters, bold or text macros around all of it."""
    inside: str | None = text
    while inside is not None:
        text = inside.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        inside = _inside_wrapper(text) if len(text) <= MAX_LENGTH else None
    return text


def _inside_wrapper(text: str) -> str | None:
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__")):
        length = len(opening)
        if text.startswith(opening) and text.endswith(closing) and len(text) >= 2 * length:
            inside = text[length:-length]
            if opening not in inside:
                return inside
    whole = _WRAPPED.fullmatch(text)
    return whole["inside"] if whole else None


# Units ---------------------------------------------------------------------------------------------------------------

_UNIT_POWER = r"(?:\s*\^\s*\{?-?[0-9]\}?)?"
_UNIT_IN_TEXT = rf"{_WRAPPER}\{{[^{{}}]*[A-Za-z][^{{}}]*\}}{_UNIT_POWER}"
_UNIT_AFTER: tuple[re.Pattern[str], ...] = (
    re.compile(rf"(?P<body>.*?\S)\s*(?P<unit>{_UNIT_IN_TEXT}(?:\s*(?:/|\\cdot)?\s*{_UNIT_IN_TEXT})*)"),
    re.compile(rf"{_WRAPPER}\{{\s*(?P<body>[0-9][0-9.,/]*)\s*(?P<unit>[A-Za-z]+\s*\}}{_UNIT_POWER})"),
    re.compile(
        r"(?P<body>.*?\S)\s*(?P<unit>\\?[%$]|(?:°|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\degree)"
        rf"\s*(?:[CF]|{_WRAPPER}\{{\s*[CF]\s*\}})?)"
    ),
    # Letters directly after a number are a product (2ab), except these; after a space a word is a unit.
    re.compile(rf"(?P<body>.*[0-9.])(?P<unit>(?:mm|cm|km|kg){_UNIT_POWER})"),
    re.compile(rf"(?P<body>.*?\S)\s(?P<unit>(?:[A-Za-z]{{2,}}|[mgsL])(?:[ /][A-Za-z]+)*{_UNIT_POWER})"),
)
_UNIT_BEFORE = re.compile(r"(?P<minus>-?)\s*(?P<unit>\\?\$|€|£|¥)\s*(?P<body>.*\S)")
_UNIT_NAMES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "%": "percent"}
_UNIT_MACRO = re.compile(rf"{_WRAPPER}(?=\{{)|[{{}}]")


def _quantity(text: str) -> tuple[ExactNumber, str | None] | None:
    """(number, unit) of `58\\text{ cm}`, `58 cm`, `50\\%`, `90^\\circ`, `\\$5`, `5 million`; None for anything else."""
    if before := _UNIT_BEFORE.fullmatch(text):
        body, unit = before["minus"] + before["body"], _unit_name(before["unit"])
        number = _form(body)
        if isinstance(number, ExactNumber):
            return number, unit
        scaled = _quantity(body)
        return (scaled[0], unit) if scaled is not None and scaled[1] in (None, unit) else None
    for pattern in _UNIT_AFTER:
        if after := pattern.fullmatch(text):
            number = _form(after["body"])
            if isinstance(number, ExactNumber):
                return _scaled(number, after["unit"])
    return None


SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
"""Factors of words after a number. The percent sign and the word percent are units: 50 % is 50."""
_SCALE = re.compile(rf"({'|'.join(SCALES)})s?(?![\w-]) *", re.IGNORECASE)


def leading_scale(words: str) -> tuple[int, str]:
    """(product of the leading words that scale, the rest): (10**8, "people") for `hundred million people`."""
    factor = 1
    while scale := _SCALE.match(words):
        factor *= SCALES[scale[1].lower()]
        words = words[scale.end() :]
    return factor, words


def _scaled(number: ExactNumber, unit: str) -> tuple[ExactNumber, str | None] | None:
    factor, rest = leading_scale(_UNIT_MACRO.sub("", unit).strip())
    if factor != 1 and rest.startswith("^"):  # 5 million^2
        return None
    try:
        return number * ExactNumber.from_rational(factor), _unit_name(rest) if rest else None
    except NotExact:
        return None


def _unit_name(unit: str) -> str:
    unit = re.sub(r"\\(?:circ|degree)|°", "degree", re.sub(r"[\s^]", "", unit)).removesuffix(".")
    unit = _UNIT_NAMES.get(unit.removeprefix("\\"), unit)
    # Short units differ by case (mW, MW); of words, capitals and the plural s are decoration.
    return unit.casefold().removesuffix("s") if len(unit) > 3 else unit


# Forms ---------------------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?!,?[0-9])")
_DELIMITERS = {"(": "()", "[": "[]", "\\{": "{}"}
_OPENING = {"(", "[", "{", "\\{"}
_CLOSING = {")", "]", "}", "\\}"}


def _form(text: str, depth: int = 0) -> NormalForm:
    text = text.strip()
    if len(text) > MAX_LENGTH or depth > MAX_DEPTH:
        return LatexTokens(_tokens(text))
    enclosed = _enclosed(text, depth)
    if enclosed is not None:
        return enclosed
    if depth == 0:
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", _GROUP_MARK), text)
        items = _split_at_commas(text)
        if items is not None and len(items) > 1 and all(items):
            forms = [_form(item, depth + 1) for item in items]
            # Without repetition a bare list is the set of its items: "2, 5" and {5, 2} name the same solutions.
            return _unordered("{}" if len(set(forms)) == len(forms) else ",,", forms)
    try:
        return _Parser(text).parse()
    except NotExact:
        return LatexTokens(_tokens(text))


def _enclosed(text: str, depth: int) -> NormalForm | None:
    """The form of a text within delimiters: of items, (3, 7), [0, 1), \\{2, 5\\}, or of one answer, (C); else None."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in _DELIMITERS or closing not in {")", "]", "\\}"} or (opening == "\\{") != (closing == "\\}"):
        return None
    items = _split_at_commas(text[len(opening) : len(text) - len(closing)])
    if items is None or not all(items):
        return None
    if len(items) == 1 and opening != "\\{":
        return _form(items[0], depth + 1) if (opening, closing) == ("(", ")") else None
    forms = [_form(item, depth + 1) for item in items]
    if opening == "\\{":
        return _unordered("{}", list(dict.fromkeys(forms)))
    return AnswerList(opening + closing, tuple(forms))


def _unordered(delimiters: str, forms: list[NormalForm]) -> AnswerList:
    return AnswerList(delimiters, tuple(sorted(forms, key=repr)))


def _split_at_commas(text: str) -> list[str] | None:
    """The parts between commas outside all brackets, stripped; None where brackets do not match."""
    parts, start, depth = [], 0, 0
    for match in re.finditer(r"\\.|[()\[\]{},]", text, re.DOTALL):
        token = match[0]
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            return None
        if token == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()] if depth == 0 else None


def _tokens(text: str) -> tuple[str, ...]:
    """LaTeX tokens: a macro, an escaped character or a character each. A space counts only between letters or digits;
    braces around one token are dropped, as LaTeX ignores them."""
    tokens: list[str] = []
    text = text.replace(_GROUP_MARK, ",")
    for match in re.finditer(r"\\[A-Za-z]+|\\.|\s+|.", text, re.DOTALL):
        token = match[0]
        if token.isspace():
            following = text[match.end() : match.end() + 1]
            if tokens and tokens[-1].isalnum() and following.isalnum():
                tokens.append(" ")
        elif token == "}" and len(tokens) >= 2 and tokens[-2] == "{" and tokens[-1] not in ("{", "}"):
            tokens[-2:] = [tokens[-1]]
        else:
            tokens.append(token)
    return tuple(tokens)


# Numbers -------------------------------------------------------------------------------------------------------------

_MIXED = re.compile(r"(?P<whole>[0-9]+) (?P<top>[0-9]+)/(?P<bottom>[0-9]+)(?![0-9.])")
_LITERAL = re.compile(
    rf"(?P<grouped>[1-9][0-9]{{0,2}}(?:{_GROUP_MARK}[0-9]{{3}})+(?:\.[0-9]+)?)(?![0-9.{_GROUP_MARK}])"
    rf"|(?P<plain>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}}(?![0-9]))?)(?![0-9.{_GROUP_MARK}])"
)
_INTEGER = re.compile(r"[0-9]+")
_PRODUCT = re.compile(r"\*|\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|[\u00d7\u00b7\u22c5]")
_QUOTIENT = re.compile(r"/|\\div(?![A-Za-z])|÷")
_FRACTION = re.compile(r"\\frac(?![A-Za-z])")
_ROOT = re.compile(r"\\sqrt(?![A-Za-z])")
_PI = re.compile(r"\\pi(?![A-Za-z])")


class _Parser:
    """Recursive descent over + - * / ^, implicit products, fractions, roots and π, straight to exact values."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def parse(self) -> ExactNumber:
        value = self.sum()
        if self.peek():
            raise NotExact(f"unexpected {self.peek()!r}")
        return value

    def peek(self) -> str:
        """The next character that is not a space, or '' at the end."""
        while self.text.startswith(" ", self.position):
            self.position += 1
        return self.text[self.position : self.position + 1]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.peek()
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise NotExact(f"expected {character!r}")
        self.position += 1

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotExact(f"more than {MAX_DEPTH} levels")

    def sum(self) -> ExactNumber:
        self.deeper()
        value = self.signed(self.product)
        while (sign := self.peek()) and sign in "+-":
            self.position += 1
            term = self.product()
            value = value + (term if sign == "+" else -term)
        self.depth -= 1
        return value

    def signed(self, operand: Callable[[], ExactNumber]) -> ExactNumber:
        """One optional sign in front of an operand."""
        sign = self.peek()
        if sign and sign in "+-":
            self.position += 1
            return -operand() if sign == "-" else operand()
        return operand()

    def product(self) -> ExactNumber:
        value = self.power()
        while True:
            if self.take(_PRODUCT):
                value = value * self.signed(self.power)
            elif self.take(_QUOTIENT):
                value = value / self.signed(self.power)
            elif self.peek() in ("(", "\\"):
                value = value * self.power()
            else:
                return value

    def power(self) -> ExactNumber:
        return self.raised(self.operand())

    def raised(self, base: ExactNumber) -> ExactNumber:
        """`base` to the power that follows, if one does; towers bind to the right."""
        if self.peek() != "^":
            return base
        self.position += 1
        self.deeper()
        exponent = self.signed(self.exponent)
        self.depth -= 1
        return base.raised_to(exponent)

    def exponent(self) -> ExactNumber:
        """`^10` is taken as plain text means it, not as LaTeX's ^1 followed by 0."""
        if whole := self.take(_INTEGER):
            return self.raised(ExactNumber.from_rational(int(whole[0])))
        return self.raised(self.operand())

    def operand(self) -> ExactNumber:
        if mixed := self.take(_MIXED):
            return ExactNumber.from_rational(_mixed(*(int(mixed[name]) for name in ("whole", "top", "bottom"))))
        if literal := self.take(_LITERAL):
            value = ExactNumber.from_rational(Fraction(literal[0].replace(_GROUP_MARK, "")))
            if literal[0].isdigit() and self.peek() == "\\" and _FRACTION.match(self.text, self.position):
                return self.mixed_number(value)
            return value
        if self.take(_FRACTION):
            return self.argument() / self.argument()
        if self.take(_ROOT):
            return self.root()
        if self.take(_PI):
            return PI
        if self.peek() == "(":
            return self.enclosed("(", ")")
        return self.enclosed("{", "}")

    def mixed_number(self, whole: ExactNumber) -> ExactNumber:
        r"""A whole number directly before a proper fraction, `1\frac{3}{4}`: their sum; otherwise their product."""
        self.take(_FRACTION)
        top, bottom = self.argument(), self.argument()
        fraction = top / bottom
        if top.rational is not None and bottom.rational is not None and 0 < (fraction.rational or 0) < 1:
            return whole + fraction
        return whole * fraction

    def root(self) -> ExactNumber:
        index = 2
        if self.peek() == "[":
            self.position += 1
            written = self.take(_INTEGER)
            self.expect("]")
            if written is None or len(written[0]) > 4 or int(written[0]) < 2:
                raise NotExact("the index of a root is a whole number from 2 on")
            index = int(written[0])
        return self.argument().root(index)

    def argument(self) -> ExactNumber:
        r"""The argument of a macro: a group, another macro, parentheses, or one digit (`\frac12` is a half)."""
        following = self.peek()
        if following.isdigit() and following.isascii():
            self.position += 1
            return ExactNumber.from_rational(int(following))
        if following == "\\":
            return self.operand()
        return self.enclosed("(", ")") if following == "(" else self.enclosed("{", "}")

    def enclosed(self, opening: str, closing: str) -> ExactNumber:
        self.expect(opening)
        value = self.sum()
        self.expect(closing)
        return value


def _mixed(whole: int, top: int, bottom: int) -> Fraction:
    if not 0 < top < bottom:
        raise NotExact("a mixed number has a proper fraction")
    return whole + Fraction(top, bottom)
