"""What a checkpoint holds beyond that of `transformers.Trainer`: the open rollout window and the controllers."""

from __future__ import annotations

import dataclasses
import json
import logging
import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grupo.errors import ConfigError
from grupo.records import Sample

logger = logging.getLogger("grupo")

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
        ConfigError: the checkpoint was written by another number of processes, or lacks the state of this one.
    """
    if not _path(folder, 0).is_file():
        return None
    saved = torch.load(_path(folder, 0), map_location="cpu", weights_only=True)
    if saved["world_size"] != world_size:
        raise ConfigError(
            f"The checkpoint {folder} was written by {saved['world_size']} processes, and this run has {world_size}: "
            f"each process goes on with its own completions. Start it with {saved['world_size']}."
        )
    if not _path(folder, rank).is_file():
        raise ConfigError(f"The checkpoint {folder} lacks {_path(folder, rank).name}, the state of process {rank}.")
    state: dict[str, Any] = (
        saved if rank == 0 else torch.load(_path(folder, rank), map_location="cpu", weights_only=True)
    )
    if state["window"] is not None:
        index, steps = state["window"]
        state["window"] = (index, [_samples(step) for step in steps])
    return state


def check_fingerprint(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A resumed run goes on with the same prompts, groups and distribution.

    Raises:
        ConfigError: a setting that decides about them has changed.
    """
    changed = [
        f"{name} was {_short(saved[name])} and is {_short(now[name])}"
        for name in now
        if name in saved and saved[name] != now[name]
    ]
    if changed:
        raise ConfigError(
            f"The checkpoint {folder} belongs to a run with other settings: {'; '.join(changed)}. Set them back to "
            "resume it. To train on with new settings, start a new run from the saved model."
        )


def _short(value: Any) -> str:
    return textwrap.shorten(str(value), 80, placeholder=" ...")


def unfinished(folder: Path) -> list[str]:
    """Files that a checkpoint needs to be resumed from, and that are missing, empty or cut short."""
    states, weights = [*folder.glob("rng_state*.pth")], [*folder.rglob("*.safetensors"), *folder.glob("*.bin")]
    files = [*(folder / name for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt")), *states, *weights]
    for index in folder.glob("*.index.json"):
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if _is_whole(index) else [index]
        files += [folder / name for name in sorted(set(shards))]
    damaged = [path.name for path in [*files, *folder.glob("grupo_state_*.pt")] if not _is_whole(path)]
    return [*damaged, *([] if states else ["rng_state.pth"]), *([] if weights else ["the weights"])]


def _is_whole(path: Path) -> bool:
    """Whether a file is there to its end, as far as its format says so without reading all of it."""
    if not path.is_file() or not path.stat().st_size:
        return False
    if path.suffix == ".json":
        return _parsed(path.read_bytes()) is not None
    if path.suffix == ".safetensors":
        return _safetensors_size(path) == path.stat().st_size
    # What torch saves is a zip archive, whose directory is at the end.
    return path.suffix == ".bin" or zipfile.is_zipfile(path)


def _safetensors_size(path: Path) -> int:
    """Bytes that the header of the file says it has; 0 where the header itself is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = _parsed(file.read(length)) if length < path.stat().st_size else None
    if not isinstance(header, dict):
        return 0
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _parsed(text: bytes) -> Any:
    """The JSON value; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def last_complete_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run that was written to its end.

    Raises:
        ConfigError: there is none.
    """
    numbers = [int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*") if path.name[11:].isdigit()]
    for number in sorted(numbers, reverse=True):
        folder = run / f"checkpoint-{number}"
        missing = unfinished(folder)
        if not missing:
            return folder
        logger.warning(
            "%s was not written to its end (%s); an earlier checkpoint is looked for.", folder, ", ".join(missing)
        )
    raise ConfigError(
        f"{run} has no checkpoint to resume from. Leave resume_from_checkpoint out to start again; checkpoints are "
        "made with save_strategy='steps', and can be resumed from unless save_only_model=True."
    )


def _samples(records: Sequence[dict[str, Any]]) -> list[Sample]:
    return [Sample(**record) for record in records]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"grupo_state_{rank}.pt"
