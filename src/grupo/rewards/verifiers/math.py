r"""Verifiers and rewards that compare the answer of a completion with a gold answer from the dataset, exactly.

An `Extraction` (`extraction.py`) finds the answer; by default it is the content of the last `\boxed{...}` or
`\fbox{...}`, else the last number of the text. Answers are the same (`latex.py`) where numbers have the same exact
value (fractions, decimals, roots, powers, π), tuples in parentheses have the same items in order, sets and bare lists
in any order, and anything else has the same LaTeX tokens. A unit counts only where both sides have one: `58 cm` is 58,
and is not `58 m`; `50\%` is 50.

A gold answer that cannot be read gives no reward at all: the verdict is undecided, it is counted, and there is one
warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from grupo.errors import ConfigError
from grupo.rewards.answers.exact_numbers import within_tolerance
from grupo.rewards.answers.extraction import (
    BOX_ELSE_NUMBER,
    NUMBER_REQUIREMENT,
    ExtractedAnswer,
    Extraction,
    completion_texts,
    float_tolerance,
    gold_number,
    last_number,
    whole_text_number,
)
from grupo.rewards.answers.ground_truth import ANSWER_REQUIREMENT, read_gold
from grupo.rewards.answers.latex import Answer, read_answer, same_answer
from grupo.rewards.value_range import declare_range
from grupo.rewards.verifiers.base import (
    AnswerReward,
    AnswerVerifier,
    Verdict,
    match_verdict,
    no_answer,
    unreadable_answer,
)
from grupo.rewards.verifiers.math_verify import MathVerify

ExtractionLike = Extraction | Mapping[str, Any] | None
"""An extraction, its fields (as recipes give them), or None for the default."""

TRL_EXTRACTION = Extraction(("boxed", "phrase", "last_number"))
"""TRL reads boxes and formulas after "answer is"; the last number is our addition."""


class NumberVerifier(AnswerVerifier):
    """Right where the number in the completion is the gold number; see `number_match`."""

    answer_requirement = NUMBER_REQUIREMENT

    def __init__(
        self,
        gold_column: str = "answer",
        extraction: ExtractionLike = None,
        tolerance: float = 0.0,
        *,
        name: str = "number_verifier",
    ) -> None:
        super().__init__(name, gold_column)
        self.extraction = Extraction.of(extraction, default=Extraction(("last_number",)))
        self.tolerance = checked_tolerance(tolerance)

    def can_read(self, gold: Any) -> bool:
        return gold_number(gold) is not None

    def judge(self, text: str, gold: Any) -> Verdict:
        expected = gold_number(gold)
        if expected is None:
            return unreadable_answer(gold)
        found = self.extraction.find(text)
        number = self.number(found)
        if number is None:
            return no_answer(found)
        return match_verdict(
            within_tolerance(number, expected, max(self.tolerance, float_tolerance(gold))), _quote_number(number), gold
        )

    def number(self, found: ExtractedAnswer) -> Fraction | None:
        """The number in an extracted answer; of a whole text, such as a box, only if all of it is one number."""
        if found.answer is None:
            return None
        is_text = self.extraction.strict and found.source != "last_number"
        return whole_text_number(found.answer) if is_text else last_number(found.answer)


class MathVerifier(AnswerVerifier):
    """Right where the answer of the completion is the gold answer; see `math_accuracy`."""

    answer_requirement = ANSWER_REQUIREMENT

    def __init__(
        self,
        gold_column: str = "answer",
        extraction: ExtractionLike = None,
        tolerance: float = 0.0,
        *,
        by_formula: bool = False,
        name: str = "math_verifier",
    ) -> None:
        super().__init__(name, gold_column)
        self.extraction = Extraction.of(extraction, default=BOX_ELSE_NUMBER)
        self.tolerance = checked_tolerance(tolerance)
        self.formulas = MathVerify(extraction=self.extraction) if by_formula else None
        """Verifier of the answers that are not exactly equal; None without one."""

    def can_read(self, gold: Any) -> bool:
        return read_gold(gold) is not None

    def judge(self, text: str, gold: Any) -> Verdict:
        return self.judge_all([text], [gold])[0]

    def judge_all(self, texts: Sequence[str], golds: Sequence[Any]) -> list[Verdict]:
        verdicts = [self._exactly(text, gold) for text, gold in zip(texts, golds, strict=True)]
        if self.formulas is None:
            return verdicts
        wrong = [index for index, verdict in enumerate(verdicts) if verdict.decision == "wrong"]
        by_formula = self.formulas.judge_all([texts[index] for index in wrong], [golds[index] for index in wrong])
        for index, verdict in zip(wrong, by_formula, strict=True):
            if verdict.decision == "right":
                verdicts[index] = verdict
        return verdicts

    def _exactly(self, text: str, gold: Any) -> Verdict:
        expected = read_gold(gold)
        if expected is None:
            return unreadable_answer(gold)
        found = self.extraction.find(text)
        answer = None if found.answer is None else read_answer(found.answer)
        if answer is None:
            return no_answer(found)
        return match_verdict(
            same_answer(answer, expected, max(self.tolerance, float_tolerance(gold))), str(answer), gold
        )

    def read(self, text: str) -> Answer | None:
        """The answer of a completion, in normal form."""
        written = self.extraction.find(text).answer
        return None if written is None else read_answer(written)


def number_match(
    gold_column: str = "answer", extraction: ExtractionLike = None, tolerance: float = 0.0
) -> AnswerReward:
    """1.0 where the last number of the completion equals the gold number exactly (72.0 is 72), else 0.0.

    `last_number` describes what a number is.

    Args:
        gold_column: dataset column with numbers.
        extraction: rule for finding the number; by default, it may be anywhere in the text.
        tolerance: largest difference, relative to the gold number; two whole numbers are always compared exactly.
    """
    return AnswerReward(NumberVerifier(gold_column, extraction, tolerance, name="number_match"))


def math_accuracy(
    gold_column: str = "answer",
    require_box: bool = False,
    extraction: ExtractionLike = None,
    tolerance: float = 0.0,
    verify: Literal["exact", "math-verify"] = "exact",
) -> AnswerReward:
    r"""1.0 where the answer of the completion is the gold answer, else 0.0: the last box, or else the last number.

    Args:
        gold_column: dataset column with numbers, formulas, or solutions that end in `\boxed{...}` or `#### answer`.
        require_box: only a box counts as the answer; otherwise, without any box, the last number of the text does.
        extraction: rule for finding the answer, in place of `require_box`.
        tolerance: largest difference of a number, relative to the gold number; two whole numbers are always compared
            exactly.
        verify: `exact`, or `math-verify` to compare formulas that are not exactly equal as well, in worker processes
            (`math_verify.py`; needs the extra `math`).

    Raises:
        ConfigError: another `verify`, `math-verify` is not installed, or both `require_box` and `extraction`.
    """
    if verify not in ("exact", "math-verify"):
        raise ConfigError(f"verify={verify!r} is not a comparison of math_accuracy: set 'exact' or 'math-verify'.")
    if require_box and extraction is not None:
        raise ConfigError(
            "require_box=True and extraction are two rules for finding the answer; give one of them. "
            "extraction={'sources': ['boxed']} is require_box=True."
        )
    where = Extraction(("boxed",)) if require_box else extraction
    by_formula = verify == "math-verify"
    return AnswerReward(MathVerifier(gold_column, where, tolerance, by_formula=by_formula, name="math_accuracy"))


def boxed_accuracy(gold_column: str = "answer") -> AnswerReward:
    r"""1.0 where the last `\boxed{...}` of the completion holds the gold answer, else 0.0: `math_accuracy` without a
    fallback to the last number of the text."""
    return AnswerReward(MathVerifier(gold_column, Extraction(("boxed",)), name="boxed_accuracy"))


LogExtra = Callable[[str, list[Any]], None]


@declare_range(0.0, 1.0)
def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any], log_extra: LogExtra | None = None, **kwargs: Any
) -> list[float | None]:
    """`math_accuracy` with the signature and the logged columns of TRL's function of this name.

    The answer is the last box, else the text after "answer is", else the last number.
    """
    return _trl_scores("accuracy_reward", completion_texts(completions), solution, log_extra)


@declare_range(0.0, 1.0)
def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of the text after the reasoning, as TRL's function of this name; 0.0 without an end of it.

    Args:
        reasoning_delimiters: marks that end the reasoning, by default `</think>`; the answer follows the last of any.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    texts = [_after_last(delimiters, text) for text in completion_texts(completions)]
    scores = _trl_scores("reasoning_accuracy_reward", texts, solution, log_extra, "[incomplete reasoning]")
    return [0.0 if text is None else score for text, score in zip(texts, scores, strict=True)]


def _trl_scores(
    name: str, texts: Sequence[str | None], solution: Sequence[Any], log_extra: LogExtra | None, absent: str = "[none]"
) -> list[float | None]:
    """Scores with TRL's logged columns; `absent` is logged as the answer of a text that is None."""
    verifier = MathVerifier("solution", TRL_EXTRACTION, name=name)
    if log_extra is not None:
        answers = [absent if text is None else str(verifier.read(text) or "[none]") for text in texts]
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [str(read_gold(gold) or "[unreadable]") for gold in solution])
        log_extra("answer_parsed", answers)
    return AnswerReward(verifier)([text or "" for text in texts], solution=solution)


def _after_last(delimiters: Sequence[str], text: str) -> str | None:
    ends = [text.rfind(delimiter) + len(delimiter) for delimiter in delimiters if delimiter in text]
    return text[max(ends) :] if ends else None


def checked_tolerance(tolerance: float) -> float:
    if not 0 <= tolerance < 1:
        raise ConfigError(
            f"tolerance={tolerance} cannot be a relative difference: set a share of the gold number, from 0 (exact) to "
            "below 1."
        )
    return tolerance


def _quote_number(number: Fraction) -> str:
    return str(number) if number.denominator.bit_length() + number.numerator.bit_length() < 4096 else "a long number"
