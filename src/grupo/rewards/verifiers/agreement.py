"""How often two verifiers disagree, and on what: a check of both on one's own completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grupo.errors import RewardError
from grupo.rewards.answers.extraction import completion_texts
from grupo.rewards.verifiers.base import Decision, GoldVerifier
from grupo.utils.messages import pluralize

_DECISIONS: Mapping[Decision, bool | None] = MappingProxyType({"right": True, "wrong": False, "undecided": None})


@dataclass(frozen=True)
class Difference:
    """A completion that one verifier calls right and the other one wrong."""

    index: int
    text: str
    gold: Any
    verdict_a: bool
    verdict_b: bool


@dataclass(frozen=True)
class Disagreement:
    """Of n completions: how many both verifiers decided, and where they differ."""

    total: int
    compared: int
    """Completions that both decided; the others say nothing about agreement."""
    differences: tuple[Difference, ...]

    @property
    def rate(self) -> float:
        """Share of the compared completions on which the verifiers differ; NaN if none was compared."""
        return len(self.differences) / self.compared if self.compared else float("nan")


def disagreement(
    verifier_a: GoldVerifier, verifier_b: GoldVerifier, completions: Sequence[Any], golds: Sequence[Any]
) -> Disagreement:
    """Compare two verifiers on n completions (texts or lists of messages) and their n gold answers.

    Raises:
        RewardError: not one gold answer for each completion.
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


def _verdicts(verifier: GoldVerifier, texts: Sequence[str], golds: Sequence[Any]) -> list[bool | None]:
    return [_DECISIONS[verdict.decision] for verdict in verifier.judge_all(texts, golds)]
