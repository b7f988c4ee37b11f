"""Verdicts of a judge: parsing, errors and cache."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MAX_CACHED_VERDICTS = 200_000
"""Verdicts kept in memory; the oldest are dropped first."""

ErrorKind = Literal["timeout", "connection", "rate_limit", "server", "denied", "rejected", "malformed"]


@dataclass(frozen=True)
class JudgeVerdict:
    """The judge's grade of one completion."""

    score: float
    """Grade on the scale of the rubric."""
    reason: str


class JudgeError(Exception):
    """A request that gave no verdict."""

    def __init__(self, kind: ErrorKind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.retry_after = retry_after
        """Seconds after which the server asks to be called again, if it said so."""


class VerdictCache:
    """Verdicts by key, in memory and, with a path, in a file with one JSON object per line."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._verdicts: dict[str, JudgeVerdict] = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                    self._store(entry["key"], JudgeVerdict(float(entry["score"]), str(entry["reason"])))
                except (ValueError, KeyError, TypeError):  # the last line of a run that was killed
                    continue

    def get(self, key: str) -> JudgeVerdict | None:
        return self._verdicts.get(key)

    def put(self, key: str, verdict: JudgeVerdict) -> None:
        self._store(key, verdict)
        if self.path is not None:
            line = json.dumps({"key": key, "score": verdict.score, "reason": verdict.reason})
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                # One write per line, and a line end on both sides: other processes append too, or were killed writing.
                file.write(f"\n{line}\n")

    def _store(self, key: str, verdict: JudgeVerdict) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_CACHED_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]


def parse_verdict(text: str, scale: tuple[float, float]) -> JudgeVerdict | None:
    """The verdict of a reply that is one JSON object, optionally after a closed think block and inside a code fence.

    An object within other text does not count: the judge may be quoting it from the answer. Nor does one with a
    repeated key, or with a grade outside the scale.
    """
    text = text.rpartition("</think>")[2].strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", text, flags=re.DOTALL)
    try:
        entry = json.loads(fenced.group(1) if fenced else text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.keys() - {"reason", "score"}:
        return None
    score = entry.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not scale[0] <= score <= scale[1]:
        return None
    return JudgeVerdict(float(score), str(entry.get("reason", "")))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        raise ValueError("repeated key")
    return entry
