"""What a check examines: the rewards, and the completions that they are scored on."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from grupo.errors import ConfigError, RewardError
from grupo.rewards.checker.probes import (
    BARE,
    EMPTY,
    FILLER_WORDS,
    LONG,
    UNICODE,
    Form,
    as_completion,
    columns_of,
    spoilt,
    token_ids,
    variants,
    written_gold,
)
from grupo.rewards.checker.report import Fault
from grupo.rewards.execution.runner import RewardRunner
from grupo.utils.messages import pluralize

ROWS = 12
"""So many rows are probed."""
ROWS_OF_FORMS = 2
"""So many rows find out in which form the rewards want an answer."""
SAMPLED = 512
"""So many sampled completions are scored at most."""
CLOSE = 1e-6
"""Scores that differ by less are the same."""

Scores = list[float | None]
Probe = tuple[Mapping[str, Any], str]
"""A dataset row and the text of a completion."""


@dataclass
class Subject:
    """One reward under examination."""

    runner: RewardRunner
    name: str
    weight: float
    is_about_length: bool
    value_range: tuple[float, float] | None
    vocabulary: dict[str, int]
    faults: dict[str, Fault] = field(default_factory=dict)
    broken: bool = False
    """What it does cannot be scored at all."""
    scores: dict[str, Scores] = field(default_factory=dict)
    """Kind of probe -> scores."""
    seconds: float | None = None
    """Per completion, in a batch of short ones."""

    def report(self, name: str, seen: str) -> None:
        self.faults.setdefault(name, Fault(name, self.name, seen))

    def score(self, kind: str, probes: Sequence[Probe]) -> Scores:
        """Scores of (row, completion text), None where there is none; notes what goes wrong."""
        if self.broken or not probes:
            return [None] * len(probes)
        scores = self._call(kind, probes)
        if scores is None and not self.broken:
            # Somewhere it raised: which of them?
            apart = [self._call(kind, [probe]) for probe in probes]
            scores = [single[0] if single else None for single in apart]
        scores = scores or [None] * len(probes)
        self._check_values(kind, probes, scores)
        return scores

    def _call(self, kind: str, probes: Sequence[Probe]) -> Scores | None:
        """None where it raised, or gave nothing that could be scored."""
        rows = [row for row, _ in probes]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                table = self.runner.score(
                    prompts=[row["prompt"] for row in rows],
                    completions=[as_completion(text, row["prompt"]) for row, text in probes],
                    completion_ids=[token_ids(text, self.vocabulary) for _, text in probes],
                    columns=columns_of(rows),
                    trainer_state=SimpleNamespace(global_step=1, max_steps=100, epoch=0.0),
                )
        except RewardError as error:
            self.broken = True
            name = "crash"
            if re.search(r"returned [0-9]+ rewards? for [0-9]+ completions?", str(error)):
                name = "wrong-count"
            elif " returned " in str(error):
                name = "wrong-type"
            self.report(name, f"On {pluralize(len(probes), 'completion')} ({kind}): {error}")
            return None
        for failure in table.failures:
            where = f"on {shown(probes[failure.indices[0]][1])} ({kind})"
            if failure.kind == "timeout":
                self.broken = True
                self.report("timeout", f"Of {pluralize(len(probes), 'completion')} ({kind}), {failure.message}.")
                return None
            if failure.kind == "exception":
                if len(probes) == 1:
                    self.report("crash", f"It raised {failure.message.partition(' raised ')[2]} {where}.")
                return None
            self.report("not-finite", f"{failure.message.partition(';')[0]}, {where}.")
        return [score for (score,) in table.scores]

    def _check_values(self, kind: str, probes: Sequence[Probe], scores: Scores) -> None:
        if self.value_range is None:
            return
        low, high = self.value_range
        for (_, text), score in zip(probes, scores, strict=True):
            if score is not None and not low - CLOSE <= score <= high + CLOSE:
                self.report(
                    "out-of-range",
                    f"It declares values from {low:g} to {high:g}, and returned {score:g} on {shown(text)} ({kind}).",
                )

    def is_reliable(self) -> bool:
        """Whether its scores say something about the completions, so that they can be compared."""
        unreliable = {"not-repeatable", "order-dependent", "neighbour-dependent"}
        return not self.broken and not unreliable & self.faults.keys()

    def known(self, *kinds: str) -> list[float]:
        """All scores of these kinds of probe, or of all kinds."""
        return [score for kind in kinds or self.scores for score in self.scores.get(kind, []) if score is not None]

    def mean(self, kind: str) -> float | None:
        known = self.known(kind)
        return fmean(known) if known else None

    def spread(self) -> float:
        """Largest difference between scores, whatever the completion."""
        known = self.known()
        return max(known) - min(known) if known else 0.0


class Probing:
    """The probes of one check, and what they were made from."""

    def __init__(
        self, subjects: Sequence[Subject], samples: Sequence[Mapping[str, Any]], column: str | None, slow: float
    ) -> None:
        self.subjects = subjects
        self.slow = slow
        self.skipped: list[str] = []
        golds = [written_gold(row.get(column)) if column else None for row in samples]
        usable = [place for place, gold in enumerate(golds) if gold is not None] or list(range(len(samples)))
        step = max(1, len(usable) // ROWS)
        self.rows = [samples[place] for place in usable[::step][:ROWS]]
        self.has_gold = any(gold is not None for gold in golds)
        if not self.has_gold:
            self.skipped.append("whether right answers are paid, since no column holds them (gold_column)")
        self.golds = [golds[place] or "42" for place in usable[::step][:ROWS]]
        self.texts: dict[str, list[Probe]] = {}
        """By kind."""
        self.candidates: Sequence[Form] = ()
        """Forms that were tried: each with its reasoning in several lines, then each in one line."""
        self.places_of_others: list[int] = []
        """Rows of the probes `other wrong`."""
        sampled = [(row, text) for row in samples for text in _completions(row)]
        if len(sampled) > SAMPLED:
            sampled = random.Random("sampled completions").sample(sampled, SAMPLED)
        self.sampled = sampled
        if not sampled:
            self.skipped.append("what a model writes, since no sample has completions")

    def find_form(self, candidates: Sequence[Form], given: str | None) -> Form:
        """The form in which right answers earn most; the first of several."""
        if given is not None:
            if "{answer}" not in given:
                raise ConfigError(f"gold_form={given!r} has no place for the answer: write {{answer}} in it.")
            candidates = [Form(given), Form(given, one_line=True)]
        pairs = list(zip(self.rows, self.golds, strict=True))[:ROWS_OF_FORMS]
        probes = [(row, form.write(gold)) for form in candidates for row, gold in pairs]
        self._score("forms", probes)
        earned = [0.0] * len(candidates)
        for subject in self.subjects:
            scores = [0.0 if subject.is_about_length else score or 0.0 for score in subject.scores["forms"]]
            for place in range(len(candidates)):
                part = scores[place * len(pairs) : (place + 1) * len(pairs)]
                earned[place] += subject.weight * sum(part)
        self.candidates = candidates
        return candidates[earned.index(max(earned))]

    def score_all(self, form: Form) -> None:
        golds, rows = self.golds, self.rows
        wrong = [spoilt(gold, golds[place + 1 :] + golds[:place]) for place, gold in enumerate(golds)]
        plainest = [next(iter(answers.values())) for answers in wrong]
        self._score("gold", [(row, form.write(gold)) for row, gold in zip(rows, golds, strict=True)])
        self._score("wrong", [(row, form.write(answer)) for row, answer in zip(rows, plainest, strict=True)])
        self._score("bare gold", [(row, BARE.write(gold)) for row, gold in zip(rows, golds, strict=True)])
        self._score("bare wrong", [(row, BARE.write(answer)) for row, answer in zip(rows, plainest, strict=True)])
        others = [(place, answer) for place, answers in enumerate(wrong) for answer in list(answers.values())[1:]]
        self.places_of_others = [place for place, _ in others]
        self._score("other wrong", [(rows[place], form.write(answer)) for place, answer in others])
        self._score(
            "variants",
            [(row, form.write(text)) for row, gold in zip(rows, golds, strict=True) for text in variants(gold)],
        )
        for words in FILLER_WORDS:
            written = [(row, form.write(gold, words)) for row, gold in zip(rows, golds, strict=True)]
            self._score(f"{words} more words", written)
        self._score("sampled", self.sampled)
        for kind, texts in (("empty", EMPTY), ("unicode", UNICODE), ("very long", LONG)):
            self._score(kind, [(rows[place % len(rows)], text) for place, text in enumerate(texts)])

    def _score(self, kind: str, probes: list[Probe]) -> None:
        self.texts[kind] = probes
        for subject in self.subjects:
            subject.scores[kind] = subject.score(kind, probes)

    def mixed(self) -> list[Probe]:
        """A batch of all sorts."""
        return [probe for kind in ("gold", "wrong", "bare gold", "30 more words", "empty", "unicode")
                for probe in self.texts[kind][:3]]  # fmt: skip


def _completions(row: Mapping[str, Any]) -> list[str]:
    several = row.get("completions")
    texts = list(several) if isinstance(several, (list, tuple)) else []
    return [text for text in (row.get("completion"), *texts) if isinstance(text, str)]


def score_text(score: float | None) -> str:
    return "no score" if score is None else f"{score:.4g}"


def shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
