"""TRL's own rewards: the same names, parameters and results, TRL being the oracle."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

import grupo.rewards as ours

trl_rewards = pytest.importorskip("trl.rewards")
pytest.importorskip("math_verify")
NAMES = [
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
]


def messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_trl(name: str) -> None:
    """In TRL's order and with its defaults; further ones of ours have defaults."""
    theirs = inspect.signature(getattr(trl_rewards, name)).parameters
    mine = inspect.signature(getattr(ours, name)).parameters
    assert [n for n in mine if n in theirs] == list(theirs)
    for parameter, value in theirs.items():
        assert mine[parameter].default == value.default and mine[parameter].kind == value.kind
    assert all(mine[n].default is not inspect.Parameter.empty for n in mine if n not in theirs)


SOLUTIONS = [r"\frac{1}{3}", r"$\frac{1}{3}$", r"\boxed{\frac{1}{3}}", r"so $x=\boxed{\frac{1}{3}}$", "1/3"]
ANSWERS = [
    r"My answer is \boxed{\frac{1}{3}}",
    r"My answer is \boxed{\frac{1}{2}}",
    r"The final answer is $\frac{1}{3}$. I hope it is correct.",
    r"The answer is $\frac{1}{2}$",
    r"\boxed{1/3}",
    r"\boxed{\frac{2}{6}}",
    r"\boxed{}",
    "I do not know",
    "",
]


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_accuracy_is_that_of_trl(solution: str) -> None:
    """For golds with and without dollar signs and boxes; of completions, TRL takes messages only."""
    golds = [solution] * len(ANSWERS)
    expected = trl_rewards.accuracy_reward(messages(ANSWERS), golds)
    assert expected == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert ours.accuracy_reward(messages(ANSWERS), golds) == expected
    assert ours.accuracy_reward(ANSWERS, golds) == expected


def test_accuracy_finds_more_than_trl() -> None:
    """Of two boxes TRL reads none, and a number in plain text is no answer there."""
    completions = [r"First \boxed{2} and then \boxed{3}", "so 3", r"so $3$"]
    assert trl_rewards.accuracy_reward(messages(completions), ["3"] * 3) == [0.0] * 3
    assert ours.accuracy_reward(completions, ["3"] * 3) == [1.0] * 3


REASONED = [
    (r"<think> a </think> The final answer is \boxed{\frac{1}{3}}", None, 1.0),
    (r"<think> a </think> The final answer is \boxed{\frac{1}{2}}", None, 0.0),
    (r"<think> partial \boxed{\frac{1}{3}} but no end", None, 0.0),
    (r"<think> \boxed{\frac{1}{3}} </think> no answer", None, 0.0),
    (r"</think> \boxed{\frac{1}{2}} </think> \boxed{\frac{1}{3}}", None, 1.0),
    (r"a </reason> \boxed{\frac{1}{3}}", ["</think>", "</reason>"], 1.0),
    (r"a </reason> \boxed{\frac{1}{3}}", None, 0.0),
    ("", None, 0.0),
]


@pytest.mark.parametrize(("text", "delimiters", "score"), REASONED)
def test_accuracy_behind_the_reasoning_is_that_of_trl(text: str, delimiters: list[str] | None, score: float) -> None:
    golds = [r"\frac{1}{3}"]
    assert trl_rewards.reasoning_accuracy_reward(messages([text]), golds, delimiters) == [score]
    assert ours.reasoning_accuracy_reward(messages([text]), golds, delimiters) == [score]
    assert ours.reasoning_accuracy_reward([text], golds, reasoning_delimiters=delimiters) == [score]


@pytest.mark.filterwarnings("ignore:.*cannot read")
def test_unfinished_reasoning_is_0_even_where_the_gold_is_unusable() -> None:
    logged: dict[str, list[Any]] = {}
    texts = ["<think> 5", "<think> a </think> 5", "</think> 5"]
    scores = ours.reasoning_accuracy_reward(texts, ["see above", "see above", "5"], log_extra=logged.__setitem__)
    assert scores == [0.0, None, 1.0]
    assert logged["answer_parsed"] == ["[incomplete reasoning]", "5", "5"]
    assert logged["gold_parsed"] == ["[unreadable]", "[unreadable]", "5"]


def test_the_last_of_all_delimiters_ends_the_reasoning() -> None:
    text = r"</b> \boxed{1} </a> \boxed{2}"
    for delimiters in (["</a>", "</b>"], ["</b>", "</a>"]):
        assert ours.reasoning_accuracy_reward([text], ["2"], delimiters) == [1.0]


FORMATS = [
    "<think>\nThis is my reasoning.\nIn lines.\n</think>\nThis is my answer.",
    "<think>\r\nThis is my reasoning.\r\n</think>\r\nThis is my answer.",
    "<think>This is my reasoning.</think>This is my answer.",
    "<think></think>",
    "<think>\nThis is my reasoning.\nThis is my answer.",
    "This is my reasoning.</think> This is my answer.",
    "<think>a<think>b</think>c",
    "<think>a</think>b<think>c</think>",
    "<think>a</think>b</think>",
    "\n<think>a</think>b",
    "Sure: <think>a</think>b",
    "</think><think>a",
    "",
]


@pytest.mark.parametrize("text", FORMATS)
def test_the_think_format_is_that_of_trl(text: str) -> None:
    expected = trl_rewards.think_format_reward(messages([text]))
    assert ours.think_format_reward(messages([text])) == expected == ours.think_format_reward([text])


def test_the_think_format_where_the_prompt_opened_the_block() -> None:
    """TRL issue 6966: TRL gives 0 to all of these."""
    opened, closed = "user: 3+4\nassistant: <think>\n", "user: 3+4\nassistant: "
    rest = "add them up\n</think>\n<answer>7</answer>"
    cases = [(opened, rest, 1.0), (closed, rest, 0.0), (opened, "add them up", 0.0), (opened, "<think>" + rest, 0.0)]
    for prompt, completion, score in cases:
        assert ours.think_format_reward([completion], prompt_texts=[prompt]) == [score]
        table = ours.RewardRunner(ours.think_format_reward).score(
            prompts=["3+4"], completions=[completion], completion_ids=[[1]], columns={}, prompt_texts=[prompt]
        )
        assert table.scores == [(score,)]


def test_an_unusable_gold_abstains_as_in_trl() -> None:
    completions, golds = messages([r"\boxed{5}"]), ["the figure shows it"]
    assert trl_rewards.accuracy_reward(completions, golds) == [None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours.accuracy_reward(completions, golds) == [None]
        assert ours.get_cosine_scaled_reward(10)(completions, golds, [[1]]) == [None]
