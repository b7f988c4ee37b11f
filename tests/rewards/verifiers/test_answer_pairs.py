"""The labelled table of answers: no wrong one is taken for right, and one formula for wrong."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from grupo.rewards import Extraction, MathVerify, math_accuracy
from grupo.rewards.answers.latex import read_answer, same_answer

TABLE = yaml.safe_load((Path(__file__).parent / "answer_pairs.yaml").read_text(encoding="utf-8"))
PAIRS = [
    (kind, completion, gold, label == "same")
    for kind, labels in TABLE.items()
    for label in ("same", "different")
    for completion, gold in labels[label]
]
EVERYWHERE = math_accuracy(extraction=Extraction())


def right(completion: Any, gold: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every gold answer of the table is usable
        (score,) = EVERYWHERE([completion], answer=[gold])
    return score == 1.0


def test_the_table_is_large_and_says_nothing_twice() -> None:
    assert len(PAIRS) >= 150
    assert len({(completion, repr(gold)) for _, completion, gold, _ in PAIRS}) == len(PAIRS)
    assert all(len(labels) == 2 for labels in TABLE.values())


def test_no_wrong_answer_counts_as_right_and_only_a_formula_is_missed() -> None:
    differ = [(completion, gold) for _, completion, gold, is_same in PAIRS if right(completion, gold) != is_same]
    assert differ == [(r"\boxed{2(x+1)}", "2x + 2")]


def test_math_verify_adds_formulas_and_rounded_numbers() -> None:
    pytest.importorskip("math_verify")
    verifier = MathVerify(extraction=Extraction(), workers=1)
    verdicts = verifier.judge_all([pair[1] for pair in PAIRS], [pair[2] for pair in PAIRS])
    verifier.close()
    pairs = zip(PAIRS, verdicts, strict=True)
    differ = [pair[1] for pair, verdict in pairs if (verdict.decision == "right") != pair[3]]
    assert differ == [r"\boxed{0.3333333333}", r"\boxed{1.41421356}"]


def test_the_lenient_switch_finds_more() -> None:
    """It passes over broken places and reads sentences."""
    lenient = math_accuracy(extraction={"strict": False})
    found = [lenient([completion], answer=[gold]) == [1.0] for _, completion, gold, label in PAIRS if label]
    assert sum(found) >= 0.98 * len(found)
    for completion in (r"\boxed{} so 42", "<answer>That makes 42 apples in all</answer>", "so 42 (<answer>)"):
        assert not right(completion, 42)
        assert lenient([completion], answer=[42]) == [1.0]


def test_sameness_is_symmetric() -> None:
    written = [read_answer(str(gold)) for _, _, gold, _ in PAIRS]
    answers = list(dict.fromkeys(answer for answer in written if answer is not None))
    for first, second in itertools.combinations(answers, 2):
        assert same_answer(first, second) == same_answer(second, first)


def test_a_comparison_that_only_reads_digits_fails_here() -> None:
    """The table tells a broken comparison from a working one."""

    def digits(text: Any) -> str:
        return "".join(filter(str.isdigit, str(text)))

    assert any(digits(completion) == digits(gold) for _, completion, gold, label in PAIRS if not label)
    assert any(digits(completion) != digits(gold) for _, completion, gold, label in PAIRS if label)
