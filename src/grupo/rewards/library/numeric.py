r"""Rewards for numbers that may be near the gold number: presence, match, proximity, and bands of relative error.

The answer of a completion (`answer_number`) is, with a `tag`, the only number in its last block of that tag, so that
neither `71 or 72` nor a number after the block counts; without one, its last box, if that holds a number and nothing
to be computed, else its last number. Signs (also Unicode minus), thousands separators, fractions, a currency or percent
sign and a unit are read as in `answers/extraction.py`, and every comparison is exact.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers.extraction import (
    NUMBER_REQUIREMENT,
    completion_texts,
    extract_boxed,
    gold_number,
    last_number,
    sole_number,
    whole_text_number,
)
from grupo.rewards.library.format import Tag, block_content, tag_delimiters
from grupo.rewards.value_range import checked_range
from grupo.rewards.verifiers.base import GradedAnswerReward
from grupo.utils.messages import did_you_mean

Distance = Callable[[Fraction, Fraction], float | Fraction]
"""(answer, gold) -> their distance: 0 for equal numbers, never negative."""


def relative_distance(answer: Fraction, gold: Fraction) -> Fraction:
    """|answer - gold| / max(|gold|, 1): the 1 keeps it finite and gentle around zero."""
    return abs(answer - gold) / max(abs(gold), Fraction(1))


def absolute_distance(answer: Fraction, gold: Fraction) -> Fraction:
    """|answer - gold|"""
    return abs(answer - gold)


DISTANCES: Mapping[str, Distance] = MappingProxyType({"relative": relative_distance, "absolute": absolute_distance})


def answer_number(text: str, tag: Tag | None = None) -> Fraction | None:
    """The answer of a completion as a number (see the module docstring), or None."""
    if tag is not None:
        block = block_content(text, tag)
        if block is None:
            return None
        text = block
    if "\\boxed" in text or "\\fbox" in text:
        return whole_text_number(extract_boxed(text) or "")
    return last_number(text) if tag is None else sole_number(text)


class NumberPresent:
    """See `number_present`."""

    def __init__(self, present: float, missing: float, tag: Tag | None) -> None:
        self.__name__ = "number_present"
        self.value_range = checked_range(self.__name__, present=present, missing=missing)
        self.present, self.missing, self.tag = float(present), float(missing), _checked(tag)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        numbers = [answer_number(text, self.tag) for text in completion_texts(completions)]
        return [self.missing if number is None else self.present for number in numbers]


class NumberReward(GradedAnswerReward):
    """A reward that compares the answer of a completion with the gold number."""

    answer_requirement = NUMBER_REQUIREMENT

    def __init__(self, name: str, gold_column: str, tag: Tag | None) -> None:
        super().__init__(name, gold_column)
        self.tag = _checked(tag)

    def can_read(self, gold: Any) -> bool:
        return gold_number(gold) is not None

    def score(self, text: str, gold: Any) -> float | None:
        expected = gold_number(gold)
        return None if expected is None else self.score_number(text, expected)

    @abstractmethod
    def score_number(self, text: str, gold: Fraction) -> float:
        """The score of one completion text."""


class NumberScore(NumberReward):
    """See `number_score`."""

    def __init__(
        self, right: float, wrong: float, missing: float, tag: Tag | None, gold_column: str, name: str = "number_score"
    ) -> None:
        super().__init__(name, gold_column, tag)
        self.value_range = checked_range(name, right=right, wrong=wrong, missing=missing)
        self.right, self.wrong, self.missing = float(right), float(wrong), float(missing)

    def score_number(self, text: str, gold: Fraction) -> float:
        number = answer_number(text, self.tag)
        return self.missing if number is None else self.right if number == gold else self.wrong


class Proximity(NumberReward):
    """See `proximity`."""

    def __init__(
        self,
        gold_column: str,
        best: float,
        worst: float,
        missing: float,
        halfway: float,
        distance: str | Distance,
        tag: Tag | None,
    ) -> None:
        super().__init__("proximity", gold_column, tag)
        self.value_range = checked_range("proximity", best=best, worst=worst, missing=missing)
        if not missing <= worst < best or not (math.isfinite(halfway) and halfway > 0):
            raise ConfigError(
                f"proximity(best={best}, worst={worst}, missing={missing}, halfway={halfway}) does not reward "
                "being near: set missing <= worst < best, and halfway, the distance that costs half of it, above 0."
            )
        if isinstance(distance, str) and distance not in DISTANCES:
            raise ConfigError(
                f"proximity has no distance '{distance}'.{did_you_mean(distance, DISTANCES)} "
                f"Give {' or '.join(DISTANCES)}, or a function of (answer, gold)."
            )
        self.best, self.worst, self.missing = float(best), float(worst), float(missing)
        self.halfway = Fraction(str(halfway))
        self.distance = DISTANCES[distance] if isinstance(distance, str) else distance

    def score_number(self, text: str, gold: Fraction) -> float:
        number = answer_number(text, self.tag)
        if number is None:
            return self.missing
        far = self.distance(number, gold)
        if not far >= 0:
            raise RewardError(
                f"The distance function of proximity returned {far!r} for {number!s:.30} and {gold!s:.30}; it must "
                "return 0 for equal numbers and a positive number for others."
            )
        lost = 1.0 if far == math.inf else float(far / (far + self.halfway))
        return self.best - (self.best - self.worst) * lost


class BandedAnswer(NumberReward):
    """See `banded_answer`."""

    def __init__(
        self,
        exact: float,
        bands: Sequence[tuple[float, float]],
        far: float,
        unreadable: float,
        missing: float,
        tag: Tag,
        gold_column: str,
    ) -> None:
        super().__init__("banded_answer", gold_column, tag)
        in_bands = {f"band_{width}": score for width, score in bands}
        self.value_range = checked_range(
            "banded_answer", exact=exact, far=far, unreadable=unreadable, missing=missing, **in_bands
        )
        if not all(0 < width < math.inf for width, _ in bands):
            raise ConfigError(
                f"banded_answer(bands={bands!r}) has a band without a width: give pairs (relative error, score), as in "
                "[(0.1, 2.0), (0.2, 1.5)]."
            )
        self.exact, self.far = float(exact), float(far)
        self.unreadable, self.missing = float(unreadable), float(missing)
        # As written: with the float 0.3, an answer that is exactly 30 % off would be outside its band.
        self.bands = sorted((Fraction(str(width)), float(score)) for width, score in bands)

    def score_number(self, text: str, gold: Fraction) -> float:
        assert self.tag is not None
        if block_content(text, self.tag) is None:
            return self.missing
        number = answer_number(text, self.tag)
        if number is None:
            return self.unreadable
        if number == gold:
            return self.exact
        within = [score for width, score in self.bands if abs(number - gold) <= width * abs(gold)]
        return within[0] if within else self.far


def _checked(tag: Tag | None) -> Tag | None:
    if tag is not None:
        tag_delimiters((tag,))
    return tag


def number_present(present: float = 1.0, missing: float = -1.0, tag: Tag | None = None) -> NumberPresent:
    """`present` if the completion answers with a number, whichever it is, else `missing`.

    Together with `number_score`, for 2 + 2: `4` gets 1 + 3, `3` gets 1 - 3, and `cat` gets -1 - 3.
    """
    return NumberPresent(present, missing, tag)


def number_score(
    right: float = 3.0,
    wrong: float = -3.0,
    missing: float | None = None,
    tag: Tag | None = None,
    gold_column: str = "answer",
) -> NumberScore:
    """`right` if the answer is exactly the gold number, `wrong` if it is another number, `missing` if there is none.

    The number check of notebooks is `number_score(3.5, -1.5, -2.5, tag="SOLUTION")`. Unlike theirs, it reads commas,
    minus signs and decimals, ignores numbers after the closing tag, and treats an unreadable answer as missing instead
    of as 0.

    Args:
        missing: None for the value of `wrong`.
        tag: read the answer from the block of this tag only; it must be closed and hold one number.
    """
    return NumberScore(right, wrong, wrong if missing is None else missing, tag, gold_column)


def proximity(
    gold_column: str = "answer",
    best: float = 1.0,
    worst: float = -1.0,
    missing: float | None = None,
    halfway: float = 0.5,
    distance: str | Distance = "relative",
    tag: Tag | None = None,
) -> Proximity:
    """`best` for the gold number, decreasing with the distance towards `worst`, `missing` without a number.

    With distance d the reward is best - (best - worst) · d / (d + halfway): it falls steeply near the gold number and
    never below `worst`. If the gold number is 10, the answers 10, 9, 3 and 1000 get 1, 0.67, -0.17 and -0.99.

    It pays for wrong answers, which helps while right ones are rare. Add another reward for the right answer, or the
    model settles for near ones.

    Args:
        missing: None for the value of `worst`.
        halfway: distance that costs half of best - worst.
        distance: `relative` (|answer - gold| / max(|gold|, 1)), `absolute`, or a function of (answer, gold), both
            `Fraction`s, that returns 0 for equal numbers and more for others, `inf` included.
        tag: read the answer from the block of this tag only.

    Raises:
        RewardError: during a call, if `distance` returns a negative number or NaN.
    """
    return Proximity(gold_column, best, worst, worst if missing is None else missing, halfway, distance, tag)


def banded_answer(
    exact: float = 5.0,
    bands: Sequence[tuple[float, float]] = ((0.1, 2.0), (0.2, 1.5)),
    far: float = -2.5,
    unreadable: float = -4.5,
    missing: float = -2.0,
    tag: Tag = "SOLUTION",
    gold_column: str = "answer",
) -> BandedAnswer:
    """`exact` for the gold number, the score of the narrowest band of relative error that holds the answer, else `far`.

    The answer check of notebooks, by default with the scores of the one for Qwen3-4B. Those for smaller models use
    `exact=3.0, bands=[(0.1, 1.0), (0.2, 0.5)], far=-1.5, unreadable=-1.5, missing=0.0`. Differences from them:

    - Numbers are compared, not texts: `72.0`, ` 72 `, `$72` and `72 apples` are 72, `1,000` is 1000. In the notebooks
      `72.0` gets 2.0, `1,000` and `$72` get -4.5, and white space around the answer lowers the score.
    - A gold answer of 0 is matched however it is written. No other answer is near it: a relative error to 0 does not
      exist.
    - The block must be closed; an answer of two numbers, `71 or 72`, is unreadable.

    With these scores a completion without a block (`missing`) gets more than a wrong answer. Add a format reward that
    outweighs this, as the notebooks do.

    Args:
        bands: pairs (relative error, score); 0.1 is from 90 % to 110 % of the gold number, the ends included.
        unreadable: for a block that does not hold exactly one number.
        missing: for a completion without a closed block of this tag.
    """
    return BandedAnswer(exact, bands, far, unreadable, missing, tag, gold_column)
