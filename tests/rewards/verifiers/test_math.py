"""The accuracy rewards on answers that went wrong elsewhere (sources above each table; more in answer_pairs.yaml)."""

from __future__ import annotations

import inspect
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from grupo.errors import ConfigError, RewardError
from grupo.rewards import RewardRunner, accuracy_reward, math_accuracy, number_match, number_score
from grupo.rewards.verifiers.base import AnswerReward


def score(completion: Any, gold: Any) -> float | None:
    """One score, the same from `math_accuracy` on text, on messages, and from `accuracy_reward`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result,) = math_accuracy()([completion], answer=[gold])
        (of_messages,) = math_accuracy()([[{"role": "assistant", "content": completion}]], answer=[gold])
        (of_trl,) = accuracy_reward([completion], [gold])
    assert result == of_messages == of_trl
    return result


# Nested braces: TRL PR 5026, ms-swift PR 10147, OpenRLHF PR 1285
NESTED = [
    (r"\boxed{\frac{3}{8}", r"\frac{3}{8}", 0.0), (r"\boxed{\frac{\frac{1}{2}}{3}}", r"\frac{1}{6}", 1.0),
    (r"\boxed{\frac{1}{2 + \frac{1}{3}}}", r"\frac{3}{7}", 1.0), (r"\boxed{{\dfrac{3}{8}}}}", r"\frac{3}{8}", 1.0),
    (r"\boxed{\sqrt[3]{\frac{8}{27}}}", r"\frac{2}{3}", 1.0), (r"\boxed{x \in \{2,5\}}", r"\{5,2\}", 1.0),
    (r"\boxed{x \in [2,5)}", "[2,5]", 0.0), (r"\boxed{2½}", "2.5", 1.0), (r"\boxed{\}", "0", 0.0),
]  # fmt: skip
# Thousands separators and pairs: lm-evaluation-harness PR 4039
SEPARATORS = [
    (r"\boxed{12,345,678.50}", "12345678.5", 1.0), (r"\boxed{1\!,\!250}", "1250", 1.0),
    (r"\boxed{10{,}\!000}", "10000", 1.0), (r"\boxed{1\ 250\ 000}", "1250000", 1.0), (r"\boxed{1~250}", "1250", 1.0),
    (r"\boxed{1\ 25}", "125", 0.0), (r"\boxed{12,345,67}", "1234567", 0.0), (r"so 1\;250", "1250", 1.0),
    (r"so 1\;250", "250", 0.0),
]  # fmt: skip
# Wrappers, punctuation, units: Math-Verify issues 37 and 76
LONG = "The first box holds 176 apples. " * 40 + "Final Answer: **58**"
WRAPPERS = [
    (LONG, "58", 1.0), (LONG, "176", 0.0),
    *((rf"\boxed{{\{name}{{58}}}}", "58", 1.0) for name in ("textsf", "texttt", "mathsf", "bm", "textnormal")),
    (r"\boxed{\underline{58}}", "58", 1.0),
    (r"\boxed{\mathbf{58}\ \mathrm{cm}}", "58", 1.0), (r"\boxed{\mathbf{5}8}", "5", 0.0),
    (r"\boxed{2^\mathbf{58}}", "258", 0.0), (r"\boxed{\text{58 cm}^2}", r"58\text{ cm}^{2}", 1.0),
    (r"\boxed{58\,\text{m}/\text{s}}", r"58\text{ m/s}", 1.0),
    (r"\boxed{58\,\text{m}/\text{s}^2}", r"58\text{ m/s}", 0.0),
    (r"\boxed{58\ \text{km}\cdot\text{h}^{-1}}", "58", 1.0), (r"\boxed{58^\circ\text{C}}", "58°C", 1.0),
    (r"\boxed{58\text{\%}}", r"58\%", 1.0), (r"\boxed{\text{\$}58}", "58", 1.0), (r"\boxed{58\$}", "58", 1.0),
    *((f"Final Answer: **{area}**", "58", 1.0) for area in ("58 cm^2", r"58\text{ cm}^{2}", "58 m", "58 m/s^2")),
]  # fmt: skip
# A float is the number that it was rounded from; another one is as wrong as ever.
# Gold answers that cannot be read, and values that are not strings: open-r1 PR 566, verl PR 6793, Math-Verify issue 20
GOLDS = [
    (r"\boxed{5}", "see the figure", None), (r"\boxed{\frac12}", np.float32(0.5), 1.0),
    (r"\boxed{\frac13}", 1 / 3, 1.0), (r"\boxed{0.3}", 0.1 + 0.2, 1.0), (r"\boxed{\sqrt{2}}", 2**0.5, 1.0),
    (r"\boxed{\frac13}", np.float32(1 / 3), 1.0), (r"\boxed{\frac13}", np.float16(1 / 3), 1.0),
    (r"\boxed{0.333333}", 1 / 3, 0.0), (r"\boxed{\frac13}", "0.3333333333333333", 0.0),
    (r"\boxed{10000000000000001}", 1e16, 0.0), (r"\boxed{17}", np.int64(17), 1.0), (r"\boxed{5}", None, None),
    (r"\boxed{5}", float("nan"), None), (r"\boxed{5}", ["5"], None), (r"\boxed{5}", [10**5000], None),
    (r"\boxed{0.1}", np.array(0.1, dtype=np.float32), 1.0), (r"\boxed{5}", np.bool_(True), None),
    ("30, so \uff14\uff12", "42", 1.0), ("30, so \uff14\uff12", "30", 0.0),
    ("30, so \uff14\uff12", "\uff14\uff12", 1.0), ("\\boxed{\u2013 5}", "-5", 1.0), ("\\boxed{3\u20135}", "-2", 0.0),
    ("\\boxed{1\u202f000}", "1000", 1.0), ("\\boxed{4\u200b2}", "42", 1.0), (r"\boxed{True}", True, None),
    ("", "", None), (r"\boxed{}", "", None), (r"\boxed{}", r"\boxed{}", None), ("", "5", 0.0), (None, "5", 0.0),
    (None, None, None), ("so 72", "48 + 24 = 72\n#### 72", 1.0),
]  # fmt: skip


def test_accuracy() -> None:
    for completion, gold, reward in NESTED + SEPARATORS + WRAPPERS + GOLDS:
        assert score(completion, gold) == reward, completion


def test_unusable_golds_are_warned_of_once_and_counted() -> None:
    reward = math_accuracy()
    with pytest.warns(UserWarning, match=r"math_accuracy cannot read 2 of 3 gold answers in 'answer'.*see the figure"):
        assert reward([r"\boxed{5}"] * 3, answer=["see the figure", "5", None]) == [None, 1.0, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reward([r"\boxed{5}"], answer=[None]) == [None]
    assert reward.unusable_golds == 3


def test_a_gold_too_long_to_print_abstains() -> None:
    with pytest.warns(UserWarning, match="more than 1,000 digits"):
        assert math_accuracy()([r"\boxed{5}"], answer=[10**5000]) == [None]


def test_only_a_box_counts_where_it_is_required() -> None:
    completions = ["58", r"\boxed{58}"]
    assert math_accuracy(require_box=True)(completions, answer=[58, 58]) == [0.0, 1.0]
    assert math_accuracy()(completions, answer=[58, 58]) == [1.0, 1.0]


def test_number_match() -> None:
    rows = [
        ("7 * 8 = 56", 56, 1.0), ("7 * 8 = 56.", "56", 1.0), ("7 * 8 = 56.0", "56", 1.0), ("56 or 54", 56, 0.0),
        ("-56", 56, 0.0), ("56,000", 56, 0.0), ("seven", 56, 0.0), ("0", 0, 1.0), ("", 0, 0.0), (None, 56, 0.0),
        ("The total is $3,450.00.", 3450, 1.0), ("The total is $3,450.00.", 0, 0.0), (r"\boxed{0,9}", 9, 0.0),
        ("so 1/3", 1 / 3, 1.0), ("so 2½ cups", 2.5, 1.0), ("so 2½ cups", 2, 0.0),
    ]  # fmt: skip
    completions, golds, rewards = zip(*rows, strict=True)
    assert number_match()(completions, answer=golds) == list(rewards)


def test_a_box_is_the_same_number_for_all_rewards_of_numbers() -> None:
    """`math_accuracy` compares formulas, so 12*7 is 84 there."""
    for box in ("12*7", r"\frac{3}{4}", "84 apples", r"\frac{168}{2}", "5 million", "84", "7, 12", ""):
        for gold in (84, "3/4", 5_000_000):
            text = rf"\boxed{{{box}}}"
            (matched,) = number_match(extraction={"sources": ["boxed"]})([text], answer=[gold])
            assert number_score(1.0, 0.0)([text], answer=[gold]) == [matched]
            assert math_accuracy(require_box=True)([text], answer=[gold])[0] >= matched


def test_number_match_abstains_on_an_unusable_gold() -> None:
    with pytest.warns(UserWarning, match="number_match cannot read 1 of 2"):
        assert number_match()(["5", "5"], answer=["five", 5]) == [None, 1.0]


@pytest.mark.parametrize("factory", [number_match, math_accuracy])
def test_the_gold_column_is_part_of_the_signature_and_pickles(factory: Any) -> None:
    reward = factory(gold_column="target")
    assert list(inspect.signature(reward).parameters) == ["completions", "target", "columns"]
    copy = pickle.loads(pickle.dumps(reward))
    assert isinstance(copy, AnswerReward)
    assert copy(["it is 5"], target=[5]) == [1.0]
    runner = RewardRunner(copy)
    assert runner.names == (factory.__name__,)
    with pytest.raises(RewardError, match=rf"'{factory.__name__}' requires 'target'.*'answer', 'level'"):
        runner.check_columns(["answer", "level"])


def test_golds_are_needed_for_each_completion() -> None:
    with pytest.raises(RewardError, match="1 gold answer in 'answer' for 2 completions"):
        number_match()(["5", "6"], answer=[5])


def test_accuracy_reward_logs_what_it_read() -> None:
    table = RewardRunner(accuracy_reward).score(
        prompts=["p", "p"],
        completions=[r"\boxed{\frac{2}{4}}", "none"],
        completion_ids=[[1], [2]],
        columns={"solution": ["0.5", "7"]},
    )
    assert table.scores == [(1.0,), (0.0,)]
    assert table.extras == {
        "solution": ["0.5", "7"],
        "gold_parsed": ["1/2", "7"],
        "answer_parsed": ["1/2", "[none]"],
    }


def test_answers_in_tag_blocks() -> None:
    completions = ["<answer>1,250</answer> of 7", "<answer>12 * 7</answer>", "1250", "<answer>the 1250</answer>"]
    in_tags = {"sources": ["tag"]}
    assert number_match(extraction=in_tags)(completions, answer=[1250, 84, 1250, 1250]) == [1.0, 0.0, 0.0, 0.0]
    assert number_match(extraction=in_tags)(completions, answer=[1250, 7, 1250, 1250]) == [1.0, 0.0, 0.0, 0.0]
    assert math_accuracy(extraction=in_tags)(completions, answer=[1250, 84, 1250, 1250]) == [1.0, 1.0, 0.0, 0.0]
    lenient = number_match(extraction={"sources": ["tag"], "strict": False})
    assert lenient(completions, answer=[1250, 84, 1250, 1250]) == [1.0, 0.0, 0.0, 1.0]


def test_tolerance_is_relative_and_for_numbers_that_are_not_whole() -> None:
    rows = [
        ("0.333", "1/3", 0.01, 1.0), ("0.3", "1/3", 0.01, 0.0), ("0.333", "1/3", 0.0, 0.0),
        ("-0.333", "1/3", 0.01, 0.0),
        ("3.14", r"\pi", 0.01, 1.0), ("3.14", r"\pi", 0.0001, 0.0), (r"\sqrt{2}", "1.41421356", 1e-6, 1.0),
        ("0.33", "1/3", 0.01, 1.0),  # exactly at the edge
        ("1001", "1000", 0.01, 0.0), ("1001", "1000.5", 0.01, 1.0),  # two whole numbers, and not
        ("0.001", "0", 0.5, 0.0),  # no share of nothing
        (r"0.333\text{ cm}", r"1/3\text{ m}", 0.01, 0.0), ("(0.333, 1)", "(1/3, 1)", 0.01, 0.0),  # units, tuples
        ("10^{400}\\sqrt{2}", "1.5", 0.5, 0.0),  # beyond the floats
    ]  # fmt: skip
    for answer, gold, tolerance, reward in rows:
        assert math_accuracy(tolerance=tolerance)([rf"\boxed{{{answer}}}"], answer=[gold]) == [reward], answer


def test_tolerance_of_numbers() -> None:
    reward = number_match(tolerance=0.05)
    assert reward(["10.4", "10.6", "11", "9.5"], answer=[10, 10, 10, "10.0"]) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: math_accuracy(tolerance=-0.1),
        lambda: number_match(tolerance=1.0),
        lambda: number_match(tolerance=float("nan")),
        lambda: math_accuracy(require_box=True, extraction={"sources": ["tag"]}),
    ],
)
def test_settings_that_say_nothing_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("gold", "right"),
    [
        ("So the answer is 5.", "5"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "0.5"),
        ("Answer: 5", "5"),
        ("the answer is shown in figure 5", None),
    ],
)
def test_golds_that_say_the_answer_in_a_sentence(gold: str, right: str | None) -> None:
    assert score(rf"\boxed{{{right or 5}}}", gold) == (None if right is None else 1.0)
