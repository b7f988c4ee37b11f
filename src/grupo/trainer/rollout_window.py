"""What a process keeps in a checkpoint beyond `transformers.Trainer`: open rollout window, controllers, counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grupo.types import TrainingSample

Window = tuple[int, list[list[TrainingSample]]]
"""The number of the open rollout window, and this process's samples of each of its optimizer steps."""


def save_state(folder: Path, *, rank: int, window: Window | None, **parts: Any) -> None:
    """Writes the state of one process: its open window, and `parts`, which must be plain values or tensors."""
    plain = (
        None if window is None else (window[0], [[dataclasses.asdict(sample) for sample in step] for step in window[1]])
    )
    torch.save({"window": plain, **parts}, folder / state_file(rank))


def load_state(folder: Path, *, rank: int) -> dict[str, Any]:
    """The state of one process as it was saved, `window` with records again."""
    state: dict[str, Any] = torch.load(folder / state_file(rank), map_location="cpu", weights_only=True)
    if state["window"] is not None:
        index, steps = state["window"]
        state["window"] = (index, [_samples(step) for step in steps])
    return state


def state_file(rank: int) -> str:
    return f"grupo_state_{rank}.pt"


def _samples(records: Sequence[dict[str, Any]]) -> list[TrainingSample]:
    return [TrainingSample(**record) for record in records]
