"""Find the answer in a completion: its text, its last box, tag block or number. Used by rewards and by evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from types import MappingProxyType
from typing import Any, NamedTuple

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers.exact_numbers import MAX_BITS
from grupo.rewards.answers.latex import is_prose, plain_characters, read_answer, scale_of
from grupo.types import content_text
from grupo.utils.messages import did_you_mean

NUMBER_NEEDED = "A gold answer is a number, or a text that is nothing but a number (behind `####` in GSM8K's form)."
"""What `gold_number` reads, as messages say it."""
MAX_DIGITS = 1000
"""A longer run of digits is no answer; Python itself refuses to convert more than 4,300."""

_MINUS = "\\-\u2010-\u2013\u2212\uff0d\ufe63"
_SIGN = f"[+{_MINUS}]"
# A sign counts only where no operand stands before it: "7-5" ends in 5, "= -5" and "= - 5" in -5. Three digits behind a
# space may be thousands or a second number: both together are number-like, and no number.
_NUMBER_LIKE = re.compile(
    rf"(?P<sign>(?<![\w)\]}}]){_SIGN}|(?<==)\ ?{_SIGN}\ )?(?:\\?[$€£¥])?(?P<second_sign>(?<=[$€£¥]){_SIGN})?"
    r"(?P<body>(?:[0-9]+\ )?[0-9][0-9.,]*\ ?/\ ?[0-9][0-9.,]*(?:/[0-9.,]+)*"
    r"|(?<![0-9.,])[1-9][0-9]{0,2}(?:\ [0-9]{3})+(?![0-9])[0-9.,]*"
    r"|(?:[0-9]|(?<![.\w])\.(?=[0-9]))[0-9.,]*(?:[eE][+-]?[0-9]{1,3}(?![\w.]))?)"
)
_THOUSANDS_MARK = re.compile(
    r"\{,\}(?:\\!)?|(?:\\!)?,\\!|(?<=[0-9])(?:\\[,:; ]|[~_'\u2019\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"
)
_IN_THOUSANDS_MARK = (
    *("{,}", ",\\!", "\\,", "\\:", "\\;", "\\ ", "~"),
    *("_", "'", "\u2019", "\u00a0", "\u2009", "\u202f"),
)
"""One of them is in every match of that pattern, which is slow over a long text."""
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_PLAIN = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_RATIO = re.compile(r"(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+) ?/ ?(?P<bottom>[0-9]+)")
_INSIDE_FORMULA = re.compile(
    r"(?:\^|√|\\sqrt(?:\[[^\]]*\])?|\\[dt]?frac(?:\{(?:[^{}]|\{[^{}]*\})*\}|\s*[0-9])?)\s*\{?\s*$"
)
_UNIT_POWER = re.compile(
    r"(?<=[0-9])((?:\\[ ,])?\ ?(?:\\(?:text|mathrm)\{\ ?)?"
    r"(?:[kcdm]?m|in|ft|yd|mi|inch(?:es)?|feet|met(?:er|re)s?|units?)(?:/[a-z]+)?(?:\ ?\})?)\^?\{?[23]\Z"
)
"""Up to its last digit: a number with a unit to some power, `58 cm^2`, `58\\text{ cm}^2`, `58 m2`."""
_FORMULA_GOES_ON = re.compile(
    r"[,.]?\s?(?:\\?\^(?!\\circ|\{\\circ)|\\pi\b|π|√|\\sqrt|\\[dt]?frac|[²³⁴⁵⁶⁷⁸⁹]"
    r"|and an? (?:half|third|quarter)\b)"
)
_BEFORE_SCALE = re.compile(r"(?:[$*~ \u00a0-]|\\[,;: ]|\\(?:text|textrm|mathrm|mbox)\s*\{)*")
_LONGEST_SCALE = 60
"""Characters behind a number among which words that scale it are looked for."""
_ALTERNATIVE = re.compile(
    r"(?P<other>[0-9][.,]?(?:\\?[$%*)}\]])*(?:\s\w+){0,2}),?\s*(?:(?<![\w\\])or\s|\\text\s*\{\s*or\s*\})\s*"
    r"(?:(?:maybe|perhaps|possibly|else)\s+)?(?:\\?[A-Za-z]\w*\s*=\s*)?[({\[*]*$"
)
"""Before a number: another one, its unit, and "or"."""
_MOST_ALTERNATIVES = 8
_FRACTION_OF_DIGITS = re.compile(r"(?P<whole>(?<=[0-9])\s*)?\\[dtc]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_BEFORE_NUMBER = re.compile(rf".*[^0-9.,/ eE+$€£¥\\{_MINUS}]", re.DOTALL)
"""Up to the last character that cannot be part of anything number-like."""
# Greedy from the end: a completion has one answer, and its end is where it stands.
_LAST_BOX = re.compile(r".*\\(?:boxed|fbox)(?![A-Za-z])\s*", re.DOTALL)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_PHRASE = re.compile(
    r"(?<![a-z])answer[*_]*(?:\s+is(?![a-z'])(?!\s+not\b)\s*:?|\s*[:=][*_]*|(?<=final answer)[*_]*[ \t]*\r?\n)\s*",
    re.IGNORECASE,
)
_STATEMENT = re.compile(r"(?:\$\$.*?\$\$|\\\[.*?\\\])?[^\r\n]*", re.DOTALL)
_STATEMENT_ENDS = re.compile(r"[.?](?=[\"'*_)\]]*(?:\s|$))|,?\s(?:so|because|since|which)\s")


def completion_text(completion: Any) -> str | None:
    """The text of a completion: a string itself, the content of the last message of a list of messages, else None.

    A message's content may be a string, None, or a list of parts, whose `text` fields are joined.

    Raises:
        RewardError: the completion is none of these.
    """
    if completion is None or isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and all(isinstance(message, dict) for message in completion):
        content = completion[-1].get("content") if completion else None
        if content is None or isinstance(content, (str, list)):
            return content_text(content)
    raise RewardError(
        f"a completion is a string or a list of messages with a 'content'; this one is a {type(completion).__name__}: "
        f"{completion!r:.80}"
    )


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """(n,) the text of each completion, "" where it has none."""
    return [completion_text(completion) or "" for completion in completions]


class Found(NamedTuple):
    """What was found in a completion."""

    answer: str | None
    """As it is written; None if there is none."""
    source: str | None
    """Where; None if no source is there."""


@dataclass(frozen=True)
class Extraction:
    r"""Where the answer of a completion stands: the first of `sources` that is there.

    - `boxed`: the last `\boxed{...}` or `\fbox{...}`
    - `tag`: the last block `<answer>...</answer>`
    - `hash`: what follows the last `####` in its line
    - `phrase`: what follows the last "answer is", "answer:" or "answer =" (or a line "Final answer"), to the end of the
      sentence
    - `last_number`: the last number of the text, see `last_number`

    Raises:
        ConfigError: an unknown source, none, or one twice; a tag that is no name.
    """

    sources: tuple[str, ...] = ("boxed", "tag", "hash", "phrase", "last_number")
    strict: bool = True
    """Strict: the first source that is there decides, and all of it is the answer; where it is empty or broken (a box
    that is not closed), there is no answer. Lenient: an empty or broken source is passed over, and of a sentence the
    last number counts. Lenient finds more answers, and more that were not meant."""
    tag: str = "answer"

    def __post_init__(self) -> None:
        names = (self.sources,) if isinstance(self.sources, str) else tuple(self.sources)
        object.__setattr__(self, "sources", names)  # recipes give lists
        unknown = [name for name in names if name not in _SOURCES]
        if unknown:
            raise ConfigError(
                f"There is no source of answers named {unknown[0]!r}.{did_you_mean(str(unknown[0]), _SOURCES)} The "
                f"sources are {', '.join(_SOURCES)}."
            )
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"sources={names!r} is no order: give one or more of {', '.join(_SOURCES)}, each once.")
        if not self.tag.isidentifier():
            raise ConfigError(
                f"tag={self.tag!r} is no name of a block: give it without angle brackets, as in 'answer'."
            )

    @staticmethod
    def of(given: Extraction | Mapping[str, Any] | None, default: Extraction) -> Extraction:
        """An extraction itself or from its fields, as recipes give them; the default for None."""
        if given is None or isinstance(given, Extraction):
            return given or default
        if not isinstance(given, Mapping):
            raise ConfigError(f"extraction={given!r:.80} is none: give its fields, as in {{'sources': ['boxed']}}.")
        known = [field.name for field in fields(Extraction)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"An extraction has no '{name}'.{did_you_mean(name, known)} It takes {', '.join(known)}."
                )
        return Extraction(**given)

    def find(self, text: str) -> Found:
        """The answer of a completion text."""
        for source in self.sources:
            written = _SOURCES[source](text, self.tag)
            if written is None:
                continue
            if not self.strict and is_prose(written):
                written = _last_number(written, self.tag) or ""
            if written.strip():
                return Found(written, source)
            if self.strict:
                return Found(None, source)
        return Found(None, None)


def extract_answer(text: str, extraction: Extraction | None = None) -> str | None:
    """What a completion answers, as it is written there, or None.

    Unless an extraction is given, that is the content of its last box if it has any box, else its last number.
    """
    return (extraction or BOX_ELSE_NUMBER).find(text).answer


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, by a scan for the matching brace.

    The last box decides: None if there is none, if it is not closed, or if it has no braces (`\boxed 5` boxes one digit
    in LaTeX, and is rarely meant so). Escaped braces are content: `\boxed{\{2,5\}}` holds `\{2,5\}`.
    """
    box = _LAST_BOX.match(text)
    if box is None or not text.startswith("{", box.end()):
        return None
    depth = 0
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[box.end() + 1 : brace.start()]
    return None


def last_block(text: str, opening: str, closing: str) -> str | None:
    """What stands behind the last opening mark, up to the next closing one, stripped; None if there is none, or if it
    is not closed: the last block decides."""
    _, found, rest = text.rpartition(opening)
    content, closed, _ = rest.partition(closing)
    return content.strip() if found and closed else None


# Sources: (text, tag) -> what stands there, "" where it is empty or broken, None where there is no such place.


def _boxed(text: str, tag: str) -> str | None:
    return None if _LAST_BOX.match(text) is None else extract_boxed(text) or ""


def _tag_block(text: str, tag: str) -> str | None:
    opening = f"<{tag}>"
    return None if opening not in text else last_block(text, opening, f"</{tag}>") or ""


def _behind_hashes(text: str, tag: str) -> str | None:
    _, mark, behind = text.rpartition("####")
    return behind.strip().partition("\n")[0].strip() if mark else None


def _behind_phrase(text: str, tag: str) -> str | None:
    # Not one pattern over the whole text: this is twenty times as fast, and linear in its length.
    places = {word: text.rfind(word) for word in ("nswer", "NSWER")}
    while (place := max(places.values())) > 0:
        if phrase := _PHRASE.match(text, place - 1):
            statement = _STATEMENT.match(text, phrase.end())
            assert statement is not None
            return _STATEMENT_ENDS.split(statement[0], maxsplit=1)[0].strip()
        word = max(places, key=places.__getitem__)
        places[word] = text.rfind(word, 0, place)
    return None


def _last_number(text: str, tag: str) -> str | None:
    number = last_number(text)
    return None if number is None else str(number)


_SOURCES: Mapping[str, Callable[[str, str], str | None]] = MappingProxyType(
    {
        "boxed": _boxed,
        "tag": _tag_block,
        "hash": _behind_hashes,
        "phrase": _behind_phrase,
        "last_number": _last_number,
    }
)
BOX_ELSE_NUMBER = Extraction(("boxed", "last_number"))


def last_number(text: str) -> Fraction | None:
    r"""The last number in `text`, exactly, or None.

    Whatever looks like a number last decides; if it is not one, the answer is None and never an earlier number.

    - Commas are thousands separators only between true groups of three: `1,250` is 1250; `3,7`, `0,900` and `12,34,567`
      are no numbers. LaTeX's `2{,}000`, `2\,000` and `2\ 000` are 2000, and so are `2_000`, `2'000` and groups with
      thin or non-breaking spaces. `1 250`, with a plain space, may be two numbers, and is none.
    - Digits of all scripts count, and characters that cannot be seen do not.
    - A currency sign before it, a percent sign or unit behind it and one full stop are ignored: `$3,450.00.` is 3450,
      `50%` is 50, `58 cm^2` is 58. A minus (ASCII, Unicode minus, en dash) counts where no operand stands directly
      before it.
    - `1.5e3` is 1500. `3/4` and `1 3/4` are fractions. `12/4` is a division that was not carried out, and no number.
    - `5 million` is 5000000, and so for hundred, thousand, billion, trillion and dozen.
    - A number inside or directly before a power, root, fraction macro or π is part of a formula, and no number.
    - `5 or 7` is two answers, and no number, unless both are the same: `1/2 or 0.5`.
    """
    text = _with_commas(text)
    value, start = _number_before(text, len(text))
    for _ in range(_MOST_ALTERNATIVES):
        other = _ALTERNATIVE.search(text, max(0, start - 80), start)
        if value is None or other is None:
            return value
        same, start = _number_before(text, other.end("other"))
        if same != value:
            return None
    return None


def _number_before(text: str, end: int) -> tuple[Fraction | None, int]:
    """The last number before `end`, and where it begins."""
    last_digit = max(text.rfind(digit, 0, end) for digit in "0123456789")
    if power := _UNIT_POWER.search(text, max(0, last_digit - 40), last_digit + 1):
        end = power.end(1)
        last_digit = max(text.rfind(digit, 0, end) for digit in "0123456789")
    if last_digit < 0:
        return None, 0
    before = _BEFORE_NUMBER.match(text, 0, last_digit)
    # Behind the last digit, a number-like text has nothing but the end of an exponent, commas and full stops.
    *_, match = _NUMBER_LIKE.finditer(text, before.end() if before else 0, min(end, last_digit + 16))
    start, body = match.start(), match["body"].rstrip(".,")
    behind = match.start("body") + len(body)
    if _INSIDE_FORMULA.search(text[max(0, start - 80) : start]) or _FORMULA_GOES_ON.match(text, behind):
        return None, start
    value = _number(body)
    if value is None:
        return None, start
    decoration = _BEFORE_SCALE.match(text, behind)
    assert decoration is not None
    value *= scale_of(text[decoration.end() : decoration.end() + _LONGEST_SCALE])[0]
    negative = any(sign and sign.strip() != "+" for sign in (match["sign"], match["second_sign"]))
    return -value if negative else value, start


def only_number(text: str) -> Fraction | None:
    """The number in `text`, as `last_number` reads it, where there is no second one: `71 or 72`, `6 * 12` give None."""
    return last_number(text) if len(_NUMBER_LIKE.findall(_with_commas(text))) == 1 else None


def number_alone(text: str) -> Fraction | None:
    r"""The number that a text is as a whole, such as that of a box: `72`, `72 apples`, `x = 72`, `\frac{3}{4}`.

    None for everything that has to be computed, `6 * 12` and `\frac{24}{8}`, for several numbers, and for a sentence.
    """
    answer = read_answer(text)
    plain = _FRACTION_OF_DIGITS.sub(lambda m: f"{'' if m['whole'] is None else ' '}{m[2]}/{m[3]}", text)
    return answer.rational if answer is not None and answer.rational == last_number(plain) else None


def gold_number(gold: Any) -> Fraction | None:
    """A gold answer as an exact number, or None where it is not one.

    Numbers are taken as written (0.1 is 1/10); of a text with GSM8K's `####` only what follows it counts, and the text
    must be the number and nothing else but a currency or percent sign and a full stop.
    """
    gold = plain_scalar(gold)
    if isinstance(gold, bool) or gold is None:
        return None
    if isinstance(gold, Rational):
        return Fraction(int(gold.numerator), int(gold.denominator))
    if isinstance(gold, Decimal):
        return Fraction(gold) if gold.is_finite() and abs(gold.adjusted()) <= MAX_DIGITS else None
    if isinstance(gold, Real):
        # The shortest decimal that stands for this float, at the float's own precision: numpy's float32(0.1) is 1/10.
        written = str(gold)
    elif isinstance(gold, str):
        written = gold.rpartition("####")[2].strip()
    else:
        return None
    written = _with_commas(written).strip("$ ")
    match = _NUMBER_LIKE.fullmatch(written.removesuffix(".").removesuffix("%").removesuffix("\\"))
    return None if match is None else last_number(match.group())


def rounding(gold: Any) -> float:
    """The share by which a gold answer may be off the number that it stands for: a few units of a float's last place.

    No float is 1/3, and 0.1 + 0.2 is not the float nearest to 0.3.
    """
    gold = plain_scalar(gold)
    if isinstance(gold, Rational) or not isinstance(gold, Real):
        return 0.0
    return {4: 2.0**-21, 2: 2.0**-8}.get(getattr(getattr(gold, "dtype", None), "itemsize", 8), 2.0**-50)


def plain_scalar(value: Any) -> Any:
    """An array of numpy or torch without dimensions as a number at its own precision; anything else as it is."""
    if getattr(value, "shape", None) != () or isinstance(value, Real):
        return value
    try:
        return (value.numpy() if hasattr(value, "numpy") else value)[()]
    except (TypeError, RuntimeError):  # torch: a dtype that numpy does not have, a tensor on another device
        return value.item()


def _with_commas(text: str) -> str:
    """`text` in plain characters, with a comma for every other thousands separator."""
    text = plain_characters(text)
    return _THOUSANDS_MARK.sub(",", text) if any(mark in text for mark in _IN_THOUSANDS_MARK) else text


def _number(body: str) -> Fraction | None:
    if len(body) > MAX_DIGITS:
        return None
    if ratio := _RATIO.fullmatch(body):
        whole, top, bottom = (int(ratio[name] or 0) for name in ("whole", "top", "bottom"))
        unfinished = bottom == 0 or top % bottom == 0
        return None if unfinished or (whole and top > bottom) else whole + Fraction(top, bottom)
    if _GROUPED.fullmatch(body):
        return Fraction(body.replace(",", ""))
    return Fraction(body) if _PLAIN.fullmatch(body) else None


def shown_value(value: Any, length: int = 80) -> str:
    """The beginning of a value of a dataset or a program, as messages quote it."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:  # too long for Python to print
        return "an integer of more than 1,000 digits"
    try:
        return repr(value)[:length]
    except (ValueError, RecursionError):  # such an integer inside of it; nesting
        return f"a {type(value).__name__} that is too large to be shown"
