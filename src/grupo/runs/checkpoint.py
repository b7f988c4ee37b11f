"""What a checkpoint holds beyond that of `transformers.Trainer`: the open rollout window and the controllers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grupo.errors import ConfigError
from grupo.records import Sample

Window = tuple[int, list[list[Sample]]]


def save_state(folder: Path, *, rank: int, world_size: int, window: Window | None, **parts: Any) -> None:
    """Writes the state of one rank: its samples of the open window, and `parts`, which must be plain or tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = (
        None if window is None else (window[0], [[dataclasses.asdict(sample) for sample in step] for step in window[1]])
    )
    torch.save({"world_size": world_size, "window": plain, **parts}, _path(folder, rank))


def load_state(folder: Path, *, rank: int, world_size: int) -> dict[str, Any] | None:
    """The state of one rank as it was saved, `window` with records again; None where the checkpoint has none.

    Raises:
        ConfigError: the checkpoint was written by another number of processes.
    """
    if not _path(folder, 0).is_file():
        return None
    saved = torch.load(_path(folder, 0), map_location="cpu", weights_only=True)
    if saved["world_size"] != world_size:
        raise ConfigError(
            f"The checkpoint {folder} was written by {saved['world_size']} processes, and this run has {world_size}: "
            f"each process goes on with its own completions. Start it with {saved['world_size']}."
        )
    state: dict[str, Any] = (
        saved if rank == 0 else torch.load(_path(folder, rank), map_location="cpu", weights_only=True)
    )
    if state["window"] is not None:
        index, steps = state["window"]
        state["window"] = (index, [_samples(step) for step in steps])
    return state


def _samples(records: Sequence[dict[str, Any]]) -> list[Sample]:
    return [Sample(**record) for record in records]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"grupo_state_{rank}.pt"
