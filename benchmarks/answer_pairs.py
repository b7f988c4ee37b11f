"""The labelled answers of the tests through three comparisons, and the speed of extraction: tables for docs/answers.md.

    python benchmarks/answer_pairs.py

Needs `math-verify` and TRL beside grupo. Nothing else should run meanwhile: it measures time.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from grupo.rewards import Extraction, math_accuracy

TABLE = Path(__file__).parent.parent / "tests" / "rewards" / "verifiers" / "answer_pairs.yaml"
REASONING = "Then 48 of the clips are sold in April, and half as many in May, so we add them: $48 + 24 = 72$.\n"


def ours() -> Callable[[str, Any], bool]:
    reward = math_accuracy(extraction=Extraction())
    return lambda completion, gold: reward([completion], answer=[gold]) == [1.0]


def math_verify() -> Callable[[str, Any], bool]:
    """Its defaults, as its page shows them."""
    from math_verify import parse, verify

    return lambda completion, gold: bool(verify(parse(as_latex(gold)), parse(completion)))


def trl() -> Callable[[str, Any], bool]:
    from trl.rewards import accuracy_reward

    return lambda completion, gold: accuracy_reward([[{"content": completion}]], [as_latex(gold)]) == [1.0]


def as_latex(gold: Any) -> str:
    """math-verify wants the gold answer in dollar signs, and reads less without them."""
    stands_for_itself = re.search(r"(?<!\\)\$|\\\(|\\boxed|####|answer is", str(gold))
    return str(gold) if stands_for_itself else f"${gold}$"


COMPARISONS = {"`math_accuracy`": ours, "math-verify": math_verify, "TRL's `accuracy_reward`": trl}


def compare(table: dict[str, dict[str, list[list[Any]]]]) -> list[str]:
    """Rows of the table: per kind, pairs, and for each comparison the right ones missed and the wrong ones accepted."""
    judges = {name: make() for name, make in COMPARISONS.items()}
    columns = [f"{name}: {what}" for name in judges for what in ("missed", "accepted")]
    rows = [f"| kind | same | different | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    totals = [0] * (2 + len(columns))
    seconds = dict.fromkeys(judges, 0.0)
    for kind, labels in table.items():
        counts = [len(labels["same"]), len(labels["different"])]
        for name, judge in judges.items():
            started = time.perf_counter()
            missed = [pair for pair in labels["same"] if not judge(*pair)]
            accepted = [pair for pair in labels["different"] if judge(*pair)]
            seconds[name] += time.perf_counter() - started
            counts += [len(missed), len(accepted)]
            for what, pairs in (("missed", missed), ("accepted", accepted)):
                for completion, gold in pairs:
                    print(f"{name} {what}: {completion!r} for {gold!r}")
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        rows.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    rows.append(f"| **all** | {' | '.join(f'**{total}**' for total in totals)} |")
    pairs = totals[0] + totals[1]
    each = ", ".join(f"{name} {1e3 * spent / pairs:.3f}" for name, spent in seconds.items())
    return [*rows, "", f"Milliseconds per pair: {each}."]


def extraction_speed(table: dict[str, dict[str, list[list[Any]]]]) -> list[str]:
    """Completions per second on one core, best of five."""
    texts = [pair[0] for labels in table.values() for pairs in labels.values() for pair in pairs]
    rows = ["| completions | all sources | box, else last number | lenient |", "|---|---|---|---|"]
    for name, completions in (
        ("as in the table", texts),
        ("behind 1,000 characters of reasoning", [REASONING * 10 + text for text in texts]),
        ("1,000 characters without an answer at the end", [REASONING * 10 + "and so it goes on. " * 3] * 300),
    ):
        speeds = []
        for extraction in (Extraction(), Extraction(("boxed", "last_number")), Extraction(strict=False)):
            spent = []
            for _ in range(5):
                started = time.perf_counter()
                for _ in range(10):
                    for text in completions:
                        extraction.find(text)
                spent.append(time.perf_counter() - started)
            speeds.append(10 * len(completions) / min(spent))
        rows.append(f"| {name} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} |")
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    pairs = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    print("\n".join([*compare(pairs), "", *extraction_speed(pairs)]))
