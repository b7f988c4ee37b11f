"""The checker of rewards: every planted fault by its name and no other, and nothing on clean sets."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from grupo.errors import ConfigError, DataError
from grupo.rewards import (
    FAULTS,
    MathVerifier,
    RewardReport,
    check_rewards,
    completion_text,
    countdown,
    get_soft_overlong_punishment,
    math_accuracy,
    number_list,
    number_match,
    tag_format,
    token_length,
)
from grupo.tasks.registry import make_task

SUMS = [{"prompt": f"What is {n} * 12?", "answer": str(12 * n)} for n in range(7, 27)]
TALKS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS]


def texts(completions: list[Any]) -> list[str]:
    return [completion_text(completion) or "" for completion in completions]


def last(text: str) -> str:
    numbers = re.findall(r"-?[0-9]+", text)
    return str(numbers[-1]) if numbers else ""


def correct(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [score or 0.0 for score in number_match()(completions, answer=answer)]


# ---- clean sets ------------------------------------------------------------------------------------------------------

CLEAN: dict[str, tuple[list[Any], Callable[[], list[dict[str, Any]]]]] = {
    "number and tags": ([number_match(), tag_format()], lambda: SUMS),
    "number and tags, in conversations": ([number_match(), tag_format()], lambda: TALKS),
    "maths and length": ([math_accuracy(), token_length(target=20, scale=0.01)], lambda: SUMS),
    "boxed only": ([math_accuracy(require_box=True)], lambda: TALKS),
    "two verifiers": ([number_match(), math_accuracy()], lambda: make_task("word-problems").train),
    "countdown": ([countdown(), tag_format(tags=("plan", "answer"))], lambda: make_task("countdown", level=2).train),
    "sorting": ([number_list(), get_soft_overlong_punishment(2000, 500)], lambda: make_task("sorting", level=4).train),
    "no gold": ([token_length(target=50)], lambda: make_task("short-stories").train),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_sets_have_no_fault(name: str) -> None:
    rewards, rows = CLEAN[name]
    report = check_rewards(rewards, rows())
    assert report.faults == (), str(report)
    assert str(report).endswith("no faults found")


def test_clean_sets_stay_clean_with_sampled_completions() -> None:
    """What an untrained model writes: some right, some in the format, most neither."""
    draw = random.Random(0)

    def written(gold: str) -> str:
        number = gold if draw.random() < 0.3 else str(draw.randint(1, 300))
        words = " ".join(["so"] * draw.randint(0, 40))
        return f"<think>{words}</think>\n<answer>{number}</answer>" if draw.random() < 0.5 else f"{words} {number}"

    rows = [{**row, "completions": [written(str(row["answer"])) for _ in range(4)]} for row in TALKS]
    report = check_rewards([number_match(), tag_format()], rows)
    assert report.faults == (), str(report)
    measure = report.measures["number_match"]
    assert measure.gold == 1.0 and measure.wrong == 0.0 == measure.empty
    assert 0.1 < measure.sampled < 0.6 and abs(measure.length_correlation) < 0.5  # type: ignore[operator, arg-type]
    assert 0 < measure.seconds_per_completion < 0.05  # type: ignore[operator]
    assert sum(measure.share_of_spread or 0 for measure in report.measures.values()) == pytest.approx(1)
    assert not report.skipped


# ---- planted faults --------------------------------------------------------------------------------------------------


def crashes(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    pairs = zip(texts(completions), answer, strict=True)
    return [float(int(re.findall(r"-?[0-9]+", text)[-1]) == int(gold)) for text, gold in pairs]


def unicode_crash(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """isdigit() is true for a superscript two, and int() refuses it."""
    scores = []
    for text, gold in zip(texts(completions), answer, strict=True):
        number = last(text) or "".join(character for character in text if character.isdigit())
        scores.append(float(bool(number) and int(number) == int(gold)))
    return scores


def one_for_all(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [sum(correct(completions, answer)) / len(completions)]


def words_for_numbers(completions: list[Any], answer: list[str], **kwargs: Any) -> list[Any]:
    return ["right" if score else "wrong" for score in correct(completions, answer)]


def nothing(completions: list[Any], **kwargs: Any) -> None:
    return None


def nan(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """A logarithm of the relative error, which is not there for a right answer or for none."""
    scored = zip(correct(completions, answer), texts(completions), strict=True)
    return [score if text.strip() else math.nan for score, text in scored]


def inf(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [1.0 if score else -math.inf for score in correct(completions, answer)]


class OutOfRange:
    value_range = (0.0, 1.0)
    __name__ = "out_of_range"

    def __call__(self, completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        return [2 * score - 0.5 for score in correct(completions, answer)]


def abstains(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float | None]:
    return [None] * len(completions)


def constant(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def saturated(completions: list[Any], **kwargs: Any) -> list[float]:
    return [min(1.0, len(text.strip())) for text in texts(completions)]


def noise(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [score + random.random() for score in correct(completions, answer)]


def remembers() -> Callable[..., list[float]]:
    calls = itertools.count()

    def remembering(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        return [score / (1 + 0.1 * next(calls)) for score in correct(completions, answer)]

    return remembering


def by_place(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [score - 0.01 * place for place, score in enumerate(correct(completions, answer))]


def ranked(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    scores = correct(completions, answer)
    mean = sum(scores) / len(scores)
    return [score - mean for score in scores]


def bonus_for_the_rare(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    found = texts(completions)
    scored = zip(correct(completions, answer), found, strict=True)
    return [score + (found.count(text) == 1) for score, text in scored]


def shared_by_the_batch(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [score / len(completions) for score in correct(completions, answer)]


def slow(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    time.sleep(0.006 * len(completions))
    return correct(completions, answer)


def hangs(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    if max(map(len, texts(completions))) > 4000:
        time.sleep(3)
    return correct(completions, answer)


def politeness(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.5 * ("sorry" not in text.lower()) for text in texts(completions)]


def backwards(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [-score for score in correct(completions, answer)]


def substring(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(gold in text) for text, gold in zip(texts(completions), answer, strict=True)]


def words_count(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    scored = zip(correct(completions, answer), texts(completions), strict=True)
    return [score * (1 + min(len(text.split()), 1000) / 200) for score, text in scored]


def tags_without_dotall(completions: list[Any], **kwargs: Any) -> list[float]:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    return [0.5 * bool(re.match(pattern, text)) for text in texts(completions)]


def string_equality(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(text.strip().split()[-1:] == [gold]) for text, gold in zip(texts(completions), answer, strict=True)]


def huge_format(completions: list[Any], **kwargs: Any) -> list[float]:
    return [3.0 * score for score in tag_format()(completions)]


def tiny_format(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.001 * score for score in tag_format()(completions)]


def needs_level(completions: list[Any], level: list[int], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


PLANTED: list[tuple[str, Any, set[str]]] = [
    # fault, rewards, other faults that follow from it
    ("crash", [crashes], set()),
    ("crash", [unicode_crash], set()),
    ("wrong-count", [one_for_all], set()),
    ("wrong-type", [words_for_numbers], set()),
    ("wrong-type", [nothing], set()),
    ("not-finite", [nan], set()),
    ("not-finite", [inf], {"constant"}),
    ("out-of-range", [OutOfRange()], set()),
    ("abstains", [number_match(), abstains], set()),
    ("constant", [number_match(), constant], set()),
    ("saturated", [number_match(), saturated], set()),
    ("not-repeatable", [noise], set()),
    ("not-repeatable", [remembers()], set()),
    ("order-dependent", [by_place], set()),
    ("neighbour-dependent", [ranked], set()),
    ("neighbour-dependent", [bonus_for_the_rare], set()),
    ("neighbour-dependent", [shared_by_the_batch], set()),
    ("slow", [slow], set()),
    ("timeout", [hangs], set()),
    ("pays-empty", [number_match(), politeness], {"constant"}),
    ("prefers-wrong", [backwards], set()),
    ("accepts-wrong", [substring], set()),
    ("length-bias", [words_count], set()),
    ("newline-sensitive", [number_match(), tags_without_dotall], set()),
    ("verifiers-disagree", [number_match(), string_equality], set()),
    ("format-over-correctness", [number_match(), huge_format], set()),
    ("dominates", [number_match(), tiny_format], set()),
    ("dominates", [math_accuracy(), token_length(target=400)], set()),
    ("blind-to-correctness", [tag_format()], set()),
    ("missing-column", [number_match(), needs_level], set()),
]


def checked(rewards: Any, rows: list[dict[str, Any]] = SUMS, **options: Any) -> RewardReport:
    return check_rewards(rewards, rows, timeout=1.5, seconds_per_completion=0.005, **options)


@pytest.mark.parametrize(
    ("fault", "rewards", "others"),
    PLANTED,
    ids=[f"{fault}-{getattr(rewards[-1], '__name__', 'object')}" for fault, rewards, _ in PLANTED],
)
def test_planted_faults_are_found_by_name(fault: str, rewards: Any, others: set[str]) -> None:
    report = checked(rewards)
    assert fault in report.names, str(report)
    assert set(report.names) <= {fault, *others}, str(report)
    for found in report.faults:
        assert re.search(r"[0-9]", found.seen) or found.name in ("missing-column", "wrong-type", "crash"), found
        assert found.seen[-1] in ".?" and found.remedy.endswith(".") and found.remedy in str(report)
    named = {name for found in report.faults if found.name == fault for name in found.reward.split(" + ")}
    assert named <= set(report.measures) and named


def test_every_fault_was_planted() -> None:
    assert {fault for fault, *_ in PLANTED} == set(FAULTS)


@pytest.mark.parametrize("fault", ["crash", "wrong-count", "not-finite", "timeout", "missing-column"])
def test_a_broken_reward_does_not_hide_the_others(fault: str) -> None:
    (broken, *_) = (rewards[-1] for name, rewards, _ in PLANTED if name == fault)
    report = checked([broken, number_match()])
    assert fault in report.names and report.measures["number_match"].gold == 1.0
    assert "number_match" not in {found.reward for found in report.faults}


def test_the_same_faults_are_found_in_conversations() -> None:
    """One planted reward of each fault; what differs between texts and messages does not depend on the reward."""
    first = {
        fault: (rewards, others) for fault, rewards, others in reversed(PLANTED) if fault not in ("timeout", "slow")
    }
    for fault, (rewards, others) in first.items():
        assert fault in (found := checked(rewards, TALKS)).names and set(found.names) <= {fault, *others}, found


def test_saturation_is_seen_in_what_a_model_writes() -> None:
    rows = [{**row, "completions": ["I do not know.", "Sorry, no."]} for row in SUMS]
    report = checked([number_match()], rows)
    assert report.names == ["saturated"]
    assert "40 of 40 sampled completions get its lowest value, 0" in report.faults[0].seen
    solved = [{**row, "completion": f"It is {row['answer']}."} for row in SUMS]
    assert "20 of 20 sampled completions get its highest value, 1" in checked([number_match()], solved).faults[0].seen


def test_weights_decide_what_outweighs_what() -> None:
    rewards = [number_match(), tag_format()]
    assert checked(rewards, weights=[1.0, 3.0]).names == ["format-over-correctness"]
    assert checked(rewards, weights=[1.0, 0.3]).names == []
    assert checked(rewards, weights=[1.0, 0.01]).names == ["dominates"]
    (fault,) = checked(rewards, weights=[1.0, 3.0]).faults
    assert fault.reward == "tag_format" and "earns 3 more" in fault.seen and "only 1" in fault.seen


def test_a_second_opinion_is_compared_and_not_summed() -> None:
    report = checked([number_match()], verifiers=[string_equality])
    assert report.names == ["verifiers-disagree"]
    assert "number_match" in report.faults[0].seen and report.measures["string_equality"].share_of_spread == 0.0
    assert checked([number_match()], verifiers=[math_accuracy(), MathVerifier()]).names == []


def test_the_form_is_the_one_that_rewards_want_or_the_given_one() -> None:
    assert "<plan>" in checked([number_match(), tag_format(tags=("plan", "answer"))]).form
    assert "boxed" in checked([math_accuracy(require_box=True)]).form

    def shouting(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(f"!!{gold}!!" == text.split()[-1]) if text.strip() else 0.0
                for text, gold in zip(texts(completions), answer, strict=True)]  # fmt: skip

    assert "constant" in checked([shouting]).names
    assert checked([shouting], gold_form="{reasoning} !!{answer}!!").names == []
    with pytest.raises(ConfigError, match="no place for the answer"):
        checked([shouting], gold_form="!!")


def test_a_prompt_that_opens_the_first_tag_is_no_fault() -> None:
    rows = [{**row, "prompt": f"{row['prompt']}\n<think>\n"} for row in SUMS]
    assert checked([number_match(), tag_format()], rows).names == []
    assert checked([number_match(), tag_format(prompt_opens_first=True)], TALKS).names == []


def test_asynchronous_rewards_are_checked_alike() -> None:
    async def patient(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return correct(completions, answer)

    assert checked([patient]).names == []


def test_gold_answers_that_are_solutions() -> None:
    rows = [{"prompt": row["prompt"], "solution": f"Think hard.\n#### {row['answer']}"} for row in SUMS]
    assert checked([number_match(gold_column="solution")], rows).names == []
    rows = [{"prompt": row["prompt"], "gold": f"\\boxed{{{row['answer']}}}"} for row in SUMS]
    assert checked([math_accuracy(gold_column="gold")], rows).names == []
    unreadable = [{"prompt": row["prompt"], "answer": "see the figure"} for row in SUMS]
    assert "abstains" in checked([number_match()], unreadable).names


def test_answers_in_words() -> None:
    def names_it(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        said = [text.strip().rstrip(".").split()[-1:] for text in texts(completions)]
        return [float(words == [gold]) for words, gold in zip(said, answer, strict=True)]

    rows = [{"prompt": f"{n}?", "answer": ["yes", "no", "maybe"][n % 3]} for n in range(9)]
    assert checked([names_it], rows).names == []
    assert "accepts-wrong" not in checked([substring], rows).names


def test_what_cannot_be_checked_is_said() -> None:
    report = checked([token_length(target=5)], [{"prompt": "Tell me."}])
    assert len(report.skipped) == 2 and "gold_column" in report.skipped[0] and "completions" in report.skipped[1]
    assert report.measures["token_length"].gold is None


def test_wrong_use_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        check_rewards([number_match()], [])
    with pytest.raises(DataError, match="Sample 1 has no 'prompt'; it has answer"):
        check_rewards([number_match()], [SUMS[0], {"answer": 1}])
    with pytest.raises(ConfigError, match="weights has 2 numbers for 1 reward"):
        check_rewards([number_match()], SUMS, weights=[1, 2])
    for weight in (float("nan"), float("inf"), "1", None):
        with pytest.raises(ConfigError, match="are not finite numbers"):
            check_rewards([number_match()], SUMS, weights=[weight])
    with pytest.raises(DataError, match="gold_column='gold' is not a column"):
        check_rewards([number_match()], SUMS, gold_column="gold")
    with pytest.raises(ConfigError, match="empty"):
        check_rewards([], SUMS)
    odd = number_match()
    odd.value_range = "0 to 1"
    with pytest.raises(ConfigError, match="declares value_range='0 to 1'"):
        check_rewards([odd], SUMS)


@pytest.mark.parametrize(
    "answer",
    [10**5000, "9" * 5000, float("nan"), None, True, [10**5000]],
    ids=["integer", "digits", "nan", "none", "true", "list"],
)
def test_gold_answers_that_nobody_can_use_end_in_a_report(answer: Any) -> None:
    report = checked([number_match()], [{"prompt": "How many?", "answer": answer}])
    assert report.names and "crash" not in report.names
