"""The rewards under test, and the probe completions that they score."""

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
    ANSWER_ONLY,
    EMPTY,
    FILLER_WORDS,
    LONG,
    UNICODE,
    AnswerForm,
    as_completion,
    columns_of,
    corrupted_answers,
    equivalent_forms,
    gold_text,
    token_ids,
)
from grupo.rewards.checker.report import Fault
from grupo.rewards.execution.runner import RewardRunner
from grupo.utils.messages import pluralize

MAX_ROWS = 12
"""Number of dataset rows that are probed."""
FORM_ROWS = 2
"""Number of rows that determine in which form the rewards expect an answer."""
MAX_SAMPLED = 512
"""Largest number of sampled completions that are scored."""
TOLERANCE = 1e-6
"""Scores that differ by less count as equal."""

Scores = list[float | None]
Probe = tuple[Mapping[str, Any], str]
"""A dataset row and the text of a completion."""


@dataclass
class RewardUnderTest:
    """One reward, with its scores on the probes and the faults found so far."""

    runner: RewardRunner
    name: str
    weight: float
    is_about_length: bool
    value_range: tuple[float, float] | None
    vocabulary: dict[str, int]
    faults: dict[str, Fault] = field(default_factory=dict)
    broken: bool = False
    """Its calls return nothing that can be compared."""
    scores: dict[str, Scores] = field(default_factory=dict)
    """Kind of probe -> scores."""
    seconds: float | None = None
    """Seconds per completion, in a batch of short ones."""

    def add_fault(self, name: str, seen: str) -> None:
        self.faults.setdefault(name, Fault(name, self.name, seen))

    def score(self, kind: str, probes: Sequence[Probe]) -> Scores:
        """Scores of (row, completion text), None without one; records faults of the call."""
        if self.broken or not probes:
            return [None] * len(probes)
        scores = self._call(kind, probes)
        if scores is None and not self.broken:
            # It raised on some probe: find out on which.
            apart = [self._call(kind, [probe]) for probe in probes]
            scores = [single[0] if single else None for single in apart]
        scores = scores or [None] * len(probes)
        self._check_values(kind, probes, scores)
        return scores

    def _call(self, kind: str, probes: Sequence[Probe]) -> Scores | None:
        """The scores; None if it raised or returned nothing usable."""
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
            self.add_fault(name, f"On {pluralize(len(probes), 'completion')} ({kind}): {error}")
            return None
        for failure in table.failures:
            where = f"on {excerpt(probes[failure.indices[0]][1])} ({kind})"
            if failure.kind == "timeout":
                self.broken = True
                self.add_fault("timeout", f"Of {pluralize(len(probes), 'completion')} ({kind}), {failure.message}.")
                return None
            if failure.kind == "exception":
                if len(probes) == 1:
                    self.add_fault("crash", f"It raised {failure.message.partition(' raised ')[2]} {where}.")
                return None
            self.add_fault("not-finite", f"{failure.message.partition(';')[0]}, {where}.")
        return [score for (score,) in table.scores]

    def _check_values(self, kind: str, probes: Sequence[Probe], scores: Scores) -> None:
        if self.value_range is None:
            return
        low, high = self.value_range
        for (_, text), score in zip(probes, scores, strict=True):
            if score is not None and not low - TOLERANCE <= score <= high + TOLERANCE:
                self.add_fault(
                    "out-of-range",
                    f"It declares values from {low:g} to {high:g}, and returned {score:g} on {excerpt(text)} ({kind}).",
                )

    def is_reliable(self) -> bool:
        """Whether its scores depend on the completions alone, so that they can be compared."""
        unreliable = {"not-repeatable", "order-dependent", "neighbour-dependent"}
        return not self.broken and not unreliable & self.faults.keys()

    def known(self, *kinds: str) -> list[float]:
        """All scores on these kinds of probe, or on all kinds."""
        return [score for kind in kinds or self.scores for score in self.scores.get(kind, []) if score is not None]

    def mean(self, kind: str) -> float | None:
        known = self.known(kind)
        return fmean(known) if known else None

    def spread(self) -> float:
        """Largest difference between any two scores."""
        known = self.known()
        return max(known) - min(known) if known else 0.0


class ProbeSuite:
    """The probes of one check, and the dataset rows that they are made from."""

    def __init__(
        self, rewards: Sequence[RewardUnderTest], samples: Sequence[Mapping[str, Any]], column: str | None, slow: float
    ) -> None:
        self.rewards = rewards
        self.slow = slow
        self.skipped: list[str] = []
        gold_answers = [gold_text(row.get(column)) if column else None for row in samples]
        usable = [place for place, gold in enumerate(gold_answers) if gold is not None] or list(range(len(samples)))
        step = max(1, len(usable) // MAX_ROWS)
        self.rows = [samples[place] for place in usable[::step][:MAX_ROWS]]
        self.has_gold = any(gold is not None for gold in gold_answers)
        if not self.has_gold:
            self.skipped.append("whether right answers are paid, since no column holds them (gold_column)")
        self.gold_answers = [gold_answers[place] or "42" for place in usable[::step][:MAX_ROWS]]
        self.texts: dict[str, list[Probe]] = {}
        """Kind of probe -> probes."""
        self.candidates: Sequence[AnswerForm] = ()
        """Forms that were tried: all with their reasoning in several lines, then all in one line."""
        self.rows_of_other_wrong: list[int] = []
        """Index into `rows` of each probe `other wrong`."""
        sampled = [(row, text) for row in samples for text in _completions(row)]
        if len(sampled) > MAX_SAMPLED:
            sampled = random.Random("sampled completions").sample(sampled, MAX_SAMPLED)
        self.sampled = sampled
        if not sampled:
            self.skipped.append("completions of a model, since no sample has any")

    def find_form(self, candidates: Sequence[AnswerForm], given: str | None) -> AnswerForm:
        """The form in which right answers earn most; the first of several equal ones."""
        if given is not None:
            if "{answer}" not in given:
                raise ConfigError(f"gold_form={given!r} has no place for the answer: put {{answer}} in it.")
            candidates = [AnswerForm(given), AnswerForm(given, one_line=True)]
        pairs = list(zip(self.rows, self.gold_answers, strict=True))[:FORM_ROWS]
        probes = [(row, form.write(gold)) for form in candidates for row, gold in pairs]
        self._score("forms", probes)
        earned = [0.0] * len(candidates)
        for reward in self.rewards:
            scores = [0.0 if reward.is_about_length else score or 0.0 for score in reward.scores["forms"]]
            for place in range(len(candidates)):
                part = scores[place * len(pairs) : (place + 1) * len(pairs)]
                earned[place] += reward.weight * sum(part)
        self.candidates = candidates
        return candidates[earned.index(max(earned))]

    def score_all(self, form: AnswerForm) -> None:
        pairs = list(zip(self.rows, self.gold_answers, strict=True))
        answers = self.gold_answers
        wrong = [corrupted_answers(gold, answers[index + 1 :] + answers[:index]) for index, gold in enumerate(answers)]
        simplest = list(zip(self.rows, (next(iter(changes.values())) for changes in wrong), strict=True))
        self._score("gold", [(row, form.write(gold)) for row, gold in pairs])
        self._score("wrong", [(row, form.write(answer)) for row, answer in simplest])
        self._score("bare gold", [(row, ANSWER_ONLY.write(gold)) for row, gold in pairs])
        self._score("bare wrong", [(row, ANSWER_ONLY.write(answer)) for row, answer in simplest])
        others = [(index, answer) for index, changes in enumerate(wrong) for answer in list(changes.values())[1:]]
        self.rows_of_other_wrong = [index for index, _ in others]
        self._score("other wrong", [(self.rows[index], form.write(answer)) for index, answer in others])
        self._score("variants", [(row, form.write(text)) for row, gold in pairs for text in equivalent_forms(gold)])
        for words in FILLER_WORDS:
            self._score(f"{words} more words", [(row, form.write(gold, words)) for row, gold in pairs])
        self._score("sampled", self.sampled)
        for kind, texts in (("empty", EMPTY), ("unicode", UNICODE), ("very long", LONG)):
            self._score(kind, [(self.rows[index % len(self.rows)], text) for index, text in enumerate(texts)])

    def _score(self, kind: str, probes: list[Probe]) -> None:
        self.texts[kind] = probes
        for reward in self.rewards:
            reward.scores[kind] = reward.score(kind, probes)

    def mixed(self) -> list[Probe]:
        """A batch of probes of several kinds."""
        return [probe for kind in ("gold", "wrong", "bare gold", "30 more words", "empty", "unicode")
                for probe in self.texts[kind][:3]]  # fmt: skip


def _completions(row: Mapping[str, Any]) -> list[str]:
    several = row.get("completions")
    texts = list(several) if isinstance(several, (list, tuple)) else []
    return [text for text in (row.get("completion"), *texts) if isinstance(text, str)]


def format_score(score: float | None) -> str:
    return "no score" if score is None else f"{score:.4g}"


def excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
