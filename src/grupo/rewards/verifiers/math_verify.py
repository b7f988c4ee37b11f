r"""Whether two formulas are the same, by `math-verify` behind the exact comparison of `math.py`.

The exact comparison comes first and is final where it can be: equal answers are right; different units, different lists
of numbers, and numbers that no rounding explains are wrong; so are formulas with different values (`values.py`). What
is left goes to `math-verify`, which turns both into sympy expressions and tries to simplify their difference. That can
take for ever (`9^{9^{9}}`), so it runs in worker processes with limits; its own time-outs are signals, which work in a
main thread only, and are off.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers.exact_numbers import ExactNumber
from grupo.rewards.answers.extraction import BOX_ELSE_NUMBER, Extraction, rounding
from grupo.rewards.answers.ground_truth import ANSWER_NEEDED, gold_text, read_gold, shown_gold
from grupo.rewards.answers.latex import MAX_LENGTH, Answer, Listing, is_prose, read_answer, same_answer
from grupo.rewards.verifiers.base import GoldVerifier, Verdict, compared, unreadable, without_answer
from grupo.rewards.verifiers.numeric_equivalence import same_values
from grupo.utils.worker_pool import WorkerPool

ROUNDED = 1e-5
"""Largest relative difference of two numbers of which one may be a rounded value of the other."""


class MathVerify(GoldVerifier):
    """Is the answer of a completion the gold answer, up to equivalence of formulas?

    `math_accuracy(verify="math-verify")` is the reward that asks it, and `disagreement` compares it with others.
    It can be pickled, and used from any thread or process; worker processes start when they are first needed.
    """

    needs = ANSWER_NEEDED

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
            extraction: where the answer of a completion stands.
            compare_values: formulas whose values differ (`values.py`) are wrong, and math-verify is not asked. Without
                it, math-verify is on its own, as a comparison of the two needs it.
            timeout: seconds for one comparison; one that takes longer counts as wrong.
            memory_mb: MiB of address space of a worker process, where the platform can limit it.
            workers: processes at most; None for one per CPU that this process may use, 4 at most.
            name: of its metrics.

        Raises:
            ConfigError: `math-verify` is not installed.
        """
        super().__init__(name, gold_column)
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "The comparison of formulas needs the package math-verify. Install it (pip install math-verify), or "
                "set verify='exact'."
            )
        self.extraction = extraction
        self.compare_values = compare_values
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.workers = workers
        self.gave_up: Counter[str] = Counter()
        """Comparisons that counted as wrong because they reached a limit, by reason: timeout, memory, died, error."""
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None

    def can_read(self, gold: Any) -> bool:
        return read_gold(gold) is not None

    def judge(self, text: str, gold: Any) -> Verdict:
        return self.judge_all([text], [gold])[0]

    def judge_all(self, texts: Sequence[str], golds: Sequence[Any]) -> list[Verdict]:
        """The verdicts on many completions, in parallel; equal questions are asked once."""
        verdicts: list[Verdict] = []
        questions: dict[tuple[str, str], list[int]] = {}
        for index, (text, gold) in enumerate(zip(texts, golds, strict=True)):
            expected, found = read_gold(gold), self.extraction.find(text)
            answer = None if found.answer is None else read_answer(found.answer)
            if expected is None:
                verdicts.append(unreadable(gold))
            elif answer is None or found.answer is None:
                verdicts.append(without_answer(found))
            else:
                question = (found.answer, gold_text(gold) or "")
                verdict = exact_verdict(answer, expected, rounding(gold))
                if verdict is None and not any(map(_is_hopeless, question)):
                    questions.setdefault(question, []).append(index)
                verdicts.append(compared(verdict is True, found.answer, gold))
        if self.compare_values:
            questions = {asked: indices for asked, indices in questions.items() if not _values_differ(*asked)}
        if questions:
            for indices, is_right in zip(questions.values(), self._ask(list(questions)), strict=True):
                for index in indices if is_right else ():
                    verdicts[index] = Verdict("right", f"it is a form of the gold answer {shown_gold(golds[index])}")
        return verdicts

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _ask(self, questions: list[tuple[str, str]]) -> list[bool]:
        with self._lock:
            if self._pool is None:
                self._pool = WorkerPool(
                    same_formula,
                    prepare=prepare,
                    timeout=self.timeout,
                    memory_mb=self.memory_mb,
                    workers=self.workers,
                )
            pool = self._pool
        results = pool.map(questions)
        self.gave_up.update(result.status for result in results if result.status != "done")
        return [result.value is True for result in results]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_pool")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _pool=None)


def exact_verdict(answer: Answer, gold: Answer, rounding: float = 0.0) -> bool | None:
    """What the exact comparison says for certain; None where the answers differ in writing and may be equal.

    Args:
        rounding: of the gold answer, where it is a float (`answers.rounding`): more than that explains no difference.
    """
    if same_answer(answer, gold, rounding):
        return True
    if rounding and isinstance(answer.form, ExactNumber):
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
    """A number, or a list of numbers: nothing about it is left to find out."""
    if isinstance(form, Listing):
        return all(isinstance(item, ExactNumber) for item in form.items)
    return isinstance(form, ExactNumber)


def _are_near(a: ExactNumber, b: ExactNumber) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=ROUNDED)
    except (OverflowError, ValueError):  # no float is close to one of them
        return False


def _values_differ(answer: str, gold: str) -> bool:
    forms = [read.form for read in (read_answer(answer), read_answer(gold)) if read is not None]
    may_be_rounded = all(isinstance(form, ExactNumber) for form in forms)
    return not may_be_rounded and same_values(answer, gold) is False


def _is_hopeless(written: str) -> bool:
    """Too long to parse in time, or a sentence, in which a parser would find the number that suits."""
    return len(written) > MAX_LENGTH or is_prose(written)


# In the worker -------------------------------------------------------------------------------------------------------

_UNICODE = str.maketrans(
    {
        "−": "-", "·": r"\cdot ", "⋅": r"\cdot ", "×": r"\times ", "÷": r"\div ", "√": r"\sqrt ", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "²": "^2", "³": "^3",
        "°": r"^\circ ",
    }
)  # fmt: skip
"""Characters that math-verify does not read, or only in some places."""


def prepare() -> None:
    """Import and warm up math-verify, and silence its warning that time-outs are off.

    Sympy imports its parts when they are first needed, which would count in the time limit of somebody's answer.
    """
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    for question in ((r"\frac{x + 1}{2}", r"\frac{1 + x}{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\sin 2x", r"2\sin x\cos x")):
        same_formula(question)


def same_formula(question: tuple[str, str]) -> bool:
    """Whether math-verify takes (answer, gold), both LaTeX, for the same."""
    from math_verify import verify

    answer, gold = question
    return bool(verify(_parsed(gold), _parsed(answer), timeout_seconds=None))


@functools.lru_cache(maxsize=64)
def _parsed(written: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    written = written.translate(_UNICODE)
    # In a box the whole text is the answer; without `first_match`, a part that suits would be searched in it.
    return list(
        parse(rf"\boxed{{{written}}}", [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)  # type: ignore[arg-type]
    )
