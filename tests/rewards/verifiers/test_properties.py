"""What holds for every registered reward: no exception, the declared range, nothing for nothing, row by row."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.rewards import REWARDS, RewardRunner, make_reward

CHECKS = [
    {"name": "polite", "points": 2.0, "contains": "thank you"},
    {"name": "short", "points": -0.5, "longer_than": 3},
    {"name": "no digits", "points": 1.5, "pattern": r"\A\D*\Z"},
    {"name": "same", "points": 1, "equals_column": "answer"},
]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "token_length": [{"target": 3}, {"target": 0, "scale": 0.1}],
    "soft_overlong_punishment": [{"max_completion_len": 10, "soft_punish_cache": 4}],
    "cosine_scaled": [{"max_len": 10, "gold_column": "answer"}],
    "rubric": [{"checks": CHECKS}],
    "proximity": [{}, {"distance": "absolute", "tag": "answer", "best": 3, "missing": -2}],
    "number_score": [{}, {"right": 3.5, "wrong": -1.5, "missing": -2.5, "tag": "SOLUTION"}],
    "number_present": [{}, {"tag": ["<a>", "</a>"]}],
    "tag_count": [{}, {"tags": ["SOLUTION"], "tail_penalty": 0.01}, {"prompt_opens_first": True}],
    "tag_format": [{}, {"tags": ["answer"], "text_after": True, "score": 2.0}, {"prompt_opens_first": True}],
    **{f"gsm8k_{name}_format": [{}, {"prompt_opens_first": True}] for name in ("strict", "soft")},
}
ELSEWHERE = {"code", "llm_judge", "reward_model", "countdown", "reasoning_gym"}
"""That start processes, ask servers, or take columns of their own; what they do with any text is tested beside them."""
CASES = [(name, arguments) for name in sorted(set(REWARDS) - ELSEWHERE) for arguments in SETTINGS.get(name, [{}])]

# Half of the texts are made of what rewards look for, so that they get past the first test.
PIECES = [
    "<reasoning>", "</reasoning>", "<answer>", "</answer>", "<think>", "</think>", "<SOLUTION>", "</SOLUTION>", "<a>",
    "\n", "\r\n", " ", "7", "-7", "\u22127", "1,000", "7.0", "$7", "3/4", "0", "²", "1e999", "9" * 2000, "#### 7",
    "\\boxed{", "}", "\\frac{1}{0}", "thank you", "Dear Ann", "+49 30 1234567", "a@b.de", "12 Elm Street", "中文",
    "ひらがな", "word. ", "extraordinary", "\ud800", "\x00",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
COMPLETIONS = st.one_of(
    TEXTS,
    st.none(),
    st.just([]),
    st.builds(lambda text: [{"role": "assistant", "content": text}], st.one_of(TEXTS, st.none())),
    st.builds(lambda text: [{"role": "assistant", "content": [{"type": "text", "text": text}]}], TEXTS),
)
VALUES = st.one_of(TEXTS, st.sampled_from(["7", "0", "-7", "1,000", "3/4", "", None, 7, 0.5, float("nan"), True]))
PROMPTS = st.sampled_from(["p", "<think>\n"])
ROWS = st.tuples(COMPLETIONS, VALUES, st.lists(st.integers(0, 3), max_size=20), PROMPTS)
EMPTY = [None, "", " \n", [], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": ""}]]


def called(reward: Any, rows: list[Any]) -> list[float | None]:
    completions, golds, ids, prompts = (list(column) for column in zip(*rows, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores: list[float | None] = reward(
            prompts=prompts,
            completions=completions,
            completion_ids=ids,
            answer=golds,
            solution=golds,
        )
    return scores


@pytest.mark.parametrize(("name", "arguments"), CASES)
@settings(deadline=None, max_examples=60)
@given(rows=st.lists(ROWS, min_size=1, max_size=4))
def test_any_text_gets_a_score_in_the_range_whatever_its_neighbours(
    name: str, arguments: dict[str, Any], rows: list[Any]
) -> None:
    reward = make_reward(name, **arguments)
    lowest, highest = reward.value_range
    scores = called(reward, rows)
    assert len(scores) == len(rows)
    for score in scores:
        assert score is None or (isinstance(score, float) and lowest - 1e-9 <= score <= highest + 1e-9)
    assert called(reward, rows[::-1]) == scores[::-1]
    assert [called(reward, [row])[0] for row in rows] == scores


@pytest.mark.parametrize(("name", "arguments"), CASES)
@settings(deadline=None, max_examples=30)
@given(gold=VALUES.filter(lambda value: value != ""), prompt=PROMPTS)
def test_nothing_is_paid_for_nothing(name: str, arguments: dict[str, Any], gold: Any, prompt: str) -> None:
    """Not even with a length of 0 as the target: 0.0 is the best that a penalty gives."""
    reward = make_reward(name, **arguments)
    for score in called(reward, [(completion, gold, [], prompt) for completion in EMPTY]):
        assert score is None or score <= 0.0


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_it_runs_behind_the_fence_and_pickles(name: str, arguments: dict[str, Any]) -> None:
    reward = make_reward(name, **arguments)
    lowest, highest = reward.value_range
    assert lowest < highest
    words = ["7", "seven"]
    columns = {"answer": words, "solution": words}
    tables = []
    for function in (reward, pickle.loads(pickle.dumps(reward))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tables.append(
                RewardRunner(function, timeout=None).score(
                    prompts=["a", "b"],
                    completions=["<think>2</think><answer>7</answer>", "seven"],
                    completion_ids=[[1, 2], [3]],
                    columns=columns,
                )
            )
    assert not tables[0].failures and tables[0].scores == tables[1].scores
    assert tables[0].names == (reward.__name__,)
