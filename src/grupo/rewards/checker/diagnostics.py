"""The faults of a reward, and of several that are used together, by what they did in an examination."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from statistics import fmean, pstdev

from grupo.rewards.checker.probes import FILLER_WORDS, UNICODE, token_ids
from grupo.rewards.checker.probing import CLOSE, Probe, Probing, Scores, Subject, score_text, shown
from grupo.rewards.checker.report import Fault, Measure

SATURATED = 0.95
"""A reward that gives so large a share of completions its highest or lowest value hardly tells them apart."""
LOST_BESIDE = 20.0
"""A reward whose spread is so many times that of all others together leaves nothing of theirs."""
DISAGREEMENT = 0.02
"""Share of the answers on which two that tell right from wrong may differ."""
ORDINARY = ("gold", "wrong", "bare gold", "bare wrong", "30 more words", "120 more words", "sampled")
"""Kinds of probe that look like what a model writes."""

# Faults of one reward ------------------------------------------------------------------------------------------------


def check_one(probing: Probing, subject: Subject) -> None:
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


def _check_newlines(probing: Probing, subject: Subject) -> None:
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
                f"{shown(form.template)} earns {fmean(one):.3g} with the reasoning in one line, and {fmean(many):.3g} "
                "with the same words in two.",
            )
            return


def _check_constant(subject: Subject) -> bool:
    known = subject.known()
    if max(known) - min(known) > CLOSE:
        return False
    subject.report(
        "constant", f"It returned {known[0]:g} for all {len(known)} completions, right, wrong and empty ones."
    )
    return True


def _check_saturated(subject: Subject) -> None:
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


def _check_batches(probing: Probing, subject: Subject) -> None:
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
            return f"{shown(text)} gets {score_text(a)} and {score_text(b)}"
    return None


def _check_empty(subject: Subject) -> None:
    paid = max(subject.known("empty"), default=0.0)
    if paid > CLOSE and not subject.is_about_length:
        subject.report("pays-empty", f"It pays {paid:g} for an empty completion; right answers get "
                                     f"{score_text(subject.mean('gold'))} on average.")  # fmt: skip


def _check_length(subject: Subject) -> None:
    """The same right answers behind more and more words."""
    means = [subject.mean(f"{words} more words") for words in FILLER_WORDS]
    known = [mean for mean in means if mean is not None]
    if len(known) < len(FILLER_WORDS) or subject.spread() <= CLOSE:
        return
    steps = [after - before for before, after in itertools.pairwise(known)]
    change = known[-1] - known[0]
    ordinary = subject.known(*ORDINARY)  # not the very long texts, beside which any length is small
    is_monotone = all(step >= -CLOSE for step in steps) or all(step <= CLOSE for step in steps)
    if is_monotone and abs(change) > 0.1 * (max(ordinary) - min(ordinary)) + CLOSE:
        r = _correlation([math.log(words) for words in FILLER_WORDS], known)
        subject.report(
            "length-bias",
            f"The same right answers get {known[0]:.3g} behind {FILLER_WORDS[0]} more words of reasoning and "
            f"{known[-1]:.3g} behind {FILLER_WORDS[-1]} (correlation with the logarithm of the length {r:.2f}).",
        )


def _check_wrong_answers(probing: Probing, subject: Subject) -> None:
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
            f"it: {shown(text)}, where {gold_answer!r:.40} is right.",
        )


def _judges(subject: Subject) -> bool:
    """Whether it tells right answers from wrong ones."""
    right, wrong = subject.mean("gold"), subject.mean("wrong")
    return right is not None and wrong is not None and right - wrong > max(0.1 * subject.spread(), CLOSE)


# Faults of several together ------------------------------------------------------------------------------------------


def faults_of_the_sum(probing: Probing, subjects: Sequence[Subject]) -> list[Fault]:
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


def _format_over_correctness(subjects: Sequence[Subject]) -> list[Fault]:
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


def disagreements(probing: Probing, subjects: Sequence[Subject]) -> list[Fault]:
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
                        f"{shown(text)} is right, for {no.name} it is not.",
                    )
                )
    return faults


def _verdicts(subject: Subject, kinds: Sequence[str]) -> list[bool | None]:
    border = ((subject.mean("gold") or 0.0) + (subject.mean("wrong") or 0.0)) / 2
    return [None if score is None else score > border for kind in kinds for score in subject.scores[kind]]


def _total(subjects: Sequence[Subject], kind: str) -> float:
    return sum(subject.weight * (subject.mean(kind) or 0.0) for subject in subjects)


def _weighted_spread(subject: Subject) -> float:
    known = subject.known(*ORDINARY)
    return abs(subject.weight) * pstdev(known) if known else 0.0


def measured(probing: Probing, subject: Subject, summed: Sequence[Subject]) -> Measure:
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
