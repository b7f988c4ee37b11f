"""What is measured, in which order, and how the rows of the result follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from suite.recipes import RECIPES

Found = Mapping[str, dict[str, Any]]
"""Name of a job -> what it returned."""


@dataclass(frozen=True)
class Job:
    """One measurement: a function that runs alone in a process of its own and returns what JSON can hold."""

    name: str
    function: str
    """module:name"""
    arguments: dict[str, Any] = field(default_factory=dict)


def recipe_jobs(folder: str, tiny: bool) -> list[Job]:
    """TRL, we, TRL: no slow minute of the machine meets one side only."""
    sides = (("trl, checkpointing", "trl", True), ("ours", "ours", False), ("trl, no checkpointing", "trl", False))
    size = {"steps": 1, "tokens": 8} if tiny else {"steps": 2}
    return [
        Job(
            f"{recipe}: {label}",
            "suite.steps:measure_recipe",
            {"folder": folder, "recipe": recipe, "side": side, "checkpointing": checkpointing, **size},
        )
        for recipe in RECIPES
        for label, side, checkpointing in sides
    ]


def part_jobs(folder: str, tiny: bool) -> list[Job]:
    repeats = {"repeats": 1 if tiny else 3}
    # Minutes each, and nothing in it needs warming up.
    few = {"repeats": 1 if tiny else 2, "warm_up": 0}
    matrices = {"matrix_size": 64} if tiny else {}
    prompts, completion = ((16, 32), 8) if tiny else ((512, 1024), 128)
    head = (256, 512, 8) if tiny else (16384, 128256, 64)
    return [
        Job("machine", "suite.floors:measure_machine", {"size": 64, "numbers": 2**12} if tiny else {}),
        *(
            Job(
                f"generation, {lengths}",
                "suite.parts:measure_generation",
                {"folder": folder, "lengths": lengths, "tokens": 8 if tiny else tokens, **often},
            )
            for lengths, tokens, often in (("equal", 96, repeats), ("geometric", 256, few))
        ),
        *(
            Job(
                f"scoring, {prompt}",
                "suite.parts:measure_scoring",
                {"folder": folder, "prompt_tokens": prompt, "completion_tokens": completion, **repeats, **matrices},
            )
            for prompt in prompts
        ),
        Job(
            "log-prob memory",
            "suite.parts:measure_logprob_memory",
            dict(zip(("tokens", "vocabulary_size", "hidden_size"), head, strict=True)),
        ),
    ]


BASE = {"group_size": 8, "prompt_tokens": 256, "completion_tokens": 64, "vocabulary_size": 49152}
AXES = {
    "group_size": [2, 4, 8, 16, 32],
    "prompt_tokens": [64, 128, 256, 512, 1024],
    "completion_tokens": [32, 64, 128, 256, 512],
    "vocabulary_size": [8192, 16384, 32768, 65536, 131072, 262144],
}
TINY_BASE = {"group_size": 2, "prompt_tokens": 8, "completion_tokens": 4, "vocabulary_size": 64}


TINY_VALUES = (8, 16)


def sweep_jobs(folder: str, tiny: bool) -> list[Job]:
    base = TINY_BASE if tiny else BASE
    return [
        Job(
            f"{axis} {value}",
            "suite.sweeps:measure_point",
            {"sizes": {**base, axis: value}, "narrow": tiny or axis == "vocabulary_size"},
        )
        for axis, values in AXES.items()
        for value in (TINY_VALUES if tiny else values)
    ]


def points_of(axis: str, found: Found) -> dict[int, dict[str, Any]]:
    """The points of one axis of the sweeps, by value."""
    names = {name: name.rpartition(" ") for name in found}
    return {int(value): found[name] for name, (of_axis, _, value) in names.items() if of_axis == axis}


def learning_jobs(folder: str, tiny: bool) -> list[Job]:
    size: dict[str, Any] = {"max_steps": 4, "goal": 0.0} if tiny else {"max_steps": 60}
    return [
        Job("quickstart", "suite.learning:measure_quickstart", {"folder": folder if tiny else "default", "tiny": tiny}),
        *(
            Job(f"learning, {side}", "suite.learning:measure_learning", {"folder": folder, "side": side, **size})
            for side in ("ours", "trl")
        ),
    ]


SECTIONS = {"recipes": recipe_jobs, "parts": part_jobs, "sweeps": sweep_jobs, "learning": learning_jobs}


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(section: str, found: Found) -> list[dict[str, Any]]:
    """The rows of a section: `name, ours, peer, ratio, unit`, and which ratio it is."""
    makers = {"recipes": _recipe_rows, "parts": _part_rows, "learning": _learning_rows}
    return makers[section](found) if section in makers else []


def _row(name: str, ours: float, peer: float | None, unit: str, ratio_is: str) -> dict[str, Any]:
    ratio = None
    if peer is not None:
        ratio = ours / peer if ratio_is == "ours / peer" else peer / ours
    numbers = {"ours": ours, "peer": peer, "ratio": ratio}
    rounded = {key: None if value is None else _rounded(value) for key, value in numbers.items()}
    return {"name": name, **rounded, "unit": unit, "ratio_is": None if ratio is None else ratio_is}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _recipe_rows(found: Found) -> list[dict[str, Any]]:
    rows = []
    for recipe, spec in RECIPES.items():
        ours = found[f"{recipe}: ours"]
        with_checkpointing, without = found[f"{recipe}: trl, checkpointing"], found[f"{recipe}: trl, no checkpointing"]
        faster = min(with_checkpointing, without, key=lambda run: run["step_s"])
        smaller = min(with_checkpointing, without, key=lambda run: run["peak_mib"])
        for what, key, best, unit, ratio_is in (
            ("one step", "step_s", faster, "s", "peer / ours"),
            ("of it generating", "generating_s", faster, "s", "peer / ours"),
            ("peak memory above the loaded model", "peak_mib", smaller, "MiB", "ours / peer"),
        ):
            row = _row(f"{spec.title}: {what}", ours[key], best[key], unit, ratio_is)
            both = {"with": with_checkpointing[key], "without": without[key]}
            rows.append({**row, "peer_checkpointing": {name: _rounded(value) for name, value in both.items()}})
    return rows


def _part_rows(found: Found) -> list[dict[str, Any]]:
    machine, equal, geometric = found["machine"], found["generation, equal"], found["generation, geometric"]
    rows = [
        _row("matrix products, best of ten", machine["gflops"], None, "GFLOP/s", ""),
        _row("memory reads, best of ten", machine["gb_per_s"], None, "GB/s", ""),
        _row(_generation_name(equal, "each"), equal["ours"], equal["peer"], "s", "peer / ours"),
        _row("the same against bare matrix products", equal["ours"], equal["floor"], "s", "floor / ours"),
        _row("the same against them in oneDNN's layout", equal["ours"], equal["packed_floor"], "s", "floor / ours"),
        _row(_generation_name(geometric, "at most"), geometric["ours"], geometric["peer"], "s", "peer / ours"),
    ]
    scoring = {name.removeprefix("scoring, "): result for name, result in found.items() if name.startswith("scoring, ")}
    for prompt, result in scoring.items():
        name = f"scoring a group of 8, {prompt} + {result['completion_tokens']} tokens"
        rows.append(_row(name, result["shared"], result["plain"], "s", "peer / ours"))
        rows.append(_row(f"{name}, against matrix peak", result["shared"], result["floor"], "s", "floor / ours"))
    memory = found["log-prob memory"]
    name = f"log-probs and backward, {memory['tokens']} tokens, vocabulary {memory['vocabulary_size']}"
    rows.append(_row(name, memory["peak_mib"], memory["full_logits_mib"], "MiB", "ours / peer"))
    return rows


def _generation_name(result: Mapping[str, Any], which: str) -> str:
    return f"sampling {result['completions']} completions, {result['longest']} tokens {which}"


def _learning_rows(found: Found) -> list[dict[str, Any]]:
    ours, peer = found["learning, ours"]["seconds"], found["learning, trl"]["seconds"]
    rows = [_row("the whole quickstart", found["quickstart"]["wall_s"], None, "s", "")]
    if ours is not None:
        rows.append(_row("times tables, training until 70 % are right", ours, peer, "s", "peer / ours"))
    return rows
