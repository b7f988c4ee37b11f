"""Verifiers decide and give reasons; rewards are made from them."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import ConfigError, RewardError
from grupo.rewards import (
    REWARDS,
    MathVerifier,
    NumberVerifier,
    RewardRunner,
    Verdict,
    accuracy_reward,
    make_reward,
    reasoning_accuracy_reward,
    reward_from,
    think_format_reward,
)

PAGE = Path(__file__).parents[3] / "docs" / "answers.md"


def short(completions: Sequence[str], limit: Sequence[int]) -> list[Verdict]:
    """Is a text within its limit?"""
    verdicts = []
    for text, most in zip(completions, limit, strict=True):
        if most < 0:
            verdicts.append(Verdict("undecided", "no limit"))
        else:
            verdicts.append(Verdict("right" if len(text) <= most else "wrong", f"{len(text)} characters"))
    return verdicts


def test_a_reward_pays_what_a_verifier_decides() -> None:
    texts, limits = ["abc", "abcd", "", "x"], [3, 3, 0, -1]
    assert reward_from(short)(texts, limit=limits) == [2.0, 0.0, 2.0, None]
    assert reward_from(short, right=1.0, wrong=-1.0, undecided=-0.5)(texts, limit=limits) == [1.0, -1.0, 1.0, -0.5]


def test_verifiers_see_texts_whatever_the_conversation_looks_like() -> None:
    messages = [[{"role": "assistant", "content": "abc"}], [{"role": "assistant", "content": None}], None]
    assert reward_from(short)(messages, limit=[2, 0, 0]) == [0.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("scores", "value_range"),
    [({}, (0.0, 2.0)), ({"wrong": -1, "right": 1}, (-1.0, 1.0)), ({"undecided": -3.0}, (-3.0, 2.0))],
)
def test_it_says_its_range(scores: dict[str, float], value_range: tuple[float, float]) -> None:
    assert reward_from(short, **scores).value_range == value_range


@pytest.mark.parametrize(
    "scores", [{"right": 0.0}, {"right": 1, "wrong": 2}, {"wrong": math.nan}, {"undecided": math.inf}]
)
def test_scores_that_reward_nothing_right_are_refused(scores: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="do not reward right answers"):
        reward_from(short, **scores)


def test_the_runner_asks_for_the_columns_of_the_verifier_and_logs_the_reasons() -> None:
    reward = reward_from(short)
    runner = RewardRunner(reward)
    assert runner.names == ("short",)
    with pytest.raises(RewardError, match="requires 'limit'"):
        runner.check_columns(["answer"])
    table = runner.score(
        prompts=["p", "p"],
        completions=["ab", "abc"],
        completion_ids=[[1], [2]],
        columns={"limit": [2, 2], "other": [0, 0]},
    )
    assert table.scores == [(2.0,), (0.0,)]
    assert table.extras == {"short/reason": ["2 characters", "3 characters"]}
    assert pickle.loads(pickle.dumps(reward))(["a"], limit=[1]) == [2.0]


@pytest.mark.parametrize(
    ("verifier", "said"),
    [
        (lambda completions: [Verdict("right", "")], "1 verdict for 2 completions"),
        (lambda completions: [True, False], "must return a list of Verdict"),
        (lambda completions: None, "must return a list of Verdict"),
        (lambda completions: [Verdict("maybe", "")] * 2, "decided 'maybe'; a decision is one of 'right', 'wrong'"),
    ],
)
def test_a_verifier_that_returns_something_else_is_named(verifier: Any, said: str) -> None:
    with pytest.raises(RewardError, match=rf"The verifier <lambda>.*{said}"):
        reward_from(verifier)(["a", "b"])


@pytest.mark.parametrize(
    ("verifier", "completion", "gold", "decision", "reason"),
    [
        (MathVerifier(), r"\boxed{\frac{2}{4}}", "0.5", "right", "1/2 is the gold answer"),
        (MathVerifier(), "so 41", 42, "wrong", "41 is not the gold answer 42"),
        (MathVerifier(), "no idea", 42, "wrong", "it has no answer"),
        (MathVerifier(), r"\boxed{ 42", 42, "wrong", "its answer (boxed) cannot be read"),
        (MathVerifier(), "42", "see the figure", "undecided", "the gold answer 'see the figure' cannot be read"),
        (NumberVerifier(), "so 42", "42.0", "right", "42 is the gold answer"),
        (NumberVerifier(), "so 3,7", 7, "wrong", "it has no answer"),
        (NumberVerifier(), "42", "forty", "undecided", "the gold answer 'forty' cannot be read"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot read")
def test_the_verdicts_of_the_library_have_reasons(
    verifier: Any, completion: str, gold: Any, decision: Any, reason: str
) -> None:
    assert verifier([completion], answer=[gold]) == [Verdict(decision, reason)]


def test_the_verifiers_of_the_library_make_rewards_of_any_score() -> None:
    reward = reward_from(MathVerifier("solution", {"sources": ["tag"], "tag": "SOLUTION"}), right=3.0, wrong=-1.5)
    assert list(inspect.signature(reward).parameters) == ["completions", "solution", "columns"]
    completions = ["<SOLUTION>1,250</SOLUTION>", "1250", "<answer>1250</answer>"]
    assert reward(completions, solution=["1250"] * 3) == [3.0, -1.5, -1.5]
    with pytest.warns(UserWarning, match="math_verifier cannot read 1 of 1 gold answers in 'solution'"):
        assert reward(["5"], solution=[None]) == [None]


ARGUMENTS = {
    "token_length": {"target": 3},
    "soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 2},
    "cosine_scaled": {"max_len": 10, "gold_column": "answer"},
}
OF_TEXT = ("number_match", "math_accuracy", "tag_format")
LIBRARY = {name: make_reward(name, **ARGUMENTS.get(name, {})) for name in [*OF_TEXT, *ARGUMENTS, "repetition_penalty"]}
FUNCTIONS = {
    function.__name__: function for function in (accuracy_reward, reasoning_accuracy_reward, think_format_reward)
}
MARKS = ["\\boxed{", "}", "{", "<answer>", "</answer>", "<think>", "</think>", "#### ", "Answer:", "The answer is "]
PIECES = [*MARKS, "$", "\\frac", "5", "42.", "\n", " ", "\\text{", "and ", "3,7", "-", "**", "%", "\u2212"]
TEXTS = st.one_of(
    st.text(max_size=80),
    st.text(alphabet="0123456789.,/-+^_{}()[]$\\ *=%#<>", max_size=60),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
)
GOLDS = st.one_of(TEXTS, st.none(), st.integers(), st.floats(), st.booleans(), st.lists(st.integers(), max_size=2))


@pytest.mark.parametrize("name", [*LIBRARY, *FUNCTIONS])
@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), gold=GOLDS)
def test_any_text_is_scored_within_the_range_and_alike_in_both_shapes(name: str, texts: list[str], gold: Any) -> None:
    reward = (LIBRARY | FUNCTIONS)[name]
    lowest, highest = reward.value_range
    columns = {
        "solution" if name in FUNCTIONS else "answer": [gold] * len(texts),
        "completion_ids": [[ord(character) for character in text] for text in texts],
    }
    scores = reward(completions=texts, **columns)
    assert all(score is None or lowest <= score <= highest for score in scores)
    assert scores == reward(completions=[[{"role": "assistant", "content": text}] for text in texts], **columns)


@pytest.mark.parametrize("name", [*OF_TEXT, *FUNCTIONS])
@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=40)
@given(gold=GOLDS)
def test_an_empty_completion_is_never_paid(name: str, gold: Any) -> None:
    reward = (LIBRARY | FUNCTIONS)[name]
    column = "solution" if name in FUNCTIONS else "answer"
    for empty in ("", " \n", None, []):
        assert reward(completions=[empty], **{column: [gold]}) in ([0.0], [None])


def test_every_reward_says_its_range() -> None:
    assert {*OF_TEXT, *ARGUMENTS, "repetition_penalty"} <= REWARDS.keys()
    for reward in [*LIBRARY.values(), *FUNCTIONS.values()]:
        lowest, highest = reward.value_range
        assert lowest < highest


def test_the_examples_of_the_page_run() -> None:
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(example, names)
