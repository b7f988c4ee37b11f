"""The format reward: blocks over several lines, order, closure, and opening tags that stand in the prompt."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest

from grupo.errors import ConfigError
from grupo.rewards import RewardRunner, tag_format

GOOD = "<think>\nadd them\nup\nslowly\n</think>\n<answer>\n7\n</answer>"
# Blocks of several lines never matched in other libraries: unsloth issue 1761, notebooks PR 96
CASES = [
    (GOOD, 1.0),
    (GOOD.replace("\n", " "), 1.0),
    (GOOD.replace("\n", "\r\n"), 1.0),
    (GOOD.replace("\n", ""), 1.0),
    ("\n\n" + GOOD + "\n", 1.0),
    ("<think></think><answer></answer>", 1.0),
    ("<answer>7</answer>\n<think>add</think>", 0.0),
    ("<think>add<answer>7</answer></think>", 0.0),
    ("<think>add\n<answer>7</answer>", 0.0),
    ("<think>add</think>\n<answer>7", 0.0),
    ("<think>add</think>", 0.0),
    ("</think>add<think><answer>7</answer>", 0.0),
    (GOOD + GOOD, 0.0),
    ("<think>" + GOOD, 0.0),
    ("Sure! " + GOOD, 0.0),
    (GOOD + " Bye.", 0.0),
    (GOOD.replace("</think>", "</think> so"), 0.0),
    (GOOD.upper(), 0.0),
    ("", 0.0),
    (None, 0.0),
]


def quiet(reward: Any, *arguments: Any, **keywords: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result: list[float] = reward(*arguments, **keywords)
    return result


@pytest.mark.parametrize(("completion", "score"), CASES)
def test_format(completion: str | None, score: float) -> None:
    assert quiet(tag_format(), [completion]) == [score]
    assert quiet(tag_format(), [[{"role": "assistant", "content": completion}]]) == [score]


# Opening tag in the prompt: TRL issue 6966, open-r1 issue 560
REST = "add them up\n</think>\n<answer>7</answer>"
OPEN, CLOSED = "user: 3+4\nassistant: <think>\n", "user: 3+4\nassistant: "
PROMPT_CASES = [
    (OPEN, REST, 1.0),
    (CLOSED, REST, 0.0),
    (OPEN, REST.replace("</think>", ""), 0.0),
    (OPEN, "<think>" + REST, 0.0),
    (CLOSED, "<think>" + REST, 1.0),
    ("say <think> first", REST, 0.0),
]


@pytest.mark.parametrize(("prompt", "completion", "score"), PROMPT_CASES)
def test_opening_tag_in_the_prompt(prompt: str, completion: str, score: float) -> None:
    messages = [{"role": "user", "content": "3+4"}]
    assert quiet(tag_format(), [completion], prompts=[prompt]) == [score]
    assert quiet(tag_format(), [completion], prompts=[messages], prompt_texts=[prompt]) == [score]
    told = tag_format(prompt_opens_first=prompt == OPEN)
    assert quiet(told, [completion], prompts=[messages]) == [score]


def test_the_runner_hands_over_the_rendered_prompts() -> None:
    messages = [{"role": "user", "content": "3+4"}]
    table = RewardRunner(tag_format()).score(
        prompts=[messages, messages],
        completions=[[{"role": "assistant", "content": REST}]] * 2,
        completion_ids=[[1], [2]],
        columns={},
        prompt_texts=[OPEN, CLOSED],
    )
    assert table.scores == [(1.0,), (0.0,)]


def test_a_batch_of_zeros_is_explained_once() -> None:
    reward = tag_format()
    with pytest.warns(UserWarning, match=r"0 to all 3 .* 2 of them because <think> occurs 0 times.*prompt_opens_first"):
        reward([REST, REST, "<think>"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward([REST, REST])
        tag_format()([GOOD, REST])
        tag_format()([])


def test_other_tags_and_free_text_behind() -> None:
    assert quiet(tag_format(("reasoning", "SOLUTION")), ["<reasoning>a</reasoning><SOLUTION>b</SOLUTION>"]) == [1.0]
    assert quiet(tag_format("think"), ["<think>a</think>7"]) == [0.0]
    assert quiet(tag_format("think", text_after=True), ["<think>a</think>7"]) == [1.0]
    assert quiet(tag_format(text_after=True), ["<think><answer>7</answer></think>"]) == [0.0]


@pytest.mark.parametrize("tags", [(), ("think", "think"), ("<think>",), ("",)])
def test_tags_that_describe_no_format(tags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="without angle brackets"):
        tag_format(tags)


def test_it_pickles() -> None:
    assert pickle.loads(pickle.dumps(tag_format()))([GOOD]) == [1.0]
