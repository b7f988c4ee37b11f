"""The run folder: everything a run writes to disk. The terminal and trackers show what is in these files."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grupo.errors import ConfigError
from grupo.runs.checkpoint import UNFINISHED, checkpoint_steps
from grupo.runs.manifest import MODEL_STEP
from grupo.types import Group, group_record
from grupo.utils.files import append_json_lines, read_json, unused_folder, write_json, write_text
from grupo.utils.messages import BASE_QUANTIZATION

logger = logging.getLogger("grupo")

DISCARDED = "cut"
"""Subfolder for what was written after the checkpoint that the run was resumed from."""

# Files that the next run in the same folder would overwrite or continue.
RECORDS = (
    *("manifest.json", "recipe.yaml", "metrics.jsonl", "completions*", "eval_*.json", "summary.json", DISCARDED),
    "sft.yaml",  # of `grupo sft`
)
CHECKPOINTS = ("checkpoint-*", UNFINISHED, "sft", "sft.*")
ADAPTER = ("adapter_*", BASE_QUANTIZATION)
WHOLE_MODEL = ("config.json", "generation_config.json", "model*.safetensors*")
CARD = ("README.md", "reward.svg")


class RunFolder:
    """Writes `metrics.jsonl`, `completions.jsonl`, `manifest.json` and `summary.json` in one folder.

    Lines are appended and flushed one by one, so a killed run keeps everything it has logged. A new run never
    overwrites an earlier one, which is moved to the subfolder `earlier`, `earlier-2` and so on. A resumed run moves
    what was written after its checkpoint to the subfolder `cut`. Rank 0 writes; other ranks write only their
    completions, to `completions.rankN.jsonl`.
    """

    def __init__(self, path: str | Path, *, rank: int = 0) -> None:
        self.path = Path(path)
        self.rank = rank
        self.is_open = False
        suffix = "" if rank == 0 else f".rank{rank}"
        self.metrics_file = self.path / "metrics.jsonl"
        self.completions_file = self.path / f"completions{suffix}.jsonl"

    def open(self, *, resumed: bool, keeping: Collection[str] = ()) -> None:
        """Makes the folder; a new run moves an earlier one aside, files of all ranks included.

        Args:
            keeping: names of files and folders that are not moved.
        """
        self.is_open = True
        self.path.mkdir(parents=True, exist_ok=True)
        if not resumed and self.rank == 0:
            _move_earlier_run(self.path, keeping)

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        if self.rank == 0:
            append_json_lines(self.metrics_file, [metrics])

    def append_completions(
        self, groups: Iterable[Group], *, step: int, reward_names: Sequence[str], **more: Any
    ) -> None:
        """Writes one line per group: the prompt, and the text, rewards and advantage of each completion."""
        self.path.mkdir(parents=True, exist_ok=True)
        append_json_lines(
            self.completions_file, [{"step": step, **more, **group_record(group, reward_names)} for group in groups]
        )

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        if self.rank == 0:
            write_json(self.path / name, content)

    def write_text(self, name: str, text: str) -> None:
        if self.rank == 0:
            write_text(self.path / name, text)

    def read_json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

    def update_json(self, name: str, changes: Mapping[str, Any]) -> None:
        if self.rank == 0:  # before reading: another rank could read while this one writes
            self.write_json(name, {**self.read_json(name), **changes})

    def record_saved_step(self, step: int) -> None:
        """Notes in the manifest that the model in the folder is the model after optimizer step `step`."""
        if (self.path / "manifest.json").is_file():  # otherwise no training took place here
            self.update_json("manifest.json", {MODEL_STEP: step})

    # ---- resuming --------------------------------------------------------------------------------------------------

    def positions(self) -> dict[str, int]:
        """File name -> size in bytes of this rank's files, synced to disk: part of a checkpoint."""
        return {path.name: _synced_size(path) for path in self._files() if path.is_file()}

    def truncate_to(self, step: int, positions: Mapping[str, int], *, logged_step: int) -> None:
        """Moves what was written after the checkpoint of optimizer step `step` to the subfolder `cut`.

        Those steps are repeated, and would otherwise be in the files twice.

        Args:
            positions: sizes of the files at the checkpoint.
            logged_step: last logged step at the checkpoint; completion tables of later steps are moved.
        """
        discarded = self.path / DISCARDED
        if self.rank == 0 and self.read_json("manifest.json").get(MODEL_STEP, 0) > step:
            self.record_saved_step(step)  # its later steps are discarded, so the next checkpoint is newer
        moved = {}
        for path in self._files():
            if path.is_file():
                moved[path.name] = _move_tail(path, positions.get(path.name, 0), discarded)
        if self.rank == 0:
            moved["completions"] = _move_tables(self.path / "completions", logged_step, discarded / "completions")
            moved["checkpoints"] = _move_checkpoints(self.path, step, discarded)
        if any(moved.values()):
            logger.warning(
                "Continuing after step %d; what the run wrote later is now in %s (%s).",
                step,
                discarded,
                ", ".join(f"{name}: {count}" for name, count in moved.items() if count),
            )

    def _files(self) -> list[Path]:
        return [self.completions_file, *([self.metrics_file] if self.rank == 0 else [])]


def check_writable(folder: Path) -> None:
    """Checks that the output folder exists or can be made, and that files can be put there.

    Raises:
        ConfigError: they cannot.
    """
    # Not path.exists(), which raises where a parent folder is not accessible.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir():
        raise ConfigError(f"output_dir={str(folder)!r} cannot be made: {existing} is a file. Choose another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output_dir={str(folder)!r} cannot be written to: {existing} is read-only. Make it writable, or choose "
            "another folder."
        )


def _synced_size(path: Path) -> int:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return file.seek(0, os.SEEK_END)


def _move_tail(path: Path, position: int, target: Path) -> int:
    """Moves the lines after a byte position, the last of which may be incomplete; returns their number."""
    size = path.stat().st_size
    if size < position:
        logger.warning(
            "%s has %d bytes, but had %d when the checkpoint was made: lines are missing.", path, size, position
        )
    if size <= position:
        return 0
    with path.open("rb") as file:
        file.seek(position)
        tail = file.read()
    target.mkdir(exist_ok=True)
    with (target / path.name).open("ab") as file:
        file.write(tail if tail.endswith(b"\n") else tail + b"\n")
    os.truncate(path, position)
    return tail.count(b"\n") + (not tail.endswith(b"\n"))


def _move_checkpoints(folder: Path, step: int, target: Path) -> int:
    """Moves the checkpoints of later steps; returns their number."""
    later = [number for number in checkpoint_steps(folder) if number > step]
    for number in later:
        target.mkdir(exist_ok=True)
        (folder / f"checkpoint-{number}").replace(unused_folder(target, f"checkpoint-{number}"))
    return len(later)


def _move_tables(folder: Path, step: int, target: Path) -> int:
    """Moves the tables that `log_completions` wrote in later steps; returns their number."""
    steps = {path: path.stem.rpartition("_")[2] for path in folder.glob("completions_*.parquet")}
    later = [path for path, number in steps.items() if number.isdecimal() and int(number) > step]
    for path in later:
        target.mkdir(parents=True, exist_ok=True)
        path.replace(target / path.name)
    return len(later)


def _move_earlier_run(folder: Path, keeping: Collection[str]) -> None:
    if not _matches(folder, RECORDS):
        return
    # Weights of a whole model next to an adapter are its base model, which must stay where the adapter looks for it.
    weights = ADAPTER if _matches(folder, ADAPTER) else WHOLE_MODEL
    target = unused_folder(folder, "earlier")
    target.mkdir()
    for entry in _matches(folder, (*RECORDS, *CHECKPOINTS, *weights, *CARD)):
        if entry.name not in keeping:
            entry.rename(target / entry.name)
    logger.warning("%s has an earlier run, which is now in %s.", folder, target)


def _matches(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return list(dict.fromkeys(entry for pattern in patterns for entry in sorted(folder.glob(pattern))))
