r"""Verifiers that compare formulas: by `math-verify`, and by values at a few points.

The exact comparison comes first and is final where it can be: equal answers are right; different units, different lists
of numbers, and numbers that no rounding explains are wrong. What is left goes to worker processes with limits, because
parsing and simplifying can take for ever (`9^{9^{9}}`). There the values of both formulas decide where they can
(`numeric_equivalence.py`), and `math-verify` decides about the others. Its own time-outs are signals, which work in a
main thread only, and are off.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers.exact_numbers import ExactNumber
from grupo.rewards.answers.extraction import BOX_ELSE_NUMBER, ExtractedAnswer, Extraction, float_tolerance, quote_value
from grupo.rewards.answers.ground_truth import ANSWER_REQUIREMENT, gold_text, read_gold
from grupo.rewards.answers.latex import (
    MAX_LENGTH,
    THOUSANDS_MARK,
    Answer,
    AnswerList,
    is_prose,
    read_answer,
    same_answer,
)
from grupo.rewards.verifiers.base import AnswerVerifier, Verdict, match_verdict, no_answer, unreadable_answer
from grupo.utils.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

ROUNDED = 1e-5
"""Largest relative difference of two numbers of which one may be a rounded value of the other."""

Question = tuple[str, str, bool]
"""(answer, gold answer, compare values): the first two are LaTeX."""


class _FormulaVerifier(AnswerVerifier):
    """A verifier that compares answers in worker processes, which start when they are first needed.

    It can be pickled, and used from any thread or process.
    """

    answer_requirement = ANSWER_REQUIREMENT

    def __init__(
        self,
        name: str,
        gold_column: str,
        extraction: Extraction,
        compare: Callable[[Question], bool | None],
        timeout: float,
        memory_mb: int,
        workers: int | None,
    ) -> None:
        super().__init__(name, gold_column)
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "The comparison of formulas needs the package math-verify. Install it (pip install math-verify), or "
                "set verify='exact'."
            )
        self.extraction = extraction
        self.limit_hits: Counter[str] = Counter()
        """Number of comparisons that reached a limit, by reason: timeout, memory, died, error."""
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.workers = workers
        self._pool = WorkerPool(compare, prepare=warm_up, timeout=timeout, memory_mb=memory_mb, workers=workers)

    @property
    def gave_up(self) -> Counter[str]:
        """Former name of `limit_hits`."""
        logger.warning("MathVerify.gave_up is now called limit_hits.")
        return self.limit_hits

    def can_read(self, gold: Any) -> bool:
        return read_gold(gold) is not None

    def judge(self, text: str, gold: Any) -> Verdict:
        return self.judge_all([text], [gold])[0]

    def judge_all(self, texts: Sequence[str], golds: Sequence[Any]) -> list[Verdict]:
        """The verdicts on many completions, in parallel; equal questions are asked once."""
        verdicts: dict[int, Verdict] = {}
        questions: dict[Question, list[int]] = {}
        for index, (text, gold) in enumerate(zip(texts, golds, strict=True)):
            verdict = self._without_worker(self.extraction.find(text), gold)
            if isinstance(verdict, Verdict):
                verdicts[index] = verdict
            else:
                questions.setdefault(verdict, []).append(index)
        for question, same in zip(questions, self._ask(list(questions)), strict=True):
            for index in questions[question]:
                verdicts[index] = self._verdict(same, question[0], golds[index])
        return [verdicts[index] for index in range(len(verdicts))]

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        self._pool.close()

    def _without_worker(self, found: ExtractedAnswer, gold: Any) -> Verdict | Question:
        """The verdict where it is certain already, else the question for a worker."""
        expected = read_gold(gold)
        if expected is None:
            return unreadable_answer(gold)
        answer = None if found.answer is None else read_answer(found.answer)
        if found.answer is None or answer is None:
            return no_answer(found)
        return self._compare_exactly(answer, expected, (found.answer, gold_text(gold) or "", True), gold)

    @abstractmethod
    def _compare_exactly(self, answer: Answer, expected: Answer, question: Question, gold: Any) -> Verdict | Question:
        """`_without_worker` for an answer that can be read."""

    @abstractmethod
    def _verdict(self, same: bool | None, answer: str, gold: Any) -> Verdict:
        """The verdict from the result of a worker, which is None where it reached a limit, or could not decide."""

    def _ask(self, questions: list[Question]) -> list[bool | None]:
        results = self._pool.map(questions)
        self.limit_hits.update(result.status for result in results if result.status != "done")
        return [result.value for result in results]


class MathVerify(_FormulaVerifier):
    """Decides whether the answer of a completion is the gold answer, up to equivalence of formulas.

    `math_accuracy(verify="math-verify")` is the reward that asks it, and `disagreement` compares it with others.
    """

    def __init__(
        self,
        gold_column: str = "answer",
        *,
        extraction: Extraction = BOX_ELSE_NUMBER,
        compare_values: bool = True,
        timeout: float = 2.0,
        memory_mb: int = 1024,
        workers: int | None = None,
        name: str = "math_verify",
    ) -> None:
        """
        Args:
            gold_column: dataset column with numbers, formulas, or solutions that end in an answer.
            extraction: rule for finding the answer of a completion.
            compare_values: where the values of the formulas decide, math-verify is not asked. Without it, math-verify
                is on its own, as a comparison of the two needs it.
            timeout: seconds for one comparison; one that takes longer counts as wrong.
            memory_mb: MiB of address space of a worker process, where the platform can limit it.
            workers: processes at most; None for one per CPU that this process may use, 4 at most.
            name: of its metrics.

        Raises:
            ConfigError: `math-verify` is not installed.
        """
        super().__init__(name, gold_column, extraction, same_formula, timeout, memory_mb, workers)
        self.compare_values = compare_values

    def _compare_exactly(self, answer: Answer, expected: Answer, question: Question, gold: Any) -> Verdict | Question:
        same = exact_verdict(answer, expected, float_tolerance(gold))
        if same is not None or any(map(_not_parseable, question[:2])):
            return match_verdict(same is True, question[0], gold)
        may_be_rounded = isinstance(answer.form, ExactNumber) and isinstance(expected.form, ExactNumber)
        return (*question[:2], self.compare_values and not may_be_rounded)

    def _verdict(self, same: bool | None, answer: str, gold: Any) -> Verdict:
        if same:
            return Verdict("right", f"it is a form of the gold answer {quote_value(gold)}")
        return match_verdict(False, answer, gold)


class NumericCheck(_FormulaVerifier):
    """Decides whether the answer of a completion has the values of the gold answer; undecided where it cannot tell.

    A check of `MathVerify`, for `disagreement`: both read LaTeX with math-verify, and compare in different ways.
    """

    def __init__(
        self,
        gold_column: str = "answer",
        *,
        extraction: Extraction = BOX_ELSE_NUMBER,
        timeout: float = 2.0,
        memory_mb: int = 1024,
        workers: int | None = None,
        name: str = "numeric_check",
    ) -> None:
        """See `MathVerify`; a comparison that takes longer than `timeout` is undecided."""
        super().__init__(name, gold_column, extraction, same_values, timeout, memory_mb, workers)

    def _compare_exactly(self, answer: Answer, expected: Answer, question: Question, gold: Any) -> Verdict | Question:
        if answer.unit or expected.unit or any(map(_not_parseable, question[:2])):
            return self._verdict(None, question[0], gold)
        return question

    def _verdict(self, same: bool | None, answer: str, gold: Any) -> Verdict:
        if same is False and float_tolerance(gold):
            return Verdict("undecided", f"{quote_value(gold)} is a float, and this comparison is exact")
        if same is None:
            return Verdict("undecided", f"{answer!r:.80} or {quote_value(gold)} has no value here")
        return match_verdict(same, answer, gold)


def exact_verdict(answer: Answer, gold: Answer, tolerance: float = 0.0) -> bool | None:
    """Result of the exact comparison where it is certain; None where different texts may be equal.

    Args:
        tolerance: relative error of a gold answer that is a float (`float_tolerance`).
    """
    if same_answer(answer, gold, tolerance):
        return True
    if tolerance and isinstance(answer.form, ExactNumber):
        return False
    if answer.unit is not None and gold.unit is not None and answer.unit != gold.unit:
        return False  # math-verify drops units: 58 cm would be 58 m
    if "percent" in (answer.unit, gold.unit):
        return None  # 50 % may be meant as 1/2
    if isinstance(answer.form, ExactNumber) and isinstance(gold.form, ExactNumber):
        # One may be a rounded value of the other. math-verify rounds to six decimals, which alone would make all very
        # small numbers equal.
        return None if _are_near(answer.form, gold.form) else False
    return False if _is_numeric(answer.form) and _is_numeric(gold.form) else None


def _is_numeric(form: object) -> bool:
    """Whether a form is a number or a list of numbers, which the exact comparison decides."""
    if isinstance(form, AnswerList):
        return all(isinstance(item, ExactNumber) for item in form.items)
    return isinstance(form, ExactNumber)


def _are_near(a: ExactNumber, b: ExactNumber) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=ROUNDED)
    except (OverflowError, ValueError):  # no float is close to one of them
        return False


_TWO_NUMBERS = re.compile(r"(?<![_^0-9])[0-9]+\s+[0-9]+(?![0-9]*/)")


def _not_parseable(written: str) -> bool:
    """Whether a text is too long to parse in time, a sentence, in which a parser would find the number that suits, or
    has two numbers side by side, which math-verify adds."""
    return len(written) > MAX_LENGTH or is_prose(written) or _TWO_NUMBERS.search(written) is not None


# In the worker -------------------------------------------------------------------------------------------------------

_UNICODE = str.maketrans(
    {
        "−": "-", "·": r"\cdot ", "⋅": r"\cdot ", "×": r"\times ", "÷": r"\div ", "√": r"\sqrt ", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "²": "^2", "³": "^3",
        "°": r"^\circ ",
    }
)  # fmt: skip
"""Characters that math-verify does not read, or only in some places."""
_FRACTION_OF_TWO_DIGITS = re.compile(r"\\[dtc]?frac\s*([0-9])\s*([0-9])")
"""`\\frac125` is a half times 5 to LaTeX, and 1/25 to math-verify."""


def _rewritten(written: str) -> str:
    """LaTeX that math-verify reads as LaTeX does."""
    written = THOUSANDS_MARK.sub("", written.translate(_UNICODE))  # else `10\,000x` is 10 times 0 times x
    return _FRACTION_OF_TWO_DIGITS.sub(r"\\frac{\1}{\2}", written)


def warm_up() -> None:
    """Import math-verify and compare a few formulas, and silence its warning that time-outs are off.

    Sympy imports its parts when they are first needed, which would count in the time limit of somebody's answer.
    """
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    for pair in ((r"\frac{x + 1}{2}", r"\frac{1 + x}{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\sin 2x", r"2\sin x\cos x")):
        for compare_values in (True, False):
            same_formula((*pair, compare_values))


def same_formula(question: Question) -> bool:
    """Whether two answers are the same: by their values, if asked for and where they decide, else by math-verify."""
    from math_verify import verify

    answer, gold, compare_values = question
    same = same_values(question) if compare_values else None
    return bool(verify(_parsed(gold), _parsed(answer), timeout_seconds=None)) if same is None else same


_NO_VALUE = re.compile(
    # Words, whose letters a parser would multiply
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[A-Za-z]+\s+[A-Za-z])|[0-9]\s+[A-Za-z]{2}|[0-9](?:mm|cm|km|kg)(?![A-Za-z])"
    r"|\\(?:text|math|mbox|operatorname|bm|boldsymbol|underline)|\A[A-Za-z\s{}]{2,}\Z"
    # Logarithms without a base, percentages, mixed numbers or products
    r"|\\log(?!\s*_)|%|[0-9]\s*\\[dtc]?frac"
)


def same_values(question: Question) -> bool | None:
    """Whether two answers have the same values; None where that is undecided."""
    from grupo.rewards.verifiers.numeric_equivalence import numerically_equal

    if any(map(_NO_VALUE.search, question[:2])):
        return None
    try:
        return numerically_equal(*map(_expression, question[:2]))
    except Exception:  # anything: latex2sympy and sympy raise many kinds of errors on texts that they do not understand
        return None


@functools.lru_cache(maxsize=64)
def _expression(written: str) -> Any:
    """The sympy expression of a LaTeX text as it is written: math-verify itself drops units (`2t` is 2 to it) and takes
    upper and lower case for the same."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    as_written = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    case_sensitive = ConversionConfig(lowercase_symbols=False)
    return latex2sympy(
        _rewritten(written), is_real=True, normalization_config=as_written, conversion_config=case_sensitive
    )


@functools.lru_cache(maxsize=64)
def _parsed(written: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # In a box the whole text is the answer; without `first_match`, a part that suits would be searched in it.
    boxed = rf"\boxed{{{_rewritten(written)}}}"
    return list(
        parse(boxed, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)  # type: ignore[arg-type]
    )
