"""Find the answer in a completion: its text, its last box, its last number. Used by rewards and by evaluation."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from grupo.errors import RewardError

MAX_DIGITS = 1000
"""A longer run of digits is no answer; Python itself refuses to convert more than 4,300."""

_MINUS = "\\-\u2212\u2013\uff0d\ufe63"
_SIGN = f"[+{_MINUS}]"
# A sign counts only where no operand stands before it: "7-5" ends in 5, "= -5" in -5.
_NUMBER_LIKE = re.compile(
    rf"(?P<sign>(?<![\w)\]}}]){_SIGN})?(?:\\?[$€£¥])?(?P<second_sign>(?<=[$€£¥]){_SIGN})?"
    r"(?P<body>(?:[0-9]+\ )?[0-9][0-9.,]*\ ?/\ ?[0-9][0-9.,]*(?:/[0-9.,]+)*"
    r"|(?:[0-9]|(?<![.\w])\.(?=[0-9]))[0-9.,]*(?:[eE][+-]?[0-9]{1,3}(?![\w.]))?)"
)
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_PLAIN = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_RATIO = re.compile(r"(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+) ?/ ?(?P<bottom>[0-9]+)")
_INSIDE_FORMULA = re.compile(
    r"(?:\^|√|\\sqrt(?:\[[^\]]*\])?|\\[dt]?frac(?:\{(?:[^{}]|\{[^{}]*\})*\}|\s*[0-9])?)\s*\{?\s*$"
)
_FORMULA_GOES_ON = re.compile(r"[,.]?\s?(?:\\?\^(?!\\circ|\{\\circ)|\\pi\b|π|√|\\sqrt|\\[dt]?frac|[²³⁴⁵⁶⁷⁸⁹])")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


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
        if content is None or isinstance(content, str):
            return content
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            return "".join(part for part in parts if isinstance(part, str))
    raise RewardError(
        f"a completion is a string or a list of messages with a 'content'; this one is a {type(completion).__name__}: "
        f"{completion!r:.80}"
    )


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, by a scan for the matching brace.

    The last box decides: None if there is none, if it is not closed, or if it has no braces (`\boxed 5` boxes one digit
    in LaTeX, and is rarely meant so). Escaped braces are content: `\boxed{\{2,5\}}` holds `\{2,5\}`.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    position = boxes[-1].end()
    while position < len(text) and text[position].isspace():
        position += 1
    if position == len(text) or text[position] != "{":
        return None
    start, depth = position + 1, 0
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
        position += 1
    return None


def last_number(text: str) -> Fraction | None:
    r"""The last number in `text`, exactly, or None.

    Whatever looks like a number last decides; if it is not one, the answer is None and never an earlier number.

    - Commas are thousands separators only between true groups of three: `1,250` is 1250; `3,7`, `0,900` and `12,34,567`
      are no numbers. LaTeX's `2{,}000` is 2000.
    - A currency sign before it, a percent sign or unit behind it and one full stop are ignored: `$3,450.00.` is 3450,
      `50%` is 50. A minus (ASCII, Unicode minus, en dash) counts where no operand stands directly before it.
    - `1.5e3` is 1500. `3/4` and `1 3/4` are fractions. `12/4` is a division that was not carried out, and no number.
    - A number inside or directly before a power, root, fraction macro or π is part of a formula, and no number.
    """
    text = text.replace("{,}", ",").replace(",\\!", ",")
    matches = list(_NUMBER_LIKE.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    if _INSIDE_FORMULA.search(text[max(0, match.start() - 80) : match.start()]):
        return None
    body = match["body"].rstrip(".,")
    if _FORMULA_GOES_ON.match(text, match.start("body") + len(body)):
        return None
    value = _number(body)
    negative = any(sign and sign != "+" for sign in (match["sign"], match["second_sign"]))
    return -value if value is not None and negative else value


def only_number(text: str) -> Fraction | None:
    """The number in `text`, as `last_number` reads it, where there is no second one: `71 or 72`, `6 * 12` give None."""
    return last_number(text) if len(_NUMBER_LIKE.findall(text.replace("{,}", ",").replace(",\\!", ","))) == 1 else None


def extract_answer(text: str) -> str | None:
    """What a completion answers: the content of its last box if it has any box, else its last number, else None."""
    if _BOX.search(text):
        return extract_boxed(text)
    number = last_number(text)
    return None if number is None else str(number)


def gold_number(gold: Any) -> Fraction | None:
    """A gold answer as an exact number, or None where it is not one.

    Numbers are taken as written (0.1 is 1/10); of a text with GSM8K's `####` only what follows it counts, and the text
    must be the number and nothing else but a currency or percent sign and a full stop.
    """
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
    written = written.replace("{,}", ",").replace(",\\!", ",").strip("$ ")
    match = _NUMBER_LIKE.fullmatch(written.removesuffix(".").removesuffix("%").removesuffix("\\"))
    return None if match is None else last_number(match.group())


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
