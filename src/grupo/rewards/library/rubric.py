"""A rubric: one reward made of small checks with points, each of which is a metric of its own.

A check tests one visible property of the text. Many checks give a signal where a single verdict on the whole text would
be 0 for almost every completion, and their metrics show which ones still fail.
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
from grupo.rewards.value_range import checked_range
from grupo.rewards.verifiers.base import keyword_signature
from grupo.utils.messages import did_you_mean

Row = Mapping[str, Any]
"""Dataset columns of one completion."""
Test = Callable[[str, Row], "bool | float | None"]
"""(completion text, row) -> passed or not, or a share from 0 to 1; None if the check does not apply."""


@dataclass(frozen=True)
class Check:
    """One item of a rubric."""

    name: str
    """Last part of the metric name `<rubric>/<name>`."""
    points: float
    """Points for passing; negative for an unwanted property, 0 to log the metric only."""
    test: Test
    columns: tuple[str, ...] = ()
    """Dataset columns read by the test."""


class Rubric:
    """See `rubric`."""

    def __init__(self, checks: Sequence[Check | Mapping[str, Any]], name: str) -> None:
        self.__name__ = name
        self.checks = tuple(check if isinstance(check, Check) else _parse_check(check) for check in checks)
        names = [check.name for check in self.checks]
        if not names or len(set(names)) < len(names) or not all(names):
            raise ConfigError(f"Rubric '{name}' has checks named {names}: give at least one, each with a unique name.")
        for check in self.checks:
            checked_range(f"Check '{check.name}' of '{name}' ", points=check.points)
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
        """The points of each completion; `log_metric` gets the mean share that passes each check."""
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
            f"Check '{check.name}' returned {result!r}: it must return True, False, a share from 0 to 1, or None if "
            "it does not apply. Its weight is set by its points."
        )
    return share


# Tests ---------------------------------------------------------------------------------------------------------------


def contains(words: str | Sequence[str]) -> Test:
    """All of these words or phrases occur in the text, as whole words in any case: `art` is not in `party`."""
    wanted = [words] if isinstance(words, str) else words
    if (
        not isinstance(wanted, Sequence)
        or not wanted
        or not all(isinstance(one, str) and one.strip() for one in wanted)
    ):
        raise ConfigError(f"contains={words!r:.80} requires nothing: give a word or phrase, or a list of them.")
    return functools.partial(_contains, words=words)


def contains_column(column: str) -> Test:
    """`contains` with the word or list of words in a dataset column; an empty cell does not apply."""
    return functools.partial(_contains_column, column=column)


def equals_column(column: str) -> Test:
    """The text equals the cell of a dataset column, except for white space; an empty cell does not apply."""
    return functools.partial(_equals_column, column=column)


def pattern(expression: str) -> Test:
    """A regular expression matches somewhere in the text; `^` and `$` match at every line."""
    try:
        compiled = re.compile(expression, re.MULTILINE)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"pattern={expression!r} is not a regular expression: {error}.") from error
    return functools.partial(_matches, compiled=compiled)


def longer_than(words: int) -> Test:
    """The text has more words than this, separated by white space."""
    if isinstance(words, bool) or not isinstance(words, int) or words < 0:
        raise ConfigError(f"longer_than={words!r} is not a limit: give a number of words, 0 or more.")
    return functools.partial(_longer_than, words=words)


KINDS: Mapping[str, Callable[[Any], Test]] = MappingProxyType(
    {
        "contains": contains,
        "contains_column": contains_column,
        "equals_column": equals_column,
        "pattern": pattern,
        "longer_than": longer_than,
    }
)
"""Tests by their names in recipes."""


def _contains(text: str, row: Row, words: str | Sequence[str]) -> bool:
    wanted = [words] if isinstance(words, str) else words
    return all(_words_pattern(str(word)).search(_normalized(text)) for word in wanted)


@functools.lru_cache(maxsize=4096)
def _words_pattern(words: str) -> re.Pattern[str]:
    parts = [re.escape(part) for part in _normalized(words).split()]
    return re.compile(r"(?<!\w)" + r"\s+".join(parts) + r"(?!\w)")


def _normalized(text: str) -> str:
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


# Rubrics -------------------------------------------------------------------------------------------------------------


def _parse_check(check: Mapping[str, Any]) -> Check:
    """A check written as in recipes: `{name: polite, points: 1, contains: thank you}`."""
    kinds = [key for key in check if key not in ("name", "points")] if isinstance(check, Mapping) else []
    if len(kinds) != 1 or "name" not in check or "points" not in check:
        raise ConfigError(
            f"A check of a rubric has a name, points, and one test of {', '.join(KINDS)}; this one is {check!r:.200}."
        )
    (kind,) = kinds
    if kind not in KINDS:
        raise ConfigError(f"A rubric has no test '{kind}'.{did_you_mean(kind, KINDS)} Known tests: {', '.join(KINDS)}.")
    columns = (check[kind],) if kind.endswith("_column") else ()
    return Check(str(check["name"]), check["points"], KINDS[kind](check[kind]), columns)


def rubric(checks: Sequence[Check | Mapping[str, Any]], name: str = "rubric") -> Rubric:
    """The sum of the points of the checks that a completion passes, each logged as a metric `<name>/<check>`.

    An empty completion gets no positive points, whatever its checks return.

    Args:
        checks: `Check`s, or as in recipes `{"name": ..., "points": ..., test: value}` with one test:
            `contains` (a word or phrase, or a list of them, all required), `contains_column` (the same from a
            dataset column), `equals_column` (the column's text, except for white space), `pattern` (a regular
            expression), `longer_than` (a number of words). Points may be negative.
        name: name of the reward, and first part of its metrics' names.

    Raises:
        ConfigError: no check, two of the same name, points that are not a number, or an unknown test.
        RewardError: during a call, if a test returns something else than a share from 0 to 1, True, False or None.
    """
    return Rubric(checks, name)
