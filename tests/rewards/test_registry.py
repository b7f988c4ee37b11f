"""Rewards by name."""

from __future__ import annotations

import pytest

from grupo.errors import ConfigError
from grupo.rewards import REWARDS, make_reward

ARGUMENTS = {
    "token_length": {"target": 3},
    "soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 2},
    "cosine_scaled": {"max_len": 10, "gold_column": "answer"},
    "rubric": {"checks": [{"name": "thanks", "points": 1.0, "contains": "thanks"}]},
    "email_rubric": {"keyword_column": "answer", "ideal_column": "answer", "recipient_column": "answer"},
}
ASKS_A_MODEL = {"llm_judge", "reward_model"}


@pytest.mark.parametrize("name", sorted(set(REWARDS) - ASKS_A_MODEL))
def test_every_name_makes_a_reward_that_scores(name: str) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    reward = make_reward(name, **ARGUMENTS.get(name, {}))
    scores = reward(
        prompts=["p"], completions=["<think>a</think><answer>5</answer>"], completion_ids=[[1, 2, 3]], answer=["5"],
        numbers=[[5, 8]], target=[5], entry=[{"answer": "5", "metadata": {"source_dataset": "chain_sum"}}],
        tests=[["assert f() == 5"]],
    )  # fmt: skip
    assert len(scores) == 1 and isinstance(scores[0], float)
    assert reward.__name__


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no reward named 'number_mach'\. Did you mean 'number_match'\?.*tag_format"):
        make_reward("number_mach")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("token_length", {}, r"missing a required argument: 'target'.*It takes \(target, scale"),
        ("token_length", {"target": 5, "goal": 3}, r"unexpected keyword argument 'goal'"),
    ],
)
def test_wrong_arguments_name_the_right_ones(name: str, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(name, **arguments)


def test_own_functions_by_file_and_by_module(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def good(completions, bonus=1.0, **_):\n    return [bonus] * len(completions)\n")
    assert make_reward("mine.py:good")(["a", "b"]) == [1.0, 1.0]
    assert make_reward("mine.py:good", bonus=2.0)(["a"]) == [2.0]
    assert make_reward("math:sqrt")(4.0) == 2.0
    for name, said in (
        ("absent.py:good", "no file"),
        ("mine.py:god", "Did you mean 'good'"),
        ("no_such_module_here:good", "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_reward(name)
