r"""Rewards that compare the answer of a completion with a gold answer from the dataset, exactly.

What is read from a completion: the content of its last `\boxed{...}` or `\fbox{...}`, else the last number of its text
(`answers.py`). What counts as the same (`expressions.py`): numbers by exact value (fractions, decimals, roots, powers,
π), parenthesised tuples in order, sets and bare lists in any order, anything else by its LaTeX tokens. A unit counts
only where both sides have one: `58 cm` is 58, and is not `58 m`; `50\%` is 50.

A gold answer that cannot be read gives no reward at all: the function abstains (None), counts it and warns once.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers import completion_text, extract_answer, extract_boxed, gold_number, last_number
from grupo.rewards.exact import MAX_BITS, ExactNumber, NotExact
from grupo.rewards.expressions import Answer, is_prose, read_answer, same_answer

if TYPE_CHECKING:
    from grupo.rewards.symbolic import MathVerify


class GoldReward(ABC):
    """A reward function that judges each completion by the gold answer in one dataset column.

    The signature names that column, so a missing one is reported before training. Instances can be pickled.
    """

    def __init__(self, name: str, gold_column: str) -> None:
        self.__name__ = name
        self.gold_column = gold_column
        self.unusable_golds = 0
        """How many completions had a gold answer that could not be read."""
        self.__signature__ = keyword_signature("completions", gold_column)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """1.0 or 0.0 for each completion (a string, a list of messages, or None), None where its gold is unusable."""
        golds = columns[self.gold_column]
        if len(golds) != len(completions):
            raise RewardError(
                f"{self.__name__} got {len(golds)} gold answers in '{self.gold_column}' for {len(completions)} "
                "completions; it needs one for each."
            )
        texts = [completion_text(completion) or "" for completion in completions]
        scores = self.judge_all(texts, golds)
        unusable = [gold for gold, score in zip(golds, scores, strict=True) if score is None]
        if unusable and not self.unusable_golds:
            warnings.warn(
                f"{self.__name__} cannot read {len(unusable)} of {len(golds)} gold answers in '{self.gold_column}', "
                f"the first is {shown_gold(unusable[0])}. It abstains on these completions, here and in later batches. "
                f"{self.needs}",
                stacklevel=2,
            )
        self.unusable_golds += len(unusable)
        return scores

    needs: str
    """One sentence: what a gold answer must be."""

    @abstractmethod
    def can_read(self, gold: Any) -> bool:
        """Whether completions can be judged by this gold answer."""

    @abstractmethod
    def judge(self, text: str, gold: Any) -> float | None:
        """The score of one completion text; None where the gold answer cannot be read."""

    def judge_all(self, texts: Sequence[str], golds: Sequence[Any]) -> list[float | None]:
        return [self.judge(text, gold) for text, gold in zip(texts, golds, strict=True)]


def keyword_signature(*names: str) -> inspect.Signature:
    """The signature of a function that requires these keywords and takes any others."""
    required = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return inspect.Signature([*required, inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)])


class NumberMatch(GoldReward):
    """See `number_match`."""

    needs = "A gold answer is a number, or a text that is nothing but a number (behind `####` in GSM8K's form)."

    def can_read(self, gold: Any) -> bool:
        return gold_number(gold) is not None

    def judge(self, text: str, gold: Any) -> float | None:
        expected = gold_number(gold)
        return None if expected is None else float(last_number(text) == expected)


class MathAccuracy(GoldReward):
    """See `math_accuracy`."""

    needs = (
        "A gold answer is a number, a text with a number or formula and no sentence around it, or a solution that ends "
        "in \\boxed{...} or in '#### answer'."
    )

    def __init__(self, name: str, gold_column: str, require_box: bool, verifier: MathVerify | None = None) -> None:
        super().__init__(name, gold_column)
        self.require_box = require_box
        self.verifier = verifier
        """Judges in place of the exact comparison."""

    def can_read(self, gold: Any) -> bool:
        return read_gold(gold) is not None

    def judge(self, text: str, gold: Any) -> float | None:
        if self.verifier is not None:
            return self.judge_all([text], [gold])[0]
        expected = read_gold(gold)
        if expected is None:
            return None
        answer = self.read(text)
        return float(answer is not None and same_answer(answer, expected))

    def judge_all(self, texts: Sequence[str], golds: Sequence[Any]) -> list[float | None]:
        if self.verifier is None:
            return super().judge_all(texts, golds)
        return [None if right is None else float(right) for right in self.verifier.judge_all(texts, golds)]

    def read(self, text: str) -> Answer | None:
        written = extract_boxed(text) if self.require_box else extract_answer(text)
        return None if written is None else read_answer(written)


def number_match(gold_column: str = "answer") -> NumberMatch:
    """1.0 where the last number of the completion equals the gold number exactly (72.0 is 72), else 0.0.

    See `answers.last_number` for what a number is.
    """
    return NumberMatch("number_match", gold_column)


def math_accuracy(
    gold_column: str = "answer", require_box: bool = False, verify: Literal["exact", "math-verify"] = "exact"
) -> MathAccuracy:
    r"""1.0 where the answer of the completion is the gold answer (see the head of this module), else 0.0.

    Args:
        gold_column: dataset column with numbers, formulas, or solutions that end in `\boxed{...}` or `#### answer`.
        require_box: only a box counts as the answer; otherwise, without any box, the last number of the text does.
        verify: `exact`, or `math-verify` to compare formulas that `exact` does not find equal as well, in worker
            processes (`symbolic.py`; needs the extra `math`).

    Raises:
        ConfigError: another `verify`, or `math-verify` is not installed.
    """
    if verify not in ("exact", "math-verify"):
        raise ConfigError(f"math_accuracy knows no verify={verify!r}: set 'exact' or 'math-verify'.")
    verifier = None
    if verify == "math-verify":
        from grupo.rewards.symbolic import MathVerify  # which is built upon this module

        verifier = MathVerify(require_box=require_box)
    return MathAccuracy("math_accuracy", gold_column, require_box, verifier)


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """`math_accuracy` with the signature and the logged columns of TRL's function of this name."""
    judge = MathAccuracy("accuracy_reward", "solution", require_box=False)
    if log_extra is not None:
        answers = [judge.read(completion_text(completion) or "") for completion in completions]
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [str(read_gold(gold) or "[unreadable]") for gold in solution])
        log_extra("answer_parsed", [str(answer or "[none]") for answer in answers])
    return judge(completions, solution=solution)


def shown_gold(gold: Any) -> str:
    """A gold answer as messages quote it."""
    if isinstance(gold, int) and gold.bit_length() > MAX_BITS:  # too long for Python to print
        return "an integer of more than 1,000 digits"
    return repr(gold)[:80]


def read_gold(gold: Any) -> Answer | None:
    """A gold answer in normal form; None where it is empty, a sentence, or no text and no number."""
    if isinstance(gold, (Real, Decimal)) and not isinstance(gold, bool):
        number = gold_number(gold)
        try:
            return None if number is None else Answer(ExactNumber.from_rational(number))
        except NotExact:
            return None
    written = gold_text(gold)
    answer = None if written is None else read_answer(written)
    if written is None or answer is None:
        return None
    # A number with a unit of several words (`5 square miles`) is no sentence.
    return None if is_prose(written) and answer.unit is None else answer


def gold_text(gold: Any) -> str | None:
    """What a gold answer of text says: the content of its last box, or what follows `####`; a number in digits."""
    if not isinstance(gold, str):
        number = gold_number(gold)
        return None if number is None else str(number)
    return extract_boxed(gold) if "\\boxed" in gold or "\\fbox" in gold else gold.rpartition("####")[2]
