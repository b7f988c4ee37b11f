"""Rewards by name."""

from __future__ import annotations

from typing import Any

import pytest

from grupo.errors import ConfigError
from grupo.rewards import REWARDS, make_reward

ARGUMENTS = {
    "token_length": {"target": 3},
    "soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 2},
    "cosine_scaled": {"max_len": 10, "gold_column": "answer"},
    "rubric": {"checks": [{"name": "thanks", "points": 1.0, "contains": "thanks"}]},
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
    with pytest.raises(ConfigError, match=r"copy it and name `examples/rewards/prose.py:readability`"):
        make_reward("readability")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("token_length", {}, r"missing a required argument: 'target'.*It takes \(target, scale"),
        ("token_length", {"target": 5, "goal": 3}, r"unexpected keyword argument 'goal'"),
        ("token_length", {"target": "50"}, r"target='50': it takes a whole number"),
        ("token_length", {"target": 50.5}, r"target=50.5: it takes a whole number"),
        ("token_length", {"target": True}, r"target=True: it takes a whole number"),
        ("token_length", {"target": None}, r"target=None: it takes a whole number"),
        ("math_accuracy", {"tolerance": "0.1"}, r"tolerance='0.1': it takes a number"),
        ("math_accuracy", {"require_box": "no"}, r"require_box='no': it takes True or False"),
        ("number_match", {"gold_column": 5}, r"gold_column=5: it takes a string"),
        ("number_match", {"gold_column": "final answer"}, r"'final answer' cannot be a parameter.*dataset.rename"),
        ("cosine_scaled", {"max_len": 5, "gold_column": "class"}, r"Column 'class' cannot be a parameter"),
        ("number_match", {"extraction": {"sources": 5}}, r"cannot be made with these values of extraction"),
        ("number_match", {"extraction": "boxed"}, r"extraction"),
        ("tag_format", {"tags": 5}, r"cannot be made with these values of tags"),
        ("tag_format", {"prompt_opens_first": "maybe"}, r"it takes True or False or null"),
        ("banded_answer", {"bands": [1, 2]}, r"cannot be made with these values of bands"),
        ("rubric", {"checks": "polite"}, r"has a name, points, and one test"),
    ],
)
def test_wrong_arguments_name_the_right_ones(name: str, arguments: dict[str, Any], message: str) -> None:
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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def good(completions:\n", "SyntaxError"),
        ("import not_here_at_all\n", "No module named 'not_here_at_all'"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_the_reason(tmp_path, monkeypatch, source: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"(?s)Reward 'mine.py:good': mine.py cannot be loaded.*{said}"):
        make_reward("mine.py:good")


@pytest.mark.parametrize("name", [":good", "..:good", "a b:good", "a:b:good"])
def test_a_name_that_can_be_no_module_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_reward(name)


def test_a_file_may_hold_dataclasses(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int = 3\n"
        "def good(completions, **_):\n    return [Point().x for _ in completions]\n"
    )
    assert make_reward("mine.py:good")(["a"]) == [3]


def test_arguments_that_an_own_function_does_not_take_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def good(completions, answer, bonus=1.0):\n    return [bonus]\n")
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'bonsu'.*It takes"):
        make_reward("mine.py:good", bonsu=2.0)
    assert make_reward("mine.py:good", bonus=2.0)(["a"], answer=[1]) == [2.0]
