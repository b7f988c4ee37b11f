"""Diagnoses faults of single rewards, and of rewards used together, from their scores on the probes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from statistics import fmean, pstdev

from grupo.rewards.checker.probes import FILLER_WORDS, UNICODE, token_ids
from grupo.rewards.checker.probing import TOLERANCE, Probe, ProbeSuite, RewardUnderTest, Scores, excerpt, format_score
from grupo.rewards.checker.report import Fault, Measure

SATURATED = 0.95
"""Share of completions at its highest or lowest value from which a reward hardly distinguishes them."""
DOMINANCE_RATIO = 20.0
"""Ratio of a reward's spread to that of all others together from which the others have no effect."""
DISAGREEMENT = 0.02
"""Share of the answers on which two rewards that tell right from wrong may differ."""
ORDINARY = ("gold", "wrong", "bare gold", "bare wrong", "30 more words", "120 more words", "sampled")
"""Kinds of probe that resemble completions of a model."""

# Faults of one reward ------------------------------------------------------------------------------------------------


def check_one(suite: ProbeSuite, reward: RewardUnderTest) -> None:
    if not reward.broken:
        _check_batches(suite, reward)
    if not reward.is_reliable():
        return
    if not reward.known():
        count = sum(map(len, reward.scores.values()))
        if not reward.faults:
            reward.add_fault("abstains", f"It returned None for all {count} completions.")
        return
    abstained = reward.scores["gold"].count(None)
    if abstained > len(suite.rows) / 2 and not {"crash", "not-finite"} & reward.faults.keys():
        reward.add_fault("abstains", f"It has no score for {abstained} of {len(suite.rows)} right answers.")
    if not _check_constant(reward):
        _check_saturated(reward)
    _check_empty(reward)
    if not reward.is_about_length:
        _check_newlines(suite, reward)
        _check_length(reward)
        if suite.has_gold:
            _check_wrong_answers(suite, reward)


def _check_newlines(suite: ProbeSuite, reward: RewardUnderTest) -> None:
    """Compare each form with the reasoning in two lines and in one line."""
    scores = [score or 0.0 for score in reward.scores["forms"]]
    half = len(scores) // 2
    count = half // (len(suite.candidates) // 2)
    for place, form in enumerate(suite.candidates[: len(suite.candidates) // 2]):
        many = scores[place * count : (place + 1) * count]
        one = scores[half + place * count : half + (place + 1) * count]
        if all(a < b - TOLERANCE for a, b in zip(many, one, strict=True)):
            reward.add_fault(
                "newline-sensitive",
                f"{excerpt(form.template)} earns {fmean(one):.3g} with the reasoning in one line, and "
                f"{fmean(many):.3g} with the same words in two lines.",
            )
            return


def _check_constant(reward: RewardUnderTest) -> bool:
    known = reward.known()
    if max(known) - min(known) > TOLERANCE:
        return False
    reward.add_fault(
        "constant", f"It returned {known[0]:g} for all {len(known)} completions, right, wrong and empty ones."
    )
    return True


def _check_saturated(reward: RewardUnderTest) -> None:
    """Count scores at its highest or lowest value, on sampled completions or else on the probes."""
    low, high = min(reward.known()), max(reward.known())
    sampled = reward.known("sampled")
    if len(sampled) >= 16:
        for bound, what in ((high, "highest"), (low, "lowest")):
            count = sum(abs(score - bound) <= TOLERANCE for score in sampled)
            if count >= SATURATED * len(sampled):
                reward.add_fault(
                    "saturated",
                    f"{count} of {len(sampled)} sampled completions get its {what} value, {bound:g}: almost no group "
                    "has different scores.",
                )
    elif not reward.is_about_length:
        pool = reward.known("gold", "wrong", "bare gold", "bare wrong", "other wrong", "unicode", "very long")
        count = sum(score >= high - TOLERANCE for score in pool)
        if pool and count >= SATURATED * len(pool):
            reward.add_fault(
                "saturated", f"{count} of {len(pool)} completions, right and wrong, get its highest value, {high:g}."
            )


def _check_batches(suite: ProbeSuite, reward: RewardUnderTest) -> None:
    """The score of a completion must not depend on the call, its position or the other completions."""
    batch = suite.mixed()
    count = len(batch)
    first = reward.score("mixed", batch)
    started = time.perf_counter()
    again = reward.score("mixed", batch)
    seconds = (time.perf_counter() - started) / count
    reward.seconds = seconds
    if reward.broken:
        return
    if seconds > suite.slow:
        reward.add_fault(
            "slow",
            f"It takes {seconds * 1000:.0f} ms per completion, {seconds * 64:.1f} s for 64 ({count} were timed).",
        )
    if difference := _difference(batch, first, again):
        reward.add_fault("not-repeatable", f"Called twice on the same batch, {difference}.")
        return
    reversed_batch = reward.score("mixed", batch[::-1])[::-1]
    if difference := _difference(batch, first, reversed_batch):
        reward.add_fault("order-dependent", f"With the batch in reverse order, {difference}.")
        return
    for parity in (0, 1):
        changed = [
            probe if index % 2 == parity else (probe[0], UNICODE[index % len(UNICODE)])
            for index, probe in enumerate(batch)
        ]
        scores = reward.score("mixed", changed)
        kept = [score if index % 2 == parity else first[index] for index, score in enumerate(scores)]
        if difference := _difference(batch, first, kept):
            reward.add_fault("neighbour-dependent", f"With other completions in the batch, {difference}.")
            return
    alone = [reward.score("mixed", [probe])[0] for probe in batch[:6]]
    if difference := _difference(batch[:6], first[:6], alone):
        reward.add_fault("neighbour-dependent", f"Scored alone, {difference}.")


def _difference(batch: Sequence[Probe], first: Scores, second: Scores) -> str | None:
    """The first probe on which two calls differ, with its two scores; None if they agree."""
    for (_, text), a, b in zip(batch, first, second, strict=True):
        is_same = a is b if a is None or b is None else math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-9)
        if not is_same:
            return f"{excerpt(text)} gets {format_score(a)} and {format_score(b)}"
    return None


def _check_empty(reward: RewardUnderTest) -> None:
    paid = max(reward.known("empty"), default=0.0)
    if paid > TOLERANCE and not reward.is_about_length:
        reward.add_fault("pays-empty", f"It pays {paid:g} for an empty completion; right answers get "
                                     f"{format_score(reward.mean('gold'))} on average.")  # fmt: skip


def _check_length(reward: RewardUnderTest) -> None:
    """Compare the same right answers after more and more words."""
    means = [reward.mean(f"{words} more words") for words in FILLER_WORDS]
    known = [mean for mean in means if mean is not None]
    if len(known) < len(FILLER_WORDS) or reward.spread() <= TOLERANCE:
        return
    steps = [after - before for before, after in itertools.pairwise(known)]
    change = known[-1] - known[0]
    ordinary = reward.known(*ORDINARY)  # not the very long texts, compared with which any length is small
    is_monotone = all(step >= -TOLERANCE for step in steps) or all(step <= TOLERANCE for step in steps)
    if is_monotone and abs(change) > 0.1 * (max(ordinary) - min(ordinary)) + TOLERANCE:
        r = _correlation([math.log(words) for words in FILLER_WORDS], known)
        reward.add_fault(
            "length-bias",
            f"The same right answers get {known[0]:.3g} after {FILLER_WORDS[0]} more words of reasoning and "
            f"{known[-1]:.3g} after {FILLER_WORDS[-1]} (correlation with the logarithm of the length {r:.2f}).",
        )


def _check_wrong_answers(suite: ProbeSuite, reward: RewardUnderTest) -> None:
    right, wrong = reward.mean("gold"), reward.mean("wrong")
    if right is None or wrong is None:
        return
    if right < wrong - 0.01 * reward.spread() - TOLERANCE:
        reward.add_fault("prefers-wrong", f"Right answers get {right:.3g} on average, and corrupted ones {wrong:.3g}.")
    if not _tells_right_from_wrong(reward):
        return
    paid = []
    for place, (_, text), score in zip(
        suite.rows_of_other_wrong, suite.texts["other wrong"], reward.scores["other wrong"], strict=True
    ):
        gold, plainest = reward.scores["gold"][place], reward.scores["wrong"][place]
        if None not in (score, gold, plainest) and gold > plainest + TOLERANCE and score >= gold - TOLERANCE:  # type: ignore
            paid.append((text, suite.gold_answers[place]))
    if paid:
        text, gold_answer = paid[0]
        reward.add_fault(
            "accepts-wrong",
            f"{len(paid)} of {len(suite.rows_of_other_wrong)} wrong answers that resemble the right one get as "
            f"much: {excerpt(text)}, where {gold_answer!r:.40} is right.",
        )


def _tells_right_from_wrong(reward: RewardUnderTest) -> bool:
    """Whether it tells right answers from wrong ones."""
    right, wrong = reward.mean("gold"), reward.mean("wrong")
    return right is not None and wrong is not None and right - wrong > max(0.1 * reward.spread(), TOLERANCE)


# Faults of several together ------------------------------------------------------------------------------------------


def check_combined(suite: ProbeSuite, rewards: Sequence[RewardUnderTest]) -> list[Fault]:
    faults = []
    names = " + ".join(reward.name for reward in rewards)
    if suite.has_gold and rewards:
        right, wrong = _combined_mean(rewards, "gold"), _combined_mean(rewards, "wrong")
        wrong_way = any("prefers-wrong" in reward.faults for reward in rewards)
        if right - wrong <= TOLERANCE and not wrong_way:
            seen = f"Right answers earn {right:.3g} on average, and corrupted ones {wrong:.3g}."
            faults.append(Fault("blind-to-correctness", names, seen))
        elif not wrong_way:
            faults += _format_over_correctness(rewards)
    spreads = {reward.name: _weighted_spread(reward) for reward in rewards}
    if len(spreads) > 1:
        largest = max(spreads, key=lambda name: spreads[name])
        others = sum(spreads.values()) - spreads[largest]
        if others > TOLERANCE and spreads[largest] > DOMINANCE_RATIO * others:
            faults.append(
                Fault(
                    "dominates",
                    largest,
                    f"Its weighted scores have a standard deviation of {spreads[largest]:.3g}, and those of all other "
                    f"rewards {others:.3g} together: {spreads[largest] / others:.0f} times as much.",
                )
            )
    return faults


def _format_over_correctness(rewards: Sequence[RewardUnderTest]) -> list[Fault]:
    """Compare what the form adds to a wrong answer with what being right adds in the same form."""
    judged = [reward for reward in rewards if not reward.is_about_length]
    correctness = _combined_mean(judged, "gold") - _combined_mean(judged, "wrong")
    format_ = _combined_mean(judged, "wrong") - _combined_mean(judged, "bare wrong")
    if format_ <= correctness + TOLERANCE:
        return []
    gains = {
        reward.name: reward.weight * ((reward.mean("wrong") or 0.0) - (reward.mean("bare wrong") or 0.0))
        for reward in judged
    }
    return [
        Fault(
            "format-over-correctness",
            " + ".join(name for name, gain in gains.items() if gain > TOLERANCE),
            f"The expected form earns {format_:.3g} more than a bare answer, even around a wrong one; being right "
            f"earns only {correctness:.3g}.",
        )
    ]


def disagreements(suite: ProbeSuite, rewards: Sequence[RewardUnderTest]) -> list[Fault]:
    """Compare rewards that tell right from wrong pairwise, on all probes with an answer."""
    faults = []
    judges = [
        reward
        for reward in rewards
        if suite.has_gold and not reward.is_about_length and _tells_right_from_wrong(reward)
    ]
    kinds = ("gold", "variants", "wrong", "other wrong", "sampled")
    texts = [text for kind in kinds for _, text in suite.texts[kind]]
    for place, one in enumerate(judges):
        for other in judges[place + 1 :]:
            verdicts = list(zip(texts, _decisions(one, kinds), _decisions(other, kinds), strict=True))
            both = [verdict for verdict in verdicts if None not in verdict]
            apart = [verdict for verdict in both if verdict[1] != verdict[2]]
            if len(apart) > DISAGREEMENT * len(both):
                text, is_right, _ = apart[0]
                yes, no = (one, other) if is_right else (other, one)
                faults.append(
                    Fault(
                        "verifiers-disagree",
                        f"{one.name} + {other.name}",
                        f"On {len(apart)} of {len(both)} answers one says right and the other wrong: for {yes.name} "
                        f"{excerpt(text)} is right, for {no.name} it is not.",
                    )
                )
    return faults


def _decisions(reward: RewardUnderTest, kinds: Sequence[str]) -> list[bool | None]:
    border = ((reward.mean("gold") or 0.0) + (reward.mean("wrong") or 0.0)) / 2
    return [None if score is None else score > border for kind in kinds for score in reward.scores[kind]]


def _combined_mean(rewards: Sequence[RewardUnderTest], kind: str) -> float:
    return sum(reward.weight * (reward.mean(kind) or 0.0) for reward in rewards)


def _weighted_spread(reward: RewardUnderTest) -> float:
    known = reward.known(*ORDINARY)
    return abs(reward.weight) * pstdev(known) if known else 0.0


def measure(suite: ProbeSuite, reward: RewardUnderTest, summed: Sequence[RewardUnderTest]) -> Measure:
    spreads = sum(_weighted_spread(other) for other in summed)
    lengths, scores = [], []
    for (_, text), score in zip(suite.sampled, reward.scores.get("sampled", []), strict=False):
        if score is not None:
            lengths.append(float(len(token_ids(text, reward.vocabulary))))
            scores.append(score)
    return Measure(
        gold=reward.mean("gold") if suite.has_gold else None,
        wrong=reward.mean("wrong") if suite.has_gold else None,
        empty=reward.mean("empty"),
        sampled=reward.mean("sampled"),
        share_of_spread=_weighted_spread(reward) / spreads if spreads else None,
        length_correlation=_correlation(lengths, scores) if len(scores) >= 16 else None,
        seconds_per_completion=reward.seconds,
    )


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's r; 0 if one of the two does not vary."""
    spread = pstdev(first) * pstdev(second)
    if spread == 0:
        return 0.0
    a, b = fmean(first), fmean(second)
    return fmean((x - a) * (y - b) for x, y in zip(first, second, strict=True)) / spread
