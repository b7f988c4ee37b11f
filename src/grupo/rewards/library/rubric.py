"""A rubric: one reward made of small checks with points, each of which is a metric of its own.

A check tests one thing that can be seen in the text. Many of them give a signal where one verdict on the whole would be
0 for almost every completion, and the metrics show which ones are still missed.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers.extraction import completion_texts
from grupo.rewards.value_range import score_range
from grupo.rewards.verifiers.base import keyword_signature
from grupo.utils.messages import did_you_mean

Row = Mapping[str, Any]
"""Dataset columns of one completion."""
Test = Callable[[str, Row], "bool | float | None"]
"""(text of the completion, row) -> whether, or to which share from 0 to 1, it passes; None where it does not apply."""


@dataclass(frozen=True)
class Check:
    """One item of a rubric."""

    name: str
    """Of its metric, `<rubric>/<name>`."""
    points: float
    """For passing; negative for what should not be. 0 only logs."""
    test: Test
    columns: tuple[str, ...] = ()
    """Dataset columns that the test reads."""


class Rubric:
    """See `rubric`."""

    def __init__(self, checks: Sequence[Check | Mapping[str, Any]], name: str) -> None:
        self.__name__ = name
        self.checks = tuple(check if isinstance(check, Check) else _described(check) for check in checks)
        names = [check.name for check in self.checks]
        if not names or len(set(names)) < len(names) or not all(names):
            raise ConfigError(
                f"Rubric '{name}' has checks named {names}: give at least one, each with a name of its own."
            )
        for check in self.checks:
            score_range(f"Check '{check.name}' of '{name}' ", points=check.points)
        self.value_range = (
            sum(min(check.points, 0.0) for check in self.checks),
            sum(max(check.points, 0.0) for check in self.checks),
        )
        columns = dict.fromkeys(column for check in self.checks for column in check.columns)
        self.columns = tuple(columns)
        self.__signature__ = keyword_signature("completions", *self.columns)

    def __call__(
        self,
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """The points of each completion; the share that passes each check goes to `log_metric`."""
        totals = [0.0] * len(completions)
        passed: dict[str, list[float]] = {check.name: [] for check in self.checks}
        for index, text in enumerate(completion_texts(completions)):
            row = {column: columns[column][index] for column in self.columns}
            for check in self.checks:
                share = _share(check, text, row)
                if share is None:
                    continue
                passed[check.name].append(share)
                if text.strip() or check.points < 0:
                    totals[index] += check.points * share
        if log_metric is not None:
            for name, shares in passed.items():
                if shares:
                    log_metric(f"{self.__name__}/{name}", sum(shares) / len(shares))
        return totals


def _share(check: Check, text: str, row: Row) -> float | None:
    result = check.test(text, row)
    if result is None:
        return None
    share = float(result)
    if not 0.0 <= share <= 1.0:
        raise RewardError(
            f"Check '{check.name}' returned {result!r}: it must return True, False, a share from 0 to 1, or None where "
            "it does not apply. What it is worth is said by its points."
        )
    return share


# Tests ---------------------------------------------------------------------------------------------------------------


def contains(words: str | Sequence[str]) -> Test:
    """All of these words or phrases stand in the text, as whole words in any case: `art` is not in `party`."""
    wanted = [words] if isinstance(words, str) else words
    if (
        not isinstance(wanted, Sequence)
        or not wanted
        or not all(isinstance(one, str) and one.strip() for one in wanted)
    ):
        raise ConfigError(f"contains={words!r:.80} asks for nothing: give a word or phrase, or a list of them.")
    return functools.partial(_contains, words=words)


def contains_column(column: str) -> Test:
    """As `contains`, with the word, or the list of words, of a dataset column; an empty one does not apply."""
    return functools.partial(_contains_column, column=column)


def equals_column(column: str) -> Test:
    """The text is that of a dataset column, except for white space; an empty one does not apply."""
    return functools.partial(_equals_column, column=column)


def pattern(expression: str) -> Test:
    """A regular expression is found in the text; `^` and `$` are at every line."""
    try:
        compiled = re.compile(expression, re.MULTILINE)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"pattern={expression!r} is no regular expression: {error}.") from error
    return functools.partial(_matches, compiled=compiled)


def longer_than(words: int) -> Test:
    """The text has more words than this, counted between white space."""
    if isinstance(words, bool) or not isinstance(words, int) or words < 0:
        raise ConfigError(f"longer_than={words!r} is no limit: give a number of words from 0 on.")
    return functools.partial(_longer_than, words=words)


def has_signature(address: str | None = None, lines: int = 8) -> Test:
    """The last `lines` lines that are not empty hold a phone number, an e-mail address and a postal address.

    A phone number has 7 to 15 digits, and starts with `+`, `(` or `0` or is written in groups; dates are none. A postal
    address is a house number and a street, `12 Elm Street` or `Ulmenweg 12`, or a post-office box. Other ways to write
    one need `address`, a regular expression.
    """
    found = pattern(_ADDRESS if address is None else address)
    return functools.partial(_has_signature, address=found, lines=lines)


KINDS: Mapping[str, Callable[[Any], Test]] = MappingProxyType(
    {
        "contains": contains,
        "contains_column": contains_column,
        "equals_column": equals_column,
        "pattern": pattern,
        "longer_than": longer_than,
    }
)
"""Tests that a recipe can name."""

_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}")
_PHONE = re.compile(r"(?<![\w@.+/-])(?:\+|\(|0)?[0-9](?:[ ()/.\u2011-]{0,3}[0-9]){6,14}(?![\w@])")
_DATE = re.compile(r"[0-9]{4}([-/.])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/.])[0-9]{1,2}\2[0-9]{2,4}")
_STREETS = (
    "Street|St|Road|Rd|Avenue|Ave|Lane|Ln|Drive|Dr|Court|Ct|Way|Square|Sq|Boulevard|Blvd|Place|Pl|Terrace|Parkway"
)
_STRASSEN = "[Ss]traße|[Ss]trasse|[Ss]tr\\.|[Ww]eg|[Pp]latz|[Aa]llee|[Gg]asse|[Uu]fer"
_ADDRESS = (
    rf"(?<!\w)[0-9]{{1,5}}[a-zA-Z]?,? (?:[A-Z0-9][\w.'-]{{0,29}} ){{1,4}}(?:{_STREETS})(?!\w)"
    rf"|[A-ZÄÖÜ][\w.-]{{1,40}}? ?(?:{_STRASSEN}) ?[0-9]{{1,4}}(?![0-9])"
    r"|(?<!\w)(?:P\.? ?O\.? Box|Postfach) ?[0-9]"
)


def _contains(text: str, row: Row, words: str | Sequence[str]) -> bool:
    wanted = [words] if isinstance(words, str) else words
    return all(_words_pattern(str(word)).search(_plain(text)) for word in wanted)


@functools.lru_cache(maxsize=4096)
def _words_pattern(words: str) -> re.Pattern[str]:
    parts = [re.escape(part) for part in _plain(words).split()]
    return re.compile(r"(?<!\w)" + r"\s+".join(parts) + r"(?!\w)")


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _contains_column(text: str, row: Row, column: str) -> bool | None:
    value = row[column]
    words = [str(word) for word in (value if isinstance(value, (list, tuple)) else [value]) if word is not None]
    words = [word for word in words if word.strip()]
    return _contains(text, row, words) if words else None


def _equals_column(text: str, row: Row, column: str) -> bool | None:
    ideal = "" if row[column] is None else unicodedata.normalize("NFC", str(row[column])).split()
    return unicodedata.normalize("NFC", text).split() == ideal if ideal else None


def _matches(text: str, row: Row, compiled: re.Pattern[str]) -> bool:
    return compiled.search(text) is not None


def _longer_than(text: str, row: Row, words: int) -> bool:
    return len(text.split()) > words


def _has_signature(text: str, row: Row, address: Test, lines: int) -> bool:
    last = [line[:400] for line in text.splitlines() if line.strip()][-lines:]
    block = "\n".join(last)
    return bool(_MAIL.search(block)) and any(map(_has_phone, last)) and bool(address(block, row))


def _has_phone(line: str) -> bool:
    for match in _PHONE.finditer(line):
        number = match[0]
        # A bare run of digits may be an order number.
        dialled = number[0] in "+(0" or re.search(r"[0-9][^0-9]+[0-9]", number)
        if dialled and not _DATE.fullmatch(number):
            return True
    return False


# Rubrics -------------------------------------------------------------------------------------------------------------


def _described(check: Mapping[str, Any]) -> Check:
    """A check as recipes write it: `{name: polite, points: 1, contains: thank you}`."""
    kinds = [key for key in check if key not in ("name", "points")] if isinstance(check, Mapping) else []
    if len(kinds) != 1 or "name" not in check or "points" not in check:
        raise ConfigError(
            f"A check of a rubric has a name, points, and one test of {', '.join(KINDS)}; this one is {check!r:.200}."
        )
    (kind,) = kinds
    if kind not in KINDS:
        raise ConfigError(
            f"A rubric knows no test '{kind}'.{did_you_mean(kind, KINDS)} Known tests: {', '.join(KINDS)}."
        )
    columns = (check[kind],) if kind.endswith("_column") else ()
    return Check(str(check["name"]), check["points"], KINDS[kind](check[kind]), columns)


def rubric(checks: Sequence[Check | Mapping[str, Any]], name: str = "rubric") -> Rubric:
    """The sum of the points of the checks that a completion passes, each logged as a metric `<name>/<check>`.

    An empty completion gets no points above 0, whatever its checks say.

    Args:
        checks: `Check`s, or as in recipes `{"name": ..., "points": ..., test: value}` with one test:
            `contains` (a word or phrase, or a list of which all must be there), `contains_column` (the same from a
            dataset column), `equals_column` (the column's text, except for white space), `pattern` (a regular
            expression), `longer_than` (a number of words). Points may be negative.
        name: of the reward, and of its metrics.

    Raises:
        ConfigError: no check, two of one name, points that are no number, or an unknown test.
        RewardError: in a call, where a test returns something else than a share from 0 to 1, True, False or None.
    """
    return Rubric(checks, name)


def email_rubric(
    max_words: int = 200,
    keyword: float = 1.0,
    ideal: float = 1.0,
    too_long: float = -1.0,
    recipient: float = 1.0,
    signature: float = 1.0,
    keyword_column: str = "keyword",
    ideal_column: str = "ideal",
    recipient_column: str = "recipient",
    address: str | None = None,
) -> Rubric:
    """A reply to an e-mail: required keyword +1, exactly the ideal answer +1, longer than `max_words` -1, the name of
    the recipient +1, a signature block with phone, e-mail and postal address +1; from -1 to 4.

    Keyword and name are whole words in any case, and pay once however often they come. The signature must be in the
    last 8 lines (`has_signature`); numbers and addresses in the body do not count. Where the column is empty, the check
    does not apply.

    Args:
        keyword, ideal, too_long, recipient, signature: points.
        keyword_column: dataset column with a word, or a list of words of which all must be there.
        address: a regular expression for postal addresses that are not written as in English or German.
    """
    checks = (
        Check("keyword", keyword, contains_column(keyword_column), (keyword_column,)),
        Check("ideal", ideal, equals_column(ideal_column), (ideal_column,)),
        Check("too_long", too_long, longer_than(max_words)),
        Check("recipient", recipient, contains_column(recipient_column), (recipient_column,)),
        Check("signature", signature, has_signature(address)),
    )
    return Rubric(checks, "email_rubric")
