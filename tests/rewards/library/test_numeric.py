"""Rewards for numbers: presence, match, and closeness."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import ConfigError, RewardError
from grupo.rewards import number_present, number_score, proximity
from grupo.rewards.library.numeric import answer_number

NUMBERS = st.fractions(min_value=-1000, max_value=1000, max_denominator=20)


def near(answer: Any, gold: Any, **arguments: Any) -> float:
    (result,) = proximity(**arguments)([str(answer)], answer=[gold])
    assert result is not None
    return result


def test_the_arithmetic_example() -> None:
    """+1 for a number and -1 for none, +3 for the right one and -3 for another; the total is their sum."""
    rewards = [number_present(), number_score()]
    totals = {
        text: sum(reward(completions=[text], answer=["4"])[0] or 0.0 for reward in rewards)
        for text in ("4", "3", "cat", "", "The answer is 4.", "-4", "4.0", "3 or 4, say 3")
    }
    assert totals == {
        "4": 4.0, "3": -2.0, "cat": -4.0, "": -4.0, "The answer is 4.": 4.0, "-4": -2.0,
        "4.0": 4.0, "3 or 4, say 3": -2.0,
    }  # fmt: skip


def test_the_answer_of_a_completion() -> None:
    for text, tag, number in [
        ("8 * 9 = 72", None, 72),
        (r"\boxed{72}, in 3 steps", None, 72),
        (r"\boxed{\frac{1}{2}}", None, Fraction(1, 2)),
        (r"\boxed{x}, or 72", None, None),
        (r"\boxed{", None, None),
        (r"\boxed{8 * 9}", None, None),
        (r"<a>\boxed{8 * 9}</a>", "a", None),
        ("71 or 72", None, None),
        ("<a>7 million</a>", "a", 7 * 10**6),
        ("<a>72</a> in 3 steps", "a", 72),
        ("<a>72 apples</a>", "a", 72),
        ("<a>71 or 72</a>", "a", None),
        (r"<a>\boxed{72}</a>", "a", 72),
        ("72", "a", None),
        ("{72}", ("{", "}"), 72),
    ]:
        assert answer_number(text, tag) == number, text


def test_closer_is_better_and_outliers_are_punished() -> None:
    assert near(10, 10) == 1.0 > near(9, 10) > near(3, 10)
    assert near(9, 10) > 0.0 > near(3, 10) > near(100, 10) > near(10**6, 10) > -1.0
    assert [round(near(n, 10), 2) for n in (10, 9, 3, 1000)] == [1.0, 0.67, -0.17, -0.99]
    # For 2 + 2: a number beats a letter, 3 beats 8, and 4 is right.
    assert near(4, 4) > near(3, 4) > near(8, 4) > near("C", 4) == -1.0


def test_zero_minus_and_commas() -> None:
    assert near(0, 0) == near("0.0", 0) == near("-0", 0) == 1.0 > near(1, 0) > near(5, 0) > -1.0
    assert near(-9, -10) == near(9, 10) > near(9, -10)
    assert near("\u22129", "-10") == near(-9, -10)
    assert near("1,000", 1000) == near(1000, "1,000") == 1.0
    assert near("3,7", 37) == -1.0  # no number
    assert near("9" * 900, 1) == near(f"-{'9' * 900}", 1) == pytest.approx(-1.0)
    assert near("1e-999", "1e999") == pytest.approx(-1.0 / 3)


@settings(deadline=None)
@given(NUMBERS, NUMBERS, NUMBERS)
def test_it_falls_with_the_distance_alike_on_both_sides(gold: Fraction, one: Fraction, other: Fraction) -> None:
    assert near(gold + one, gold) == near(gold - one, gold) == near(-gold - one, -gold)
    if abs(one) < abs(other):
        assert near(gold + one, gold) > near(gold + other, gold)


def test_other_distances_scores_and_tags() -> None:
    assert near(1, 0) == pytest.approx(-1 / 3), "around 0 the relative distance is the absolute one"
    assert near(12, 10, distance="absolute", halfway=2) == 0.0
    assert near(12, 10, distance="absolute", halfway=2, best=3.0, worst=0.0) == 1.5
    assert near("none", 10, missing=-2.0) == -2.0
    assert near("<a>9</a> of 10", 10, tag="a") == near(9, 10)

    def on_the_clock(answer: Fraction, gold: Fraction) -> float:
        apart = abs(answer - gold) % 12
        return float(min(apart, 12 - apart))

    assert near(11, 1, distance=on_the_clock) == near(3, 1, distance=on_the_clock) > near(7, 1, distance=on_the_clock)
    assert near(1, 2, distance=lambda answer, gold: math.inf) == -1.0
    for broken in (-1.0, math.nan):
        with pytest.raises(RewardError, match=r"distance function of proximity returned .* for 1 and 2"):
            near(1, 2, distance=lambda answer, gold, broken=broken: broken)


def test_unreadable_golds_abstain() -> None:
    for reward in (proximity(), number_score()):
        with pytest.warns(UserWarning, match="cannot read 2 of 3 gold answers"):
            assert reward(["4", "4", "4"], answer=["four", None, 4])[:2] == [None, None]
        assert reward.can_read("#### 4") and not reward.can_read("about 4")


@pytest.mark.parametrize(
    "arguments",
    [{"worst": 1.0}, {"missing": 0.0}, {"halfway": 0}, {"halfway": math.inf}, {"distance": "relativ"}, {"tag": "<a>"}],
)
def test_settings_that_do_not_pay_for_being_near(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        proximity(**arguments)


def test_they_pickle() -> None:
    reward = pickle.loads(pickle.dumps(proximity()))
    assert reward(["9"], answer=[10]) == proximity()(["9"], answer=[10])
