"""Verifiers say whether a completion is right, and why; a reward turns that into a number. They are two things.

n = completions of the call.
"""

from __future__ import annotations

import inspect
import keyword
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers.extraction import Found, completion_texts
from grupo.rewards.answers.ground_truth import shown_gold
from grupo.utils.messages import pluralize

Decision = Literal["right", "wrong", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What a verifier says about one completion: a decision, and never a score."""

    decision: Decision
    reason: str
    """For people: it is logged beside the completion, and decides nothing."""


class Verifier(Protocol):
    """A callable `(completions, **columns)` that returns one `Verdict` for each of n completions.

    `completions` are texts, whatever the shape of the conversation was. Dataset columns and `prompts` come by keyword,
    as to a reward function. A verifier that cannot tell says undecided; it never guesses.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Verdict]: ...


class VerifierReward:
    """See `reward_from`."""

    def __init__(self, verifier: Verifier, right: float, wrong: float, undecided: float | None) -> None:
        scores = [right, wrong, *([] if undecided is None else [undecided])]
        if not all(math.isfinite(score) for score in scores) or right <= wrong:
            raise ConfigError(
                f"right={right}, wrong={wrong}, undecided={undecided} reward no right answer: all are finite numbers, "
                "right is above wrong, and undecided may be None, which abstains."
            )
        self.__name__ = getattr(verifier, "__name__", type(verifier).__name__)
        self.__signature__ = _with_log_extra(inspect.signature(verifier))
        self.verifier = verifier
        self.value_range = (float(min(scores)), float(max(scores)))
        """Lowest and highest value."""
        self._scores: dict[Decision, float | None] = {"right": right, "wrong": wrong, "undecided": undecided}

    def __call__(
        self, completions: Sequence[Any], log_extra: Callable[[str, list[Any]], None] | None = None, **columns: Any
    ) -> list[float | None]:
        """A number for each completion (a string, a list of messages, or None); None where it is undecided so."""
        texts = completion_texts(completions)
        verdicts = self.verifier(completions=texts, **columns)
        if not isinstance(verdicts, Sequence) or not all(isinstance(verdict, Verdict) for verdict in verdicts):
            raise RewardError(
                f"The verifier {self.__name__} returned {verdicts!r:.80}; it must return a list of Verdict."
            )
        if len(verdicts) != len(texts):
            raise RewardError(
                f"The verifier {self.__name__} returned {pluralize(len(verdicts), 'verdict')} for "
                f"{pluralize(len(texts), 'completion')}; it must return one for each."
            )
        for verdict in verdicts:
            if verdict.decision not in self._scores:
                raise RewardError(
                    f"The verifier {self.__name__} decided {verdict.decision!r}; a decision is one of "
                    f"{', '.join(map(repr, get_args(Decision)))}."
                )
        if log_extra is not None:
            log_extra(f"{self.__name__}/reason", [verdict.reason for verdict in verdicts])
        return [self._scores[verdict.decision] for verdict in verdicts]


def reward_from(
    verifier: Verifier, right: float = 2.0, wrong: float = 0.0, undecided: float | None = None
) -> VerifierReward:
    """The reward function that pays `right`, `wrong` or `undecided` for what the verifier decides; None abstains.

    It takes plain and conversational completions, carries the verifier's name, requires the columns that the verifier
    requires, says its range as `value_range`, and logs the reasons as a column of the completions.

    Raises:
        ConfigError: a score is not finite, or wrong answers would not be paid less than right ones.
    """
    return VerifierReward(verifier, right, wrong, undecided)


class JudgedByGold(ABC):
    """What compares completions with the gold answer in one dataset column.

    The signature names that column, so a missing one is reported before training. Instances can be pickled.
    """

    needs: str
    """One sentence: what a gold answer must be."""

    def __init__(self, name: str, gold_column: str) -> None:
        self.__name__ = name
        self.__signature__ = keyword_signature("completions", gold_column)
        self.gold_column = gold_column
        self.unusable_golds = 0
        """How many completions had a gold answer that could not be read."""

    @abstractmethod
    def can_read(self, gold: Any) -> bool:
        """Whether completions can be judged by this gold answer."""

    def pairs(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> tuple[list[str], Sequence[Any]]:
        """The texts of the completions, and the gold answer of each.

        Raises:
            RewardError: not one gold answer for each completion.
        """
        golds = columns[self.gold_column]
        if len(golds) != len(completions):
            raise RewardError(
                f"{self.__name__} got {pluralize(len(golds), 'gold answer')} in '{self.gold_column}' for "
                f"{pluralize(len(completions), 'completion')}; it needs one for each."
            )
        return completion_texts(completions), golds

    def count_unusable(self, golds: Sequence[Any], unusable: Sequence[bool]) -> None:
        """Counts them, and warns the first time."""
        found = [gold for gold, is_unusable in zip(golds, unusable, strict=True) if is_unusable]
        if found and not self.unusable_golds:
            warnings.warn(
                f"{self.__name__} cannot read {len(found)} of {len(golds)} gold answers in '{self.gold_column}', "
                f"the first is {shown_gold(found[0])}. It abstains on these completions, here and in later batches. "
                f"{self.needs}",
                stacklevel=4,
            )
        self.unusable_golds += len(found)


class GoldVerifier(JudgedByGold):
    """A verifier that compares with the gold answer."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        texts, golds = self.pairs(completions, columns)
        verdicts = self.judge_all(texts, golds)
        undecided = [verdict.decision == "undecided" for verdict in verdicts]
        self.count_unusable(
            golds, [is_so and not self.can_read(gold) for is_so, gold in zip(undecided, golds, strict=True)]
        )
        return verdicts

    @abstractmethod
    def judge(self, text: str, gold: Any) -> Verdict:
        """The verdict on one completion text; undecided wherever the gold answer cannot be read."""

    def judge_all(self, texts: Sequence[str], golds: Sequence[Any]) -> list[Verdict]:
        """`judge` for many completions at once."""
        return [self.judge(text, gold) for text, gold in zip(texts, golds, strict=True)]


class GoldReward(VerifierReward):
    """1.0 where a verifier says right, 0.0 where it says wrong; it abstains where the gold answer is unusable."""

    verifier: GoldVerifier

    def __init__(self, verifier: GoldVerifier) -> None:
        super().__init__(verifier, right=1.0, wrong=0.0, undecided=None)

    @property
    def gold_column(self) -> str:
        return self.verifier.gold_column

    @property
    def unusable_golds(self) -> int:
        """How many completions had a gold answer that could not be read."""
        return self.verifier.unusable_golds


class GoldScore(JudgedByGold):
    """A reward that compares with the gold answer and knows more than right and wrong."""

    value_range: tuple[float, float]

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """A number for each completion (a string, a list of messages, or None), None where its gold is unusable."""
        texts, golds = self.pairs(completions, columns)
        scores = [self.score(text, gold) for text, gold in zip(texts, golds, strict=True)]
        self.count_unusable(golds, [score is None for score in scores])
        return scores

    @abstractmethod
    def score(self, text: str, gold: Any) -> float | None:
        """Of one completion text; None where the gold answer cannot be read."""


def unreadable(gold: Any) -> Verdict:
    """What is said where the gold answer cannot be read."""
    return Verdict("undecided", f"the gold answer {shown_gold(gold)} cannot be read")


def without_answer(found: Found) -> Verdict:
    """What is said where no answer was found, or none that can be read."""
    if found.source is None:
        return Verdict("wrong", "it has no answer")
    return Verdict("wrong", f"what it answers ({found.source}) cannot be read")


def compared(same: bool, answer: str, gold: Any) -> Verdict:
    """What is said of an answer, in normal form, that was found to be the `same` or not."""
    if same:
        return Verdict("right", f"{answer:.80} is the gold answer")
    return Verdict("wrong", f"{answer:.80} is not the gold answer {shown_gold(gold)}")


def keyword_signature(*names: str) -> inspect.Signature:
    """The signature of a function that requires these keywords and takes any others.

    Raises:
        ConfigError: a dataset column whose name can be no parameter.
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()) or keyword.iskeyword(name):
            raise ConfigError(
                f"Column {name!r:.80} cannot be named in the signature of a reward. Give the column a name of letters, "
                "digits and underscores, in a recipe by dataset.rename, and name that."
            )
    required = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return inspect.Signature([*required, inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)])


def _with_log_extra(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    takes_any = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    if takes_any or "log_extra" in signature.parameters:
        return signature
    return signature.replace(
        parameters=[*parameters, inspect.Parameter("log_extra", inspect.Parameter.KEYWORD_ONLY, default=None)]
    )
