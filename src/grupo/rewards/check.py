"""What is wrong with a set of rewards, found before training: `check_rewards` and its report.

Each reward is called on gold answers in many forms, on spoilt ones, on empty, very long and odd texts, and on sampled
completions where there are some. What it does there is compared with what a reward must and should do; `FAULTS` of
`report.py` has the names of all that is looked for.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

from grupo.errors import ConfigError, DataError, RewardError
from grupo.rewards.calls import Function
from grupo.rewards.format import Tagged
from grupo.rewards.probes import (
    BARE,
    EMPTY,
    FILLER_WORDS,
    LONG,
    UNICODE,
    Form,
    as_completion,
    columns_of,
    forms,
    spoilt,
    token_ids,
    variants,
    written_gold,
)
from grupo.rewards.report import FAULTS, Fault, Measure, RewardReport
from grupo.rewards.runner import RewardRunner
from grupo.rewards.verifiers import GoldVerifier, reward_from

ROWS = 12
"""So many rows are probed."""
ROWS_OF_FORMS = 2
"""So many rows find out in which form the rewards want an answer."""
SAMPLED = 512
"""So many sampled completions are scored at most."""
SATURATED = 0.95
"""A reward that gives so large a share of completions its highest or lowest value hardly tells them apart."""
LOST_BESIDE = 20.0
"""A reward whose spread is so many times that of all others together leaves nothing of theirs."""
DISAGREEMENT = 0.02
"""Share of the answers on which two that tell right from wrong may differ."""
CLOSE = 1e-6
"""Scores that differ by less are the same."""

Scores = list[float | None]
Probe = tuple[Mapping[str, Any], str]
"""A dataset row and the text of a completion."""


@dataclass
class _Subject:
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
            if re.search(r"returned [0-9]+ rewards for [0-9]+ completions", str(error)):
                name = "wrong-count"
            elif " returned " in str(error):
                name = "wrong-type"
            self.report(name, f"On {len(probes)} completions ({kind}): {error}")
            return None
        for failure in table.failures:
            where = f"on {_shown(probes[failure.rows[0]][1])} ({kind})"
            if failure.kind == "timeout":
                self.broken = True
                self.report("timeout", f"Of {len(probes)} completions ({kind}), {failure.message}.")
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
                    f"It declares values from {low:g} to {high:g}, and returned {score:g} on {_shown(text)} ({kind}).",
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


ORDINARY = ("gold", "wrong", "bare gold", "bare wrong", "30 more words", "120 more words", "sampled")
"""Kinds of probe that look like what a model writes."""


def check_rewards(
    rewards: Callable[..., Any] | Sequence[Callable[..., Any]],
    samples: Sequence[Mapping[str, Any]],
    *,
    weights: Sequence[float] | None = None,
    gold_column: str | None = None,
    gold_form: str | None = None,
    verifiers: Sequence[Callable[..., Any]] = (),
    timeout: float = 10.0,
    seconds_per_completion: float = 0.05,
) -> RewardReport:
    """Looks for faults in rewards that are to be used together.

    Args:
        rewards: reward functions, as for `GRPOTrainer`.
        samples: dataset rows with `prompt` and the columns that the rewards need. Rows may hold `completion`, a text,
            or `completions`, several, that a model has given: with 16 or more, saturation is measured on them.
        weights: of the rewards in the sum; 1 each by default.
        gold_column: column with the right answers; by default that of the library's rewards, else `answer` or
            `solution`.
        gold_form: how a right completion is written, with `{answer}` and perhaps `{reasoning}` in it. By default the
            form, of some 40, that the rewards pay most for.
        verifiers: verifiers, or more functions of the same kind, that are not part of the sum; those that tell right
            from wrong are compared with each other and with the rewards that do.
        timeout: seconds that one call may take.
        seconds_per_completion: more than this is reported as slow.

    Raises:
        ConfigError: no reward, or not as many weights as rewards.
        DataError: no sample, or one without `prompt`.
    """
    functions = [rewards] if callable(rewards) or isinstance(rewards, str) else list(rewards)
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(f"weights has {len(weights)} numbers for {len(functions)} rewards; give one for each.")
    if weights is not None and not all(isinstance(weight, Real) and math.isfinite(weight) for weight in weights):
        raise ConfigError(f"weights={list(weights)!r:.80} are no finite numbers; give one for each reward.")
    if not samples:
        raise DataError("There are no samples: give at least one row with a prompt.")
    for place, row in enumerate(samples):
        if "prompt" not in row:
            raise DataError(f"Sample {place} has no 'prompt'; it has {', '.join(map(str, row)) or 'nothing'}.")
    vocabulary: dict[str, int] = {}
    given = [float(weight) for weight in weights or [1.0] * len(functions)]
    # What gives verdicts is made to give numbers.
    opinions = [reward_from(one, right=1.0, wrong=0.0) if isinstance(one, GoldVerifier) else one for one in verifiers]
    everyone: list[Any] = [*functions, *opinions]
    names = RewardRunner(everyone).names
    subjects = [
        _subject(function, name, weight, timeout, vocabulary)
        for function, name, weight in zip(everyone, names, [*given, *[0.0] * len(opinions)], strict=True)
    ]
    column = gold_column or _gold_column(everyone, samples)
    if gold_column is not None and gold_column not in samples[0]:
        raise DataError(f"gold_column={gold_column!r} is no column of the samples: {', '.join(samples[0])}.")
    for subject in subjects:
        _check_columns(subject, samples)
    expected = [function.marks for function in everyone if isinstance(function, Tagged)]
    probing = _Probing(subjects, samples, column, seconds_per_completion)
    form = probing.find_form(forms(expected), gold_form)
    probing.score_all(form)
    for subject in subjects:
        _check_one(probing, subject)
    faults = [fault for subject in subjects for fault in subject.faults.values()]
    summed = subjects[: len(functions)]
    unreliable = [subject.name for subject in summed if not subject.is_reliable()]
    if unreliable:
        probing.skipped.append(f"the sum of the rewards, as long as {', '.join(unreliable)} cannot be relied on")
    else:
        faults += _of_the_sum(probing, summed)
    faults += _disagreements(probing, [subject for subject in subjects if subject.is_reliable()])
    return RewardReport(
        tuple(faults),
        {subject.name: _measured(probing, subject, summed) for subject in subjects},
        form.template,
        tuple(probing.skipped),
    )


def _subject(function: Any, name: str, weight: float, timeout: float, vocabulary: dict[str, int]) -> _Subject:
    spelt = Function.of(function, name)
    declared = getattr(function, "value_range", None)
    is_range = isinstance(declared, Sequence) and len(declared) == 2 and all(isinstance(one, Real) for one in declared)
    if declared is not None and not is_range:
        raise ConfigError(f"{name} declares value_range={declared!r:.80}; it is the lowest and the highest value.")
    return _Subject(
        RewardRunner([function], timeout=timeout),
        name,
        weight,
        # Whoever asks for the tokens means their number, or how they repeat.
        is_about_length="completion_ids" in spelt.named,
        value_range=(float(declared[0]), float(declared[1])) if declared is not None else None,
        vocabulary=vocabulary,
    )


def _gold_column(functions: Sequence[Any], samples: Sequence[Mapping[str, Any]]) -> str | None:
    wanted = [getattr(function, "gold_column", None) for function in functions]
    for name in (*wanted, "answer", "solution"):
        if isinstance(name, str) and any(written_gold(row.get(name)) is not None for row in samples):
            return name
    return None


def _check_columns(subject: _Subject, samples: Sequence[Mapping[str, Any]]) -> None:
    try:
        subject.runner.check_columns(columns_of(samples))
    except (RewardError, DataError) as error:
        subject.broken = True
        subject.report("missing-column", str(error).removesuffix(" " + FAULTS["missing-column"]))


class _Probing:
    """The probes of one check, and what they were made from."""

    def __init__(
        self, subjects: Sequence[_Subject], samples: Sequence[Mapping[str, Any]], column: str | None, slow: float
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


# Faults of one reward ------------------------------------------------------------------------------------------------


def _check_one(probing: _Probing, subject: _Subject) -> None:
    if not subject.broken:
        _check_batches(probing, subject)
    if not subject.is_reliable():
        return
    if not subject.known():
        count = sum(map(len, subject.scores.values()))
        if not subject.faults:
            subject.report("abstains", f"It returned None for all {count} completions.")
        return
    abstained = subject.scores["gold"].count(None)
    if abstained > len(probing.rows) / 2 and not {"crash", "not-finite"} & subject.faults.keys():
        subject.report("abstains", f"It has no score for {abstained} of {len(probing.rows)} right answers.")
    if not _check_constant(subject):
        _check_saturated(subject)
    _check_empty(subject)
    if not subject.is_about_length:
        _check_newlines(probing, subject)
        _check_length(subject)
        if probing.has_gold:
            _check_wrong_answers(probing, subject)


def _check_newlines(probing: _Probing, subject: _Subject) -> None:
    """Each form with the reasoning in two lines, against the same in one line."""
    scores = [score or 0.0 for score in subject.scores["forms"]]
    half = len(scores) // 2
    count = half // (len(probing.candidates) // 2)
    for place, form in enumerate(probing.candidates[: len(probing.candidates) // 2]):
        many = scores[place * count : (place + 1) * count]
        one = scores[half + place * count : half + (place + 1) * count]
        if all(a < b - CLOSE for a, b in zip(many, one, strict=True)):
            subject.report(
                "newline-sensitive",
                f"{_shown(form.template)} earns {fmean(one):.3g} with the reasoning in one line, and {fmean(many):.3g} "
                "with the same words in two.",
            )
            return


def _check_constant(subject: _Subject) -> bool:
    known = subject.known()
    if max(known) - min(known) > CLOSE:
        return False
    subject.report(
        "constant", f"It returned {known[0]:g} for all {len(known)} completions, right, wrong and empty ones."
    )
    return True


def _check_saturated(subject: _Subject) -> None:
    """At the top of what it ever gives, or at the bottom: on sampled completions, or else on the probes."""
    low, high = min(subject.known()), max(subject.known())
    sampled = subject.known("sampled")
    if len(sampled) >= 16:
        for bound, what in ((high, "highest"), (low, "lowest")):
            count = sum(abs(score - bound) <= CLOSE for score in sampled)
            if count >= SATURATED * len(sampled):
                subject.report(
                    "saturated",
                    f"{count} of {len(sampled)} sampled completions get its {what} value, {bound:g}: almost no group "
                    "differs.",
                )
    elif not subject.is_about_length:
        pool = subject.known("gold", "wrong", "bare gold", "bare wrong", "other wrong", "unicode", "very long")
        count = sum(score >= high - CLOSE for score in pool)
        if pool and count >= SATURATED * len(pool):
            subject.report(
                "saturated", f"{count} of {len(pool)} completions, right and wrong, get its highest value, {high:g}."
            )


def _check_batches(probing: _Probing, subject: _Subject) -> None:
    """The score of a completion must not depend on when, where and beside what it is scored."""
    batch = probing.mixed()
    count = len(batch)
    first = subject.score("mixed", batch)
    started = time.perf_counter()
    again = subject.score("mixed", batch)
    seconds = (time.perf_counter() - started) / count
    subject.seconds = seconds
    if subject.broken:
        return
    if seconds > probing.slow:
        subject.report(
            "slow", f"It takes {seconds * 1000:.0f} ms per completion, {seconds * 64:.1f} s for 64; {count} were timed."
        )
    if difference := _difference(batch, first, again):
        subject.report("not-repeatable", f"Called twice on the same batch, {difference}.")
        return
    turned = subject.score("mixed", batch[::-1])[::-1]
    if difference := _difference(batch, first, turned):
        subject.report("order-dependent", f"With the batch turned round, {difference}.")
        return
    for parity in (0, 1):
        strangers = [
            probe if index % 2 == parity else (probe[0], UNICODE[index % len(UNICODE)])
            for index, probe in enumerate(batch)
        ]
        beside = subject.score("mixed", strangers)
        kept = [score if index % 2 == parity else first[index] for index, score in enumerate(beside)]
        if difference := _difference(batch, first, kept):
            subject.report("neighbour-dependent", f"With other neighbours, {difference}.")
            return
    alone = [subject.score("mixed", [probe])[0] for probe in batch[:6]]
    if difference := _difference(batch[:6], first[:6], alone):
        subject.report("neighbour-dependent", f"Scored alone, {difference}.")


def _difference(batch: Sequence[Probe], first: Scores, second: Scores) -> str | None:
    """The first probe on which two calls differ, and its two scores; None if they do not."""
    for (_, text), a, b in zip(batch, first, second, strict=True):
        is_same = a is b if a is None or b is None else math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-9)
        if not is_same:
            return f"{_shown(text)} gets {_number(a)} and {_number(b)}"
    return None


def _check_empty(subject: _Subject) -> None:
    paid = max(subject.known("empty"), default=0.0)
    if paid > CLOSE and not subject.is_about_length:
        subject.report("pays-empty", f"It pays {paid:g} for an empty completion; right answers get "
                                     f"{_number(subject.mean('gold'))} on average.")  # fmt: skip


def _check_length(subject: _Subject) -> None:
    """The same right answers behind more and more words."""
    means = [subject.mean(f"{words} more words") for words in FILLER_WORDS]
    known = [mean for mean in means if mean is not None]
    if len(known) < len(FILLER_WORDS) or subject.spread() <= CLOSE:
        return
    steps = [after - before for before, after in itertools.pairwise(known)]
    change = known[-1] - known[0]
    is_monotone = all(step >= -CLOSE for step in steps) or all(step <= CLOSE for step in steps)
    if is_monotone and abs(change) > 0.1 * subject.spread():
        r = _correlation([math.log(words) for words in FILLER_WORDS], known)
        subject.report(
            "length-bias",
            f"The same right answers get {known[0]:.3g} behind {FILLER_WORDS[0]} more words of reasoning and "
            f"{known[-1]:.3g} behind {FILLER_WORDS[-1]} (correlation with the logarithm of the length {r:.2f}).",
        )


def _check_wrong_answers(probing: _Probing, subject: _Subject) -> None:
    right, wrong = subject.mean("gold"), subject.mean("wrong")
    if right is None or wrong is None:
        return
    if right < wrong - 0.01 * subject.spread() - CLOSE:
        subject.report("prefers-wrong", f"Right answers get {right:.3g} on average, and spoilt ones {wrong:.3g}.")
    if not _judges(subject):
        return
    paid = []
    for place, (_, text), score in zip(
        probing.places_of_others, probing.texts["other wrong"], subject.scores["other wrong"], strict=True
    ):
        gold, plainest = subject.scores["gold"][place], subject.scores["wrong"][place]
        if None not in (score, gold, plainest) and gold > plainest + CLOSE and score >= gold - CLOSE:  # type: ignore
            paid.append((text, probing.golds[place]))
    if paid:
        text, gold_answer = paid[0]
        subject.report(
            "accepts-wrong",
            f"{len(paid)} of {len(probing.places_of_others)} wrong answers that resemble the right one are paid like "
            f"it: {_shown(text)}, where {gold_answer!r:.40} is right.",
        )


def _judges(subject: _Subject) -> bool:
    """Whether it tells right answers from wrong ones."""
    right, wrong = subject.mean("gold"), subject.mean("wrong")
    return right is not None and wrong is not None and right - wrong > max(0.1 * subject.spread(), CLOSE)


# Faults of several together ------------------------------------------------------------------------------------------


def _of_the_sum(probing: _Probing, subjects: Sequence[_Subject]) -> list[Fault]:
    faults = []
    names = " + ".join(subject.name for subject in subjects)
    if probing.has_gold and subjects:
        right, wrong = _total(subjects, "gold"), _total(subjects, "wrong")
        wrong_way = any("prefers-wrong" in subject.faults for subject in subjects)
        if right - wrong <= CLOSE and not wrong_way:
            seen = f"Right answers earn {right:.3g} on average, and spoilt ones {wrong:.3g}."
            faults.append(Fault("blind-to-correctness", names, seen))
        elif not wrong_way:
            faults += _format_over_correctness(subjects)
    spreads = {subject.name: _weighted_spread(subject) for subject in subjects}
    if len(spreads) > 1:
        largest = max(spreads, key=lambda name: spreads[name])
        others = sum(spreads.values()) - spreads[largest]
        if others > CLOSE and spreads[largest] > LOST_BESIDE * others:
            faults.append(
                Fault(
                    "dominates",
                    largest,
                    f"Its weighted scores have a standard deviation of {spreads[largest]:.3g}, and those of all other "
                    f"rewards {others:.3g} together: {spreads[largest] / others:.0f} times as much.",
                )
            )
    return faults


def _format_over_correctness(subjects: Sequence[_Subject]) -> list[Fault]:
    """What the form adds to a wrong answer, against what being right adds in the same form."""
    judged = [subject for subject in subjects if not subject.is_about_length]
    correctness = _total(judged, "gold") - _total(judged, "wrong")
    format_ = _total(judged, "wrong") - _total(judged, "bare wrong")
    if format_ <= correctness + CLOSE:
        return []
    gains = {
        subject.name: subject.weight * ((subject.mean("wrong") or 0.0) - (subject.mean("bare wrong") or 0.0))
        for subject in judged
    }
    return [
        Fault(
            "format-over-correctness",
            " + ".join(name for name, gain in gains.items() if gain > CLOSE),
            f"The expected form earns {format_:.3g} more than a bare answer, even around a wrong one; being right "
            f"earns only {correctness:.3g}.",
        )
    ]


def _disagreements(probing: _Probing, subjects: Sequence[_Subject]) -> list[Fault]:
    """Pairs of those that tell right from wrong, on everything that has an answer to be right or wrong."""
    faults = []
    judges = [subject for subject in subjects if probing.has_gold and not subject.is_about_length and _judges(subject)]
    kinds = ("gold", "variants", "wrong", "other wrong", "sampled")
    texts = [text for kind in kinds for _, text in probing.texts[kind]]
    for place, one in enumerate(judges):
        for other in judges[place + 1 :]:
            verdicts = list(zip(texts, _verdicts(one, kinds), _verdicts(other, kinds), strict=True))
            both = [verdict for verdict in verdicts if None not in verdict]
            apart = [verdict for verdict in both if verdict[1] != verdict[2]]
            if len(apart) > DISAGREEMENT * len(both):
                text, is_right, _ = apart[0]
                yes, no = (one, other) if is_right else (other, one)
                faults.append(
                    Fault(
                        "verifiers-disagree",
                        f"{one.name} + {other.name}",
                        f"On {len(apart)} of {len(both)} answers one says right and the other wrong; for {yes.name} "
                        f"{_shown(text)} is right, for {no.name} it is not.",
                    )
                )
    return faults


def _verdicts(subject: _Subject, kinds: Sequence[str]) -> list[bool | None]:
    border = ((subject.mean("gold") or 0.0) + (subject.mean("wrong") or 0.0)) / 2
    return [None if score is None else score > border for kind in kinds for score in subject.scores[kind]]


def _total(subjects: Sequence[_Subject], kind: str) -> float:
    return sum(subject.weight * (subject.mean(kind) or 0.0) for subject in subjects)


def _weighted_spread(subject: _Subject) -> float:
    known = subject.known(*ORDINARY)
    return abs(subject.weight) * pstdev(known) if known else 0.0


def _measured(probing: _Probing, subject: _Subject, summed: Sequence[_Subject]) -> Measure:
    spreads = sum(_weighted_spread(other) for other in summed)
    lengths, scores = [], []
    for (_, text), score in zip(probing.sampled, subject.scores.get("sampled", []), strict=False):
        if score is not None:
            lengths.append(float(len(token_ids(text, subject.vocabulary))))
            scores.append(score)
    return Measure(
        gold=subject.mean("gold") if probing.has_gold else None,
        wrong=subject.mean("wrong") if probing.has_gold else None,
        empty=subject.mean("empty"),
        sampled=subject.mean("sampled"),
        share_of_spread=_weighted_spread(subject) / spreads if spreads else None,
        length_correlation=_correlation(lengths, scores) if len(scores) >= 16 else None,
        seconds_per_completion=subject.seconds,
    )


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's r; 0 where one of the two does not vary."""
    spread = pstdev(first) * pstdev(second)
    if spread == 0:
        return 0.0
    a, b = fmean(first), fmean(second)
    return fmean((x - a) * (y - b) for x, y in zip(first, second, strict=True)) / spread


def _number(score: float | None) -> str:
    return "no score" if score is None else f"{score:.4g}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
