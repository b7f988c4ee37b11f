"""How often two verifiers disagree, and about what: a check of both on your own completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grupo.errors import RewardError
from grupo.rewards.answers.extraction import completion_texts
from grupo.rewards.verifiers.base import AnswerVerifier, Decision
from grupo.utils.messages import pluralize

_DECISIONS: Mapping[Decision, bool | None] = MappingProxyType({"right": True, "wrong": False, "undecided": None})


@dataclass(frozen=True)
class Difference:
    """A completion that one verifier takes for right and the other for wrong."""

    index: int
    text: str
    gold: Any
    verdict_a: bool
    verdict_b: bool


@dataclass(frozen=True)
class Disagreement:
    """Comparison of two verifiers on n completions."""

    total: int
    compared: int
    """Number of completions that both decided; the others are left out."""
    differences: tuple[Difference, ...]

    @property
    def rate(self) -> float:
        """Share of the compared completions about which the verifiers differ; NaN if none was compared."""
        return len(self.differences) / self.compared if self.compared else float("nan")


def disagreement(
    verifier_a: AnswerVerifier, verifier_b: AnswerVerifier, completions: Sequence[Any], golds: Sequence[Any]
) -> Disagreement:
    """Compare two verifiers on n completions (texts or lists of messages) and their n gold answers.

    Raises:
        RewardError: the numbers of gold answers and completions differ.
    """
    if len(completions) != len(golds):
        raise RewardError(
            f"disagreement got {pluralize(len(golds), 'gold answer')} for {pluralize(len(completions), 'completion')}."
        )
    texts = completion_texts(completions)
    pairs = zip(_verdicts(verifier_a, texts, golds), _verdicts(verifier_b, texts, golds), strict=True)
    compared, differences = 0, []
    for index, (a, b) in enumerate(pairs):
        if a is None or b is None:
            continue
        compared += 1
        if a != b:
            differences.append(Difference(index, texts[index], golds[index], a, b))
    return Disagreement(len(texts), compared, tuple(differences))


def _verdicts(verifier: AnswerVerifier, texts: Sequence[str], golds: Sequence[Any]) -> list[bool | None]:
    return [_DECISIONS[verdict.decision] for verdict in verifier.judge_all(texts, golds)]
