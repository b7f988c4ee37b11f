"""Rewards on completion tokens, known values and parity with TRL."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grupo.rewards as ours
from grupo.errors import ConfigError, RewardError

IDS = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=5)
trl = pytest.importorskip("trl.rewards")


def test_token_length_counts_every_sampled_token() -> None:
    assert ours.token_length(3)(completion_ids=[[], [1], [1, 2, 9], [1] * 5]) == [-3.0, -2.0, 0.0, -2.0]
    assert ours.token_length(3, scale=0.5)(completion_ids=[[1]]) == [-1.0]


def test_soft_overlong_punishment_is_equation_13() -> None:
    punish = ours.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    lengths = [0, 80, 81, 90, 100, 101]
    assert punish(completion_ids=[[1] * n for n in lengths]) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]


@settings(deadline=None)
@given(IDS, st.integers(1, 30), st.integers(0, 30))
def test_soft_overlong_punishment_equals_trl(ids: list[list[int]], longest: int, cache: int) -> None:
    cache = min(cache, longest)
    mine = ours.get_soft_overlong_punishment(longest, cache)
    theirs = trl.get_soft_overlong_punishment(longest, cache)
    assert mine(ids) == theirs(ids)  # by position, as in TRL's examples
    assert mine.__name__ == theirs.__name__


@settings(deadline=None)
@given(IDS, st.integers(1, 5), st.floats(-2, 0))
def test_repetition_penalty_equals_trl(ids: list[list[int]], size: int, penalty: float) -> None:
    mine, theirs = ours.get_repetition_penalty_reward(size, penalty), trl.get_repetition_penalty_reward(size, penalty)
    assert mine(ids) == pytest.approx(theirs(ids), abs=1e-12)
    assert mine.__name__ == theirs.__name__


def test_cosine_scaling_equals_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    # TRL's own accuracy needs math-verify; what is compared is the shaping.
    monkeypatch.setattr("trl.rewards.accuracy_rewards.accuracy_reward", ours.accuracy_reward)
    completions = [r"\boxed{5}", r"\boxed{6}", r"\boxed{5}"] * 5
    solutions = ["5"] * 15
    ids = [[1] * n for n in (0, 0, 1, 10, 10, 25, 49, 50, 51, 99, 100, 100, 101, 250, 250)]
    for arguments in ({}, {"min_value_wrong": -3.0, "max_value_wrong": 0.0, "max_value_correct": 2.0}):
        mine = ours.get_cosine_scaled_reward(100, **arguments)
        theirs = trl.get_cosine_scaled_reward(100, **arguments)
        expected = theirs(completions, solutions, ids)
        assert mine(completions, solutions, ids) == pytest.approx(expected, abs=1e-12)
        assert mine(completions, solution=solutions, completion_ids=ids) == pytest.approx(expected, abs=1e-12)
        assert mine.__name__ == theirs.__name__


def test_cosine_scaling_abstains_where_the_gold_is_unusable() -> None:
    reward = ours.get_cosine_scaled_reward(10)
    with pytest.warns(UserWarning, match="cosine_scaled_reward cannot read"):
        assert reward(["5"], solution=[None], completion_ids=[[1]]) == [None]
    runner = ours.RewardRunner(reward)
    with pytest.raises(RewardError, match="'cosine_scaled_reward' requires 'solution'"):
        runner.check_columns(["answer"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: ours.token_length(-1),
        lambda: ours.token_length(5, scale=0.0),
        lambda: ours.get_soft_overlong_punishment(0, 0),
        lambda: ours.get_soft_overlong_punishment(10, 11),
        lambda: ours.get_cosine_scaled_reward(0),
        lambda: ours.get_repetition_penalty_reward(0),
        lambda: ours.get_repetition_penalty_reward(3, 0.5),
    ],
)
def test_settings_without_a_meaning_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_they_pickle() -> None:
    for reward in (
        ours.token_length(5),
        ours.get_soft_overlong_punishment(5, 1),
        ours.get_repetition_penalty_reward(),
    ):
        assert pickle.loads(pickle.dumps(reward))(completion_ids=[[1] * 5]) == reward(completion_ids=[[1] * 5])
