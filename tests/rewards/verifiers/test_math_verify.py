"""Formulas compared by math-verify behind the exact stage, and by our own numeric check."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.errors import ConfigError, RewardError
from grupo.rewards import RewardRunner, check_rewards, math_accuracy, reward_from
from grupo.rewards.verifiers.agreement import Difference, disagreement
from grupo.rewards.verifiers.base import AnswerVerifier, Decision, Verdict
from grupo.rewards.verifiers.math_verify import MathVerify, NumericCheck
from tests.rewards.verifiers import test_math as tables

pytest.importorskip("math_verify")

LIMIT = 1.0


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerify]:
    verifier = MathVerify(timeout=LIMIT, workers=2)
    verifier.judge_all([r"\boxed{x+1}", r"\boxed{y+1}"], ["1+x", "1+y"])
    yield verifier
    verifier.close()


@pytest.fixture(scope="module")
def numeric() -> Iterator[NumericCheck]:
    numeric = NumericCheck(timeout=LIMIT, workers=2)
    numeric.judge_all([r"\boxed{x+1}", r"\boxed{y+1}"], ["1+x", "1+y"])
    yield numeric
    numeric.close()


def decided(*verdicts: Verdict) -> list[bool | None]:
    """True for right, False for wrong, None for undecided."""
    return [{"right": True, "wrong": False, "undecided": None}[verdict.decision] for verdict in verdicts]


def judged(verifier: AnswerVerifier, text: str, gold: Any) -> bool | None:
    return decided(verifier.judge(text, gold))[0]


def boxed(answer: str) -> str:
    return rf"so \boxed{{{answer}}}"


def decided_rows(verifier: AnswerVerifier, rows: Iterable[tuple[Any, ...]]) -> list[bool | None]:
    """The verdicts on rows (answer, gold, ...), in one call."""
    return decided(*verifier.judge_all([boxed(row[0]) for row in rows], [row[1] for row in rows]))


# What the exact stage cannot see, with the verdict of math-verify and of the numeric check (None: undecided)
FORMULAS: list[tuple[str, str, bool, bool | None]] = [
    ("x+1", "1+x", True, True),
    ("(x+1)^2", "x^2+2x+1", True, True),
    ("(x+1)^2", "x^2+2x+2", False, False),
    (r"\frac{x}{2}+\frac{x}{2}", "x+0", True, True),
    (r"\frac{x}{2}+\frac{x}{2}", "x", True, True),  # math-verify alone compares a lone variable by its name
    (r"\sin^2 x+\cos^2 x", "1", True, True),
    (r"\sin 2x", r"2\sin x\cos x", True, True),
    (r"\frac{x^2-1}{x-1}", "x+1", True, True),
    ("x-1", "1-x", False, False),
    ("2^{10}x", "1024x", True, True),
    ("5!", "120", True, True),
    ("6!", "120", False, False),
    (r"e^{2x}", r"(e^x)^2", True, True),
    (r"\ln 8", r"3\ln 2", True, True),
    (r"\ln 9", r"3\ln 2", False, False),
    ("3+4i", "4i+3", True, True),
    (r"\{x, y\}", r"\{y, x\}", True, True),
    (r"(x+1, 2)", r"(1+x, 2)", True, True),
    (r"(2, x+1)", r"(1+x, 2)", False, False),
    (r"1 \pm \sqrt{2}", r"\{1+\sqrt{2}, 1-\sqrt{2}\}", True, True),
    ("y = 2x + 1", "y = 1 + 2x", True, True),
    ("2x + y = 3", "y + 2x = 3", True, True),
    ("2x + y = 3", "2x + y = 4", False, None),
    (r"\{x+1\}", "1+x", True, None),
    ("n = 68n^2 + 79", "n = 9 + 4n^2", False, False),  # math-verify alone: both have no solution, so they are the same
    ("x^2 − 1", "(x-1)(x+1)", True, True),  # a Unicode minus
    ("2·x", "2x", True, True),
    ("x²+√2", r"x^2+\sqrt{2}", True, True),
    (r"\text{yes}", "no", False, None),
    ("x > 5", "5 < x", True, None),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", False, None),
]


def test_formulas(verifier: MathVerify, numeric: NumericCheck) -> None:
    assert decided_rows(verifier, FORMULAS) == [by_math_verify for _, _, by_math_verify, _ in FORMULAS]
    by_values = [by_values for *_, by_values in FORMULAS]
    assert decided_rows(numeric, FORMULAS) == by_values
    assert decided_rows(numeric, [(gold, answer) for answer, gold, *_ in FORMULAS]) == by_values, "symmetric"


def test_what_the_exact_stage_decides_stays(verifier: MathVerify, numeric: NumericCheck) -> None:
    table = tables.NESTED + tables.SEPARATORS + tables.WRAPPERS + tables.GOLDS
    # A written decimal may be a rounded one, says math-verify: see below.
    table = [row for row in table if row[:2] != (r"\boxed{\frac13}", "0.3333333333333333")]
    texts, golds = [completion or "" for completion, *_ in table], [gold for _, gold, _ in table]
    expected = [None if reward is None else bool(reward) for *_, reward in table]
    assert decided(*verifier.judge_all(texts, golds)) == expected
    by_values = decided(*numeric.judge_all(texts, golds))
    assert [one for one, right in zip(by_values, expected, strict=True) if one not in (None, right)] == []


# Answers that try to be several at once, or that a lenient parser reads as the gold (always the second entry)
HEDGES = [
    ("5 or 7", "7"),
    (r"5 \text{ or } 7", "7"),
    ("5, 7", "7"),
    ("5; 7", "7"),
    ("not 7", "7"),
    ("the answer is 7", "7"),
    (r"5 $7$", "7"),
    (r"\{5, 7\}", "7"),
    (r"5 \pm 2", "7"),
    ("7?", "8"),
    ("58 cm", r"58\text{ m}"),
    ("(7, 3)", "(3, 7)"),
    (r"\{3, 7\}", "(3, 7)"),
    ("3,7", "3.7"),
    ("0.0000001", "0.0000002"),
    ("1000000", "1000001"),
    ("1e-9", "0"),
    ("37", "3,7"),
    ("x", "y"),
    ("x = 5", "y = 5"),
    ("A", "B"),
    ("", "5"),
    (r"\text{}", "5"),
    (r"\frac{}{}", "5"),
    (r"\infty", "5"),
    (r"\frac{1}{0}", "5"),
]


def test_wrong_answers_stay_wrong(verifier: MathVerify, numeric: NumericCheck) -> None:
    assert decided_rows(verifier, HEDGES) == [False] * len(HEDGES)
    assert True not in decided_rows(numeric, HEDGES)


# What math-verify alone takes for the same: it drops units and capitals, and reads some LaTeX in its own way
MISREAD = [
    ("2t", "2m"),
    ("y = t", "y = m"),
    ("x + s", "x + g"),
    ("2A", "2a"),
    (r"\frac125 x", r"\frac{1}{25}x"),
    (r"10\,000x", "0"),
    ("1 2", "3"),
    ("x, x, y", "x, y"),
]


def test_what_math_verify_misreads_is_wrong(verifier: MathVerify) -> None:
    assert decided_rows(verifier, MISREAD) == [False] * len(MISREAD)


def test_rounded_numbers_and_percentages(verifier: MathVerify) -> None:
    """math-verify compares decimals at six places. A decimal in a formula is the number that is written."""
    rows = {
        ("0.333333", r"\frac13"): True,
        ("0.333", r"\frac13"): False,
        ("3.141593", r"\pi"): True,
        ("3.14", r"\pi"): False,
        (r"50\%", "0.5"): True,
        (r"50\%", "0.4"): False,
        ("0.3333333333333333", r"\frac13"): True,
        ("0.1x", r"\frac{x}{10}"): True,
    }
    assert decided_rows(verifier, rows) == list(rows.values())


SLOW = {
    "power": "9^{9^{9^{9}}}",
    "power of a sum": "(x+1)^{99999999}",
    "binomial": r"\binom{99999999}{49999999}",
    "braces": "{" * 190 + "x" + "}" * 190,
}
"""Each of them is stopped at the time limit."""
BOMBS = {
    **SLOW,
    "integral": r"\int_0^1 \sin(x^{x^{x}}) dx",
    "fractions": r"\frac{1}{" * 40 + "x" + "}" * 40,
    "roots": r"\sqrt{" * 50 + "x" + "}" * 50,
    "product": "*".join(f"(x+{i})" for i in range(60)),
    "limit": r"\lim_{n \to \infty} (1+\frac{1}{n})^{n^{n}}",
    "long": "x+" * 5000 + "1",
    "digits": "x+" + "9" * 390,
}


def test_absurd_answers_are_wrong_in_time_and_cost_no_neighbour_its_score(verifier: MathVerify) -> None:
    before = verifier.limit_hits.total()
    for answer in BOMBS.values():
        judged(verifier, boxed("x+5"), "x+7")  # the worker that the last answer may have cost is there again
        started = time.monotonic()
        neighbours = [boxed(answer), boxed("7 + x"), boxed("x+8")]
        assert decided(*verifier.judge_all(neighbours, ["x+7"] * 3)) == [False, True, False]
        assert time.monotonic() - started < LIMIT + 5, "a busy machine may take seconds for a new worker"
    assert verifier.limit_hits.total() - before >= len(SLOW)


def test_a_gold_that_cannot_be_evaluated_pays_nothing_and_is_asked_once(
    verifier: MathVerify, numeric: NumericCheck
) -> None:
    before, gold = verifier.limit_hits.copy(), r"\sin(9^{9^{9^{9}}})+x"
    assert decided(*verifier.judge_all([boxed("x+5")] * 64, [gold] * 64)) == [False] * 64
    assert verifier.limit_hits - before == {"timeout": 1}
    assert judged(numeric, boxed("x+5"), gold) is None


EXAMPLES = [boxed(answer) for answer, *_ in FORMULAS]
GOLDS = [gold for _, gold, *_ in FORMULAS]
EXPECTED = [right for _, _, right, _ in FORMULAS]


def judge_in_child(verifier: MathVerify, connection: Any) -> None:
    connection.send(decided(*verifier.judge_all(EXAMPLES, GOLDS)))
    verifier.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_same_in_a_child_process_in_threads_and_on_an_event_loop(verifier: MathVerify) -> None:
    """In a child that is forked while the parent has workers; a spawned one gets a pickled verifier, see below."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=judge_in_child, args=(verifier, theirs), daemon=True)
    child.start()
    assert ours.poll(60) and ours.recv() == EXPECTED
    child.join(20)
    assert child.exitcode == 0

    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(decided(*verifier.judge_all(EXAMPLES, GOLDS)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def on_loop() -> list[bool | None]:
        return decided(*verifier.judge_all(EXAMPLES, GOLDS))

    assert [*results, asyncio.run(on_loop())] == [EXPECTED] * 4


# The reward ----------------------------------------------------------------------------------------------------------


def test_math_accuracy_takes_the_verifier_by_name() -> None:
    reward = math_accuracy(verify="math-verify")
    copy = pickle.loads(pickle.dumps(reward))
    completions = [boxed("1+x"), boxed("x+2"), "", None, [{"role": "assistant", "content": boxed("x + 1")}]]
    runner = RewardRunner([math_accuracy(), copy])
    table = runner.score(
        prompts=["p"] * 5,
        completions=completions,
        completion_ids=[[1]] * 5,
        columns={"answer": ["x+1"] * 5},
    )
    assert [row[0] for row in table.scores] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [row[1] for row in table.scores] == [1.0, 0.0, 0.0, 0.0, 1.0]
    copy.verifier.formulas.close()


def test_require_box_reaches_the_verifier() -> None:
    reward = math_accuracy(require_box=True, verify="math-verify")
    assert reward(["it is 5", boxed("5")], answer=[5, 5]) == [0.0, 1.0]


def test_unusable_golds_are_reported_and_pay_nothing() -> None:
    reward = math_accuracy(verify="math-verify")
    with pytest.warns(UserWarning, match=r"cannot read 3 of 4 gold answers in 'answer'.*see the figure"):
        golds = ["see the figure", None, "", "5"]
        assert reward([boxed("5"), boxed("x"), boxed(""), boxed("5")], answer=golds) == [None, None, None, 1.0]
    assert reward.unusable_golds == 3


def test_other_verifiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="set 'exact' or 'math-verify'"):
        math_accuracy(verify="sympy")  # type: ignore[arg-type]


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install math-verify"):
        math_accuracy(verify="math-verify")


# Arbitrary text ------------------------------------------------------------------------------------------------------

LATEX = st.text("x12.,+-^_{}()[]\\!|=%$ √π²é\U0001f600", max_size=30) | st.lists(
    st.sampled_from([r"\frac", r"\sqrt", "{", "}", "x", "2", "+", "^", r"\sin ", "(", ")", "!", r"\pm ", ",", "="]),
    max_size=14,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(answers=st.lists(LATEX | st.text(max_size=30), min_size=1, max_size=8), gold=LATEX)
def test_never_an_exception_and_never_a_point_for_nothing(verifier: MathVerify, answers: list[str], gold: str) -> None:
    verdicts = decided(*verifier.judge_all([*(boxed(answer) for answer in answers), ""], [gold] * (len(answers) + 1)))
    assert verdicts[-1] is not True


@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(LATEX | st.text(max_size=40), LATEX), min_size=1, max_size=12))
def test_values_never_raise_and_are_symmetric(numeric: NumericCheck, pairs: list[tuple[str, str]]) -> None:
    same = numeric._ask([(answer, gold, True) for answer, gold in pairs])
    assert same == numeric._ask([(gold, answer, True) for answer, gold in pairs])
    assert False not in numeric._ask([(answer, answer, True) for answer, _ in pairs])
    assert True not in decided(*numeric.judge_all([""] * len(pairs), [gold for _, gold in pairs]))


def test_values(numeric: NumericCheck) -> None:
    rows = {
        ("1,250", "1250"): True,
        ("3,7", "37"): False,
        ("[0, 1)", "[0,1)"): True,
        ("[0, 1)", "(0,1)"): False,
        (r"(-\infty, 2]", r"(-∞, 2]"): True,
        ("10^{30}", "10^{30}+1"): False,
        ("10^{50}", "10^{50}+1"): None,
        (r"\sqrt[3]{-8}", "-2"): None,
        (r"\log_2 8", "3"): True,
        (r"\log 8", r"\log 8"): None,
        ("x_1+x_2", "x_2+x_1"): True,
        ("x_1", "x_2"): False,
        ("58 cm", "58"): None,
        (r"50\%", "50"): None,
        (r"90^\circ", "90"): None,
        (r"1\frac{1}{2}", r"\frac32"): None,
        (r"(\sqrt2+\sqrt3)^2", r"5+2\sqrt6"): True,
        ("no", "on"): None,
        # Where all variables are positive, and elsewhere
        (r"\sqrt{x^2}", "x"): None,
        (r"\sqrt{x^2}", "|x|"): True,
        (r"\sqrt{x^2}", "x+1"): False,
    }
    assert decided_rows(numeric, rows) == list(rows.values())
    assert decided_rows(numeric, [(b, a) for a, b in rows]) == list(rows.values()), "symmetric"


# Two verifiers -------------------------------------------------------------------------------------------------------


class Says(AnswerVerifier):
    answer_requirement = "Anything will do."

    def __init__(self, *decisions: Decision) -> None:
        super().__init__("says", "answer")
        self.decisions = list(decisions)

    def can_read(self, gold: Any) -> bool:
        return True

    def judge(self, text: str, gold: Any) -> Verdict:
        return Verdict(self.decisions.pop(0), "")


def test_disagreement_counts_what_both_decided() -> None:
    one = Says("right", "wrong", "undecided", "right", "right")
    other = Says("right", "right", "right", "undecided", "right")
    found = disagreement(one, other, list("abcde"), range(5))
    assert (found.total, found.compared) == (5, 3)
    assert found.rate == pytest.approx(1 / 3)
    assert found.differences == (Difference(1, "b", 1, False, True),)
    nothing = disagreement(Says("undecided"), Says("right"), ["a"], ["b"])
    assert math.isnan(nothing.rate)
    with pytest.raises(RewardError, match="2 gold answers for 1 completion"):
        disagreement(Says(), Says(), ["a"], ["b", "c"])


def test_disagreement_of_the_two_on_formulas(verifier: MathVerify, numeric: NumericCheck) -> None:
    found = disagreement(verifier, numeric, EXAMPLES, GOLDS)
    assert found.compared == sum(by_values is not None for *_, by_values in FORMULAS)
    assert found.differences == ()
    alone = MathVerify(compare_values=False)
    found = disagreement(alone, numeric, EXAMPLES, GOLDS)
    alone.close()
    assert [difference.gold for difference in found.differences] == ["x", "n = 9 + 4n^2"]
    (rounded,) = disagreement(verifier, numeric, [boxed("0.333333")], [r"\frac13"]).differences
    assert rounded.verdict_a and not rounded.verdict_b


def test_both_are_verifiers_as_rewards_and_checks_take_them(verifier: MathVerify, numeric: NumericCheck) -> None:
    completions, golds = (
        [boxed("1+x"), boxed("x+2"), "", boxed("x+1"), boxed("58 cm")],
        ["x+1", "x+1", "x+1", None, "58"],
    )
    with pytest.warns(UserWarning, match="math_verify cannot read 1 of 5 gold answers"):
        assert reward_from(verifier, right=1.0)(completions, answer=golds) == [1.0, 0.0, 0.0, None, 1.0]
    with pytest.warns(UserWarning, match="numeric_check cannot read 1 of 5 gold answers"):
        assert reward_from(numeric, right=1.0)(completions, answer=golds) == [1.0, 0.0, 0.0, None, None]
    rows = [{"prompt": f"q{place}", "answer": str(40 + place)} for place in range(8)]
    assert check_rewards(math_accuracy(), rows, verifiers=[verifier, numeric]).faults == ()

    def mentions(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]

    faults = check_rewards(mentions, rows, verifiers=[numeric]).faults
    assert ("verifiers-disagree", "mentions + numeric_check") in [(fault.name, fault.reward) for fault in faults]


def test_the_examples_of_the_page_run() -> None:
    page = (Path(__file__).parents[3] / "docs" / "math_verification.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(example, {})
