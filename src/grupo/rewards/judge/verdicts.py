"""Verdicts of a judge: what it said of a completion, why there is none, and the memory of both."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

CACHE_ENTRIES = 200_000
"""Verdicts kept in memory; the oldest go first."""

Kind = Literal["timeout", "connection", "rate_limit", "server", "denied", "rejected", "malformed"]


@dataclass(frozen=True)
class JudgeVerdict:
    """What the judge said of one completion."""

    score: float
    """On the scale of the rubric."""
    reason: str


class NoVerdict(Exception):
    """Why a completion has none."""

    def __init__(self, kind: Kind, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.wait = wait
        """Seconds until the server wants to be asked again, where it said so."""


class VerdictCache:
    """Verdicts by key, in memory and, where a path is given, in a file with one JSON object per line."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._verdicts: dict[str, JudgeVerdict] = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                    self._keep(entry["key"], JudgeVerdict(float(entry["score"]), str(entry["reason"])))
                except (ValueError, KeyError, TypeError):  # the last line of a run that was killed
                    continue

    def get(self, key: str) -> JudgeVerdict | None:
        return self._verdicts.get(key)

    def put(self, key: str, verdict: JudgeVerdict) -> None:
        self._keep(key, verdict)
        if self.path is not None:
            line = json.dumps({"key": key, "score": verdict.score, "reason": verdict.reason})
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                # One write per line, and a line end on both sides: other processes append too, or were cut off.
                file.write(f"\n{line}\n")

    def _keep(self, key: str, verdict: JudgeVerdict) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > CACHE_ENTRIES:
            del self._verdicts[next(iter(self._verdicts))]


def parse_verdict(text: str, scale: tuple[float, float]) -> JudgeVerdict | None:
    """The verdict of a reply that is one JSON object, behind a closed think block and inside a code fence at most.

    An object somewhere in other text does not count: it may be one that the judge quotes from the answer. Nor does one
    with the same key twice, or with a grade outside the scale.
    """
    text = text.rpartition("</think>")[2].strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", text, flags=re.DOTALL)
    try:
        entry = json.loads(fenced.group(1) if fenced else text, object_pairs_hook=_pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.keys() - {"reason", "score"}:
        return None
    score = entry.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not scale[0] <= score <= scale[1]:
        return None
    return JudgeVerdict(float(score), str(entry.get("reason", "")))


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        raise ValueError("a key stands twice in it")
    return entry
