"""The answer in a completion: its text, its last box, tag block or number. Used by rewards and by evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from types import MappingProxyType
from typing import Any, NamedTuple

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers import patterns
from grupo.rewards.answers.exact_numbers import MAX_BITS
from grupo.rewards.answers.latex import is_prose, leading_scale, normalize_unicode, read_answer
from grupo.types import content_text
from grupo.utils.messages import did_you_mean

NUMBER_REQUIREMENT = "A gold answer is a number, or a text that is nothing but a number (after `####` in GSM8K's form)."
"""What `gold_number` reads, for messages."""
MAX_DIGITS = 1000
"""A longer run of digits is not an answer; Python itself refuses to convert more than 4,300."""
_MAX_SCALE_LENGTH = 60
"""Number of characters after a number among which words that scale it are looked for."""
_MAX_CONTEXT = 80
"""Number of characters before a number that can make it part of a formula, or one of several alternatives."""
_MAX_ALTERNATIVES = 8


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
    """(n,) texts of the completions, "" for one without text."""
    return [completion_text(completion) or "" for completion in completions]


class ExtractedAnswer(NamedTuple):
    """The answer found in a completion."""

    answer: str | None
    """Its text, as written; None if there is none."""
    source: str | None
    """The source that it was found in; None if the completion has none of the sources."""


@dataclass(frozen=True)
class Extraction:
    r"""Rule for finding the answer of a completion: the first of `sources` that the completion has.

    - `boxed`: the last `\boxed{...}` or `\fbox{...}`
    - `tag`: the last block `<answer>...</answer>`
    - `hash`: the rest of the line after the last `####`
    - `phrase`: the text after the last "answer is", "answer:" or "answer =" (or a line "Final answer"), to the end of
      the sentence
    - `last_number`: the last number of the text, see `last_number`

    Raises:
        ConfigError: an unknown source, none, or one twice; a tag that is not a name.
    """

    sources: tuple[str, ...] = ("boxed", "tag", "hash", "phrase", "last_number")
    strict: bool = True
    """Strict: the first source that the completion has decides, and all of it is the answer; where it is empty or
    broken (a box that is not closed), there is no answer. Lenient: an empty or broken source is skipped, and of a
    sentence the last number counts. Lenient finds more answers, and more that were not meant."""
    tag: str = "answer"

    def __post_init__(self) -> None:
        names = (self.sources,) if isinstance(self.sources, str) else tuple(self.sources)
        object.__setattr__(self, "sources", names)  # recipes give lists
        unknown = [name for name in names if name not in _SOURCES]
        if unknown:
            raise ConfigError(
                f"There is no source of answers named {unknown[0]!r}.{did_you_mean(unknown[0], _SOURCES)} The sources "
                f"are {', '.join(_SOURCES)}."
            )
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"sources={names!r} is not an order of sources: give one or more of {', '.join(_SOURCES)}, each once."
            )
        if not self.tag.isidentifier():
            raise ConfigError(
                f"tag={self.tag!r} is not the name of a block: give it without angle brackets, as in 'answer'."
            )

    @staticmethod
    def of(given: Extraction | Mapping[str, Any] | None, default: Extraction) -> Extraction:
        """An extraction from its fields, as recipes give them; an extraction itself; the default for None."""
        if given is None or isinstance(given, Extraction):
            return given or default
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"extraction={given!r:.80} is not an extraction: give its fields, as in {{'sources': ['boxed']}}."
            )
        known = [field.name for field in fields(Extraction)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"An extraction has no '{name}'.{did_you_mean(name, known)} It takes {', '.join(known)}."
                )
        return Extraction(**given)

    def find(self, text: str) -> ExtractedAnswer:
        """The answer in the text of a completion."""
        for source in self.sources:
            written = _SOURCES[source](text, self.tag)
            if written is None:
                continue
            if not self.strict and is_prose(written):
                written = _last_number(written, self.tag) or ""
            if written.strip():
                return ExtractedAnswer(written, source)
            if self.strict:
                return ExtractedAnswer(None, source)
        return ExtractedAnswer(None, None)


def extract_answer(text: str, extraction: Extraction | None = None) -> str | None:
    """The answer of a completion, as written, or None.

    Without an extraction, that is the content of the last box if there is any box, else the last number.
    """
    return (extraction or BOX_ELSE_NUMBER).find(text).answer


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, up to the matching brace.

    The last box decides: None if there is none, if it is not closed, or if it has no braces (`\boxed 5` boxes one digit
    in LaTeX, and is rarely meant so). Escaped braces are content: `\boxed{\{2,5\}}` holds `\{2,5\}`.
    """
    box = patterns.LAST_BOX.match(text)
    if box is None or not text.startswith("{", box.end()):
        return None
    depth = 0
    for brace in patterns.BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[box.end() + 1 : brace.start()]
    return None


def last_block(text: str, opening: str, closing: str) -> str | None:
    """The text between the last opening mark and the next closing one, stripped; None without an opening mark, or if
    the last block is not closed."""
    _, found, rest = text.rpartition(opening)
    content, closed, _ = rest.partition(closing)
    return content.strip() if found and closed else None


# Sources: (text, tag) -> the answer, "" where the source is empty or broken, None where the text has no such source.


def _boxed(text: str, tag: str) -> str | None:
    return None if patterns.LAST_BOX.match(text) is None else extract_boxed(text) or ""


def _tag_block(text: str, tag: str) -> str | None:
    opening = f"<{tag}>"
    return None if opening not in text else last_block(text, opening, f"</{tag}>") or ""


def _after_hashes(text: str, tag: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if mark else None


def _after_phrase(text: str, tag: str) -> str | None:
    # Not one pattern over the whole text: this is twenty times as fast, and linear in its length.
    places = {word: text.rfind(word) for word in ("nswer", "NSWER")}
    while (place := max(places.values())) > 0:
        if phrase := patterns.ANSWER_PHRASE.match(text, place - 1):
            statement = patterns.STATEMENT.match(text, phrase.end())
            assert statement is not None
            return patterns.STATEMENT_END.split(statement[0], maxsplit=1)[0].strip()
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
        "hash": _after_hashes,
        "phrase": _after_phrase,
        "last_number": _last_number,
    }
)
BOX_ELSE_NUMBER = Extraction(("boxed", "last_number"))


def last_number(text: str) -> Fraction | None:
    r"""The last number in `text`, exactly, or None.

    The last thing that looks like a number decides; if it is not one, the answer is None and never an earlier number.

    - Commas are thousands separators only between true groups of three: `1,250` is 1250; `3,7`, `0,900` and `12,34,567`
      are not numbers. LaTeX's `2{,}000`, `2\,000` and `2\ 000` are 2000, and so are `2_000`, `2'000` and groups with
      thin or non-breaking spaces. `1 250`, with a plain space, may be two numbers, and is not read.
    - Digits of all scripts count, and characters that cannot be seen do not.
    - A currency sign before it, a percent sign or unit after it and one full stop are ignored: `$3,450.00.` is 3450,
      `50%` is 50, `58 cm^2` is 58. A minus (ASCII, Unicode minus, en dash) counts where no operand stands directly
      before it.
    - `1.5e3` is 1500. `3/4` and `1 3/4` are fractions. `12/4` is a division that was not carried out, and not a number.
    - `5 million` is 5000000, and so for hundred, thousand, billion, trillion and dozen.
    - A number inside or directly before a power, root, fraction macro or π is part of a formula, and not read.
    - `5 or 7` is two answers, and not a number, unless both are the same: `1/2 or 0.5`.
    """
    text = _with_plain_separators(text)
    value, start = _number_before(text, len(text))
    for _ in range(_MAX_ALTERNATIVES):
        other = patterns.ALTERNATIVE.search(text, max(0, start - _MAX_CONTEXT), start)
        if value is None or other is None:
            return value
        same, start = _number_before(text, other.end("other"))
        if same != value:
            return None
    return None


def _number_before(text: str, end: int) -> tuple[Fraction | None, int]:
    """(value, start) of the last number before `end`."""
    last_digit = max(text.rfind(digit, 0, end) for digit in "0123456789")
    if power := patterns.UNIT_POWER.search(text, max(0, last_digit - 40), last_digit + 1):
        end = power.end(1)
        last_digit = max(text.rfind(digit, 0, end) for digit in "0123456789")
    if last_digit < 0:
        return None, 0
    before = patterns.BEFORE_NUMBER_LIKE.match(text, 0, last_digit)
    # After its last digit, a number-like text has nothing but the end of an exponent, commas and full stops.
    *_, match = patterns.NUMBER_LIKE.finditer(text, before.end() if before else 0, min(end, last_digit + 16))
    start, body = match.start(), match["body"].rstrip(".,")
    after = match.start("body") + len(body)
    is_in_formula = patterns.INSIDE_FORMULA.search(text[max(0, start - _MAX_CONTEXT) : start])
    if is_in_formula or patterns.FORMULA_CONTINUES.match(text, after):
        return None, start
    value = _number(body)
    if value is None:
        return None, start
    decoration = patterns.BEFORE_SCALE.match(text, after)
    assert decoration is not None
    value *= leading_scale(text[decoration.end() : decoration.end() + _MAX_SCALE_LENGTH])[0]
    negative = any(sign and sign.strip() != "+" for sign in (match["sign"], match["second_sign"]))
    return -value if negative else value, start


def sole_number(text: str) -> Fraction | None:
    """The number in `text`, as `last_number` reads it, if it is the only one: `71 or 72` and `6 * 12` give None."""
    return last_number(text) if len(patterns.NUMBER_LIKE.findall(_with_plain_separators(text))) == 1 else None


def whole_text_number(text: str) -> Fraction | None:
    r"""The number that a whole text, such as that of a box, stands for: `72`, `72 apples`, `x = 72`, `\frac{3}{4}`.

    None for everything that has to be computed, `6 * 12` and `\frac{24}{8}`, for several numbers, and for a sentence.
    """
    answer = read_answer(text)
    plain = patterns.FRACTION_OF_DIGITS.sub(lambda m: f"{'' if m['whole'] is None else ' '}{m[2]}/{m[3]}", text)
    return answer.rational if answer is not None and answer.rational == last_number(plain) else None


def gold_number(gold: Any) -> Fraction | None:
    """A gold answer as an exact number, or None where it is not one.

    Numbers are taken as written (0.1 is 1/10). Of a text with GSM8K's `####` only the part after it counts, and it must
    be the number and nothing else but a currency or percent sign and a full stop.
    """
    gold = to_scalar(gold)
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
    written = _with_plain_separators(written).strip("$ ")
    match = patterns.NUMBER_LIKE.fullmatch(written.removesuffix(".").removesuffix("%").removesuffix("\\"))
    return None if match is None else last_number(match.group())


def float_tolerance(gold: Any) -> float:
    """Relative error of a gold answer that is a float: a few units in its last place; 0 for everything else.

    No float is 1/3, and 0.1 + 0.2 is not the float nearest to 0.3.
    """
    gold = to_scalar(gold)
    if isinstance(gold, Rational) or not isinstance(gold, Real):
        return 0.0
    return {4: 2.0**-21, 2: 2.0**-8}.get(getattr(getattr(gold, "dtype", None), "itemsize", 8), 2.0**-50)


def to_scalar(value: Any) -> Any:
    """An array of numpy or torch without dimensions as a number at its own precision; anything else as it is."""
    if getattr(value, "shape", None) != () or isinstance(value, Real):
        return value
    try:
        return (value.numpy() if hasattr(value, "numpy") else value)[()]
    except (TypeError, RuntimeError):  # torch: a dtype that numpy does not have, a tensor on another device
        return value.item()


def _with_plain_separators(text: str) -> str:
    """`text` with plain characters, and a comma for every other thousands separator."""
    text = normalize_unicode(text)
    has_marks = any(mark in text for mark in patterns.IN_THOUSANDS_MARK)
    return patterns.THOUSANDS_MARK.sub(",", text) if has_marks else text


def _number(body: str) -> Fraction | None:
    if len(body) > MAX_DIGITS:
        return None
    if ratio := patterns.RATIO.fullmatch(body):
        whole, top, bottom = (int(ratio[name] or 0) for name in ("whole", "top", "bottom"))
        unfinished = bottom == 0 or top % bottom == 0
        return None if unfinished or (whole and top > bottom) else whole + Fraction(top, bottom)
    if patterns.GROUPED.fullmatch(body):
        return Fraction(body.replace(",", ""))
    return Fraction(body) if patterns.DECIMAL.fullmatch(body) else None


def quote_value(value: Any, length: int = 80) -> str:
    """The beginning of a value of a dataset or a program, for messages."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:  # too long for Python to print
        return "an integer of more than 1,000 digits"
    try:
        return repr(value)[:length]
    except (ValueError, RecursionError):  # such an integer inside of it; nesting
        return f"a {type(value).__name__} that is too large to be shown"
