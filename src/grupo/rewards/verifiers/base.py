"""Verifiers decide whether a completion is right, and why; rewards turn their verdicts into scores.

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
from grupo.rewards.answers.extraction import ExtractedAnswer, completion_texts, quote_value
from grupo.utils.messages import pluralize

Decision = Literal["right", "wrong", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """The verdict of a verifier on one completion: a decision, never a score."""

    decision: Decision
    reason: str
    """Explanation for people: it is logged with the completion, and decides nothing."""


class Verifier(Protocol):
    """A callable `(completions, **columns)` that returns one `Verdict` for each of n completions.

    `completions` are texts, also where the dataset is conversational. Dataset columns and `prompts` come by keyword, as
    to a reward function. A verifier that cannot decide returns "undecided"; it never guesses.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Verdict]: ...


class VerifierReward:
    """See `reward_from`."""

    def __init__(self, verifier: Verifier, right: float, wrong: float, undecided: float | None) -> None:
        scores = [right, wrong, *([] if undecided is None else [undecided])]
        if not all(math.isfinite(score) for score in scores) or right <= wrong:
            raise ConfigError(
                f"right={right}, wrong={wrong}, undecided={undecided} do not reward right answers: set finite numbers "
                "with right above wrong; undecided may be None, which abstains."
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
        """(n,) scores of completions, each a string, a list of messages, or None; None where the reward abstains."""
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
    """A reward function with the score `right`, `wrong` or `undecided` for what the verifier decides; None abstains.

    It takes plain and conversational completions, has the verifier's name, requires the columns that the verifier
    requires, declares its range as `value_range`, and logs the reasons as a column of the completions.

    Raises:
        ConfigError: a score is not finite, or wrong answers would not score less than right ones.
    """
    return VerifierReward(verifier, right, wrong, undecided)


class GroundTruthComparator(ABC):
    """Base class of verifiers and rewards that compare completions with the gold answer in one dataset column.

    The signature names that column, so a missing one is reported before training. Instances can be pickled.
    """

    answer_requirement: str
    """One sentence that describes the gold answers that can be read."""

    def __init__(self, name: str, gold_column: str) -> None:
        self.__name__ = name
        self.__signature__ = keyword_signature("completions", gold_column)
        self.gold_column = gold_column
        self.unusable_golds = 0
        """Number of completions whose gold answer could not be read."""

    @abstractmethod
    def can_read(self, gold: Any) -> bool:
        """Whether this gold answer can be read."""

    def pairs(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> tuple[list[str], Sequence[Any]]:
        """((n,) texts of the completions, (n,) gold answers).

        Raises:
            RewardError: the numbers of gold answers and completions differ.
        """
        golds = columns[self.gold_column]
        if len(golds) != len(completions):
            raise RewardError(
                f"{self.__name__} got {pluralize(len(golds), 'gold answer')} in '{self.gold_column}' for "
                f"{pluralize(len(completions), 'completion')}; it needs one for each."
            )
        return completion_texts(completions), golds

    def count_unreadable(self, golds: Sequence[Any], unreadable: Sequence[bool]) -> None:
        """Count the gold answers that cannot be read, and warn the first time."""
        found = [gold for gold, is_unreadable in zip(golds, unreadable, strict=True) if is_unreadable]
        if found and not self.unusable_golds:
            warnings.warn(
                f"{self.__name__} cannot read {len(found)} of {len(golds)} gold answers in '{self.gold_column}', "
                f"the first is {quote_value(found[0])}. It abstains on these completions, here and in later batches. "
                f"{self.answer_requirement}",
                stacklevel=4,
            )
        self.unusable_golds += len(found)


class AnswerVerifier(GroundTruthComparator):
    """A verifier that compares completions with the gold answer."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        texts, golds = self.pairs(completions, columns)
        verdicts = self.judge_all(texts, golds)
        pairs = zip(verdicts, golds, strict=True)
        self.count_unreadable(
            golds, [verdict.decision == "undecided" and not self.can_read(gold) for verdict, gold in pairs]
        )
        return verdicts

    @abstractmethod
    def judge(self, text: str, gold: Any) -> Verdict:
        """The verdict on the text of one completion; undecided where the gold answer cannot be read."""

    def judge_all(self, texts: Sequence[str], golds: Sequence[Any]) -> list[Verdict]:
        """(n,) verdicts on many completions at once."""
        return [self.judge(text, gold) for text, gold in zip(texts, golds, strict=True)]


class AnswerReward(VerifierReward):
    """1.0 where a verifier decides right, 0.0 where it decides wrong; abstains where the gold answer cannot be read."""

    verifier: AnswerVerifier

    def __init__(self, verifier: AnswerVerifier) -> None:
        super().__init__(verifier, right=1.0, wrong=0.0, undecided=None)

    @property
    def gold_column(self) -> str:
        return self.verifier.gold_column

    @property
    def unusable_golds(self) -> int:
        """Number of completions whose gold answer could not be read."""
        return self.verifier.unusable_golds


class GradedAnswerReward(GroundTruthComparator):
    """A reward that compares with the gold answer and has more grades than right and wrong."""

    value_range: tuple[float, float]

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """(n,) scores of completions, each a string, a list of messages, or None; None where the gold answer cannot be
        read."""
        texts, golds = self.pairs(completions, columns)
        scores = [self.score(text, gold) for text, gold in zip(texts, golds, strict=True)]
        self.count_unreadable(golds, [score is None for score in scores])
        return scores

    @abstractmethod
    def score(self, text: str, gold: Any) -> float | None:
        """The score of the text of one completion; None where the gold answer cannot be read."""


def unreadable_answer(gold: Any) -> Verdict:
    """Verdict where the gold answer cannot be read."""
    return Verdict("undecided", f"the gold answer {quote_value(gold)} cannot be read")


def no_answer(found: ExtractedAnswer) -> Verdict:
    """Verdict where the completion has no answer, or none that can be read."""
    if found.source is None:
        return Verdict("wrong", "it has no answer")
    return Verdict("wrong", f"its answer ({found.source}) cannot be read")


def match_verdict(matches: bool, answer: str, gold: Any) -> Verdict:
    """Verdict on an answer, in normal form, that matches the gold answer or does not."""
    if matches:
        return Verdict("right", f"{answer:.80} is the gold answer")
    return Verdict("wrong", f"{answer:.80} is not the gold answer {quote_value(gold)}")


def keyword_signature(*names: str) -> inspect.Signature:
    """The signature of a function that requires these keywords and takes any others.

    Raises:
        ConfigError: the name of a dataset column cannot be that of a parameter.
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()) or keyword.iskeyword(name):
            raise ConfigError(
                f"Column {name!r:.80} cannot be a parameter of a reward. Rename it to letters, digits and underscores "
                "(in a recipe by dataset.rename), and use the new name."
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
