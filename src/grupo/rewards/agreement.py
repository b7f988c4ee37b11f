"""How often two verifiers disagree, and on what: a check of both on one's own completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grupo.errors import RewardError
from grupo.rewards.answers import completion_texts
from grupo.rewards.verifiers import Verdict

_DECISIONS = {"right": True, "wrong": False, "undecided": None}


class SupportsJudge(Protocol):
    """Says of one completion text and its gold answer: a `Verdict`, or True, False, and None for undecided."""

    def judge(self, text: str, gold: Any) -> Verdict | bool | None: ...


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
    verifier_a: SupportsJudge, verifier_b: SupportsJudge, completions: Sequence[Any], golds: Sequence[Any]
) -> Disagreement:
    """Compare two verifiers on n completions (texts or lists of messages) and their n gold answers.

    Raises:
        RewardError: not one gold answer for each completion.
    """
    if len(completions) != len(golds):
        raise RewardError(f"disagreement got {len(golds)} gold answers for {len(completions)} completions.")
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


def _verdicts(verifier: SupportsJudge, texts: Sequence[str], golds: Sequence[Any]) -> list[bool | None]:
    judge_all = getattr(verifier, "judge_all", None)
    if judge_all is None:
        verdicts = [verifier.judge(text, gold) for text, gold in zip(texts, golds, strict=True)]
    else:
        verdicts = judge_all(texts, golds)
    return [_DECISIONS[verdict.decision] if isinstance(verdict, Verdict) else verdict for verdict in verdicts]
