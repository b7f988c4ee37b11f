"""Faults that the checker can find, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FAULTS: Mapping[str, str] = MappingProxyType(
    {
        "missing-column": "Rename the column or the parameter, or give the parameter a default.",
        "crash": "Handle such a completion: a reward gets whatever the model writes. Return 0 or None for text "
        "that it cannot read.",
        "timeout": "Make it faster, above all on long texts: a pattern with nested repetition takes exponential time. "
        "A judge gets several hundred requests: check the other rewards without it.",
        "slow": "Make it faster, or asynchronous if it waits for something; each step waits for the slowest reward.",
        "wrong-count": "Return one number per completion, in the order of the completions.",
        "wrong-type": "Return a list of numbers, with None for a completion that cannot be judged.",
        "not-finite": "Return a finite number, or None to abstain. Guard divisions and logarithms.",
        "out-of-range": "Correct the value, or the declared value_range.",
        "abstains": "Give gold answers that the reward can read; its warning names those that it cannot.",
        "constant": "It teaches nothing. If it expects a format that no probe has, pass that as gold_form; if it "
        "looks for something rare, check it with sampled completions.",
        "saturated": "Make it harder or finer, so that completions of one prompt differ.",
        "not-repeatable": "Remove randomness and memory of earlier calls: the same completion must get the same score.",
        "order-dependent": "Score every completion by itself, not by its position in the batch.",
        "neighbour-dependent": "Score every completion by itself: the rest of the batch differs between processes, and "
        "advantages compare completions anyway.",
        "pays-empty": "Return 0 or less for an empty completion, or the model learns to stop immediately.",
        "prefers-wrong": "The sign or the gold column is wrong.",
        "accepts-wrong": "Compare the answer as a whole, not whether the gold answer occurs somewhere in the text.",
        "blind-to-correctness": "Add a reward that compares with the gold answer, or name the gold column "
        "(gold_column) or the form that the rewards expect (gold_form).",
        "format-over-correctness": "Lower the weight of the format rewards, or raise that of the right answer: the "
        "form must be worth less than being right.",
        "dominates": "Bring the rewards to a common scale with their weights.",
        "length-bias": "Judge the answer, not the text around it. Where length is meant, take it from completion_ids.",
        "newline-sensitive": "Let the pattern match line breaks (re.DOTALL in Python): models think in many lines.",
        "verifiers-disagree": "Read the example, and keep the verifier that is right about it.",
    }
)
"""Name of a fault -> what to do about it."""


@dataclass(frozen=True)
class Fault:
    """A fault of one reward, or of several together."""

    name: str
    """One of `FAULTS`."""
    reward: str
    """Name of the reward, or names of several, joined by ' + '."""
    seen: str
    """The observation, a sentence with numbers."""

    @property
    def remedy(self) -> str:
        return FAULTS[self.name]

    def __str__(self) -> str:
        return f"{self.name} ({self.reward}): {self.seen} {self.remedy}"


@dataclass(frozen=True)
class Measure:
    """Measurements of one reward; None if there was nothing to measure."""

    gold: float | None
    """Mean over right answers, in the form that the rewards pay best."""
    wrong: float | None
    empty: float | None
    sampled: float | None
    share_of_spread: float | None
    """Its share of the weighted standard deviations of all rewards."""
    length_correlation: float | None
    """Pearson's r of score and number of tokens over the sampled completions."""
    seconds_per_completion: float | None


@dataclass(frozen=True)
class RewardReport:
    """Result of `check_rewards`."""

    faults: tuple[Fault, ...]
    measures: Mapping[str, Measure]
    form: str
    """Template of right answers, with `{reasoning}` and `{answer}`."""
    skipped: tuple[str, ...]
    """Checks that could not be made, and why."""

    @property
    def names(self) -> list[str]:
        """Names of the different faults."""
        return list(dict.fromkeys(fault.name for fault in self.faults))

    def __str__(self) -> str:
        lines = [
            f"{name}: " + ", ".join(f"{what.replace('_', ' ')} {value:.3g}" for what, value in vars(measure).items()
                                    if value is not None)
            for name, measure in self.measures.items()
        ]  # fmt: skip
        lines.append(f"answers were written as {self.form!r}")
        lines += [f"not checked: {what}" for what in self.skipped]
        lines += [str(fault) for fault in self.faults] or ["no faults found"]
        return "\n".join(lines)
