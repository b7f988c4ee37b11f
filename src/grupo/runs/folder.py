"""What a run leaves on disk. Files first; terminal and trackers are views of them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from grupo._version import __version__
from grupo.errors import ConfigError, TrainingError
from grupo.runs.checkpoint import UNFINISHED, numbers_of_checkpoints
from grupo.types import Group, group_record
from grupo.utils.messages import BASE_QUANTIZATION

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("grupo")

HASHED_BYTES_LIMIT = 4 * 2**30
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "tokenizers", "bitsandbytes")

CUT = "cut"
"""Folder in the run's folder for what was written behind the checkpoint that the run went on from."""

# What a run writes and the next one in the same folder would overwrite or continue.
RECORDS = (
    *("manifest.json", "recipe.yaml", "metrics.jsonl", "completions*", "eval_*.json", "summary.json", CUT),
    "sft.yaml",  # of a supervised phase alone
)
CHECKPOINTS = ("checkpoint-*", UNFINISHED, "sft", "sft.*")
ADAPTER = ("adapter_*", BASE_QUANTIZATION)
WHOLE_MODEL = ("config.json", "generation_config.json", "model*.safetensors*")
CARD = ("README.md", "reward.svg")

MODEL_STEP = "model_step"
"""In the manifest: the optimizer step that the run had come to when it saved the model in its folder. Later checkpoints
are newer."""


class RunFolder:
    """Writes `metrics.jsonl`, `completions.jsonl`, `manifest.json` and `summary.json` below one folder.

    Lines are appended and flushed as they come, so a killed run keeps all that it had logged. A fresh run never
    overwrites an earlier one: that is moved into the folder `earlier`, `earlier-2` and so on. A resumed run moves what
    was written behind its checkpoint into the folder `cut`.
    """

    def __init__(self, path: str | Path, *, rank: int = 0) -> None:
        self.path = Path(path)
        self.rank = rank
        self.is_open = False
        suffix = "" if rank == 0 else f".rank{rank}"
        self.metrics_file = self.path / "metrics.jsonl"
        self.completions_file = self.path / f"completions{suffix}.jsonl"

    def open(self, *, resumed: bool, keeping: Collection[str] = ()) -> None:
        """Makes the folder; a fresh run moves an earlier one aside, the files of all its ranks.

        Args:
            keeping: names of what stays there.
        """
        self.is_open = True
        self.path.mkdir(parents=True, exist_ok=True)
        if not resumed and self.rank == 0:
            _move_earlier_run(self.path, keeping)

    def positions(self) -> dict[str, int]:
        """Bytes of the files of this process, which are on the disk when this returns: where a checkpoint stands."""
        return {path.name: _synced_size(path) for path in self._files() if path.is_file()}

    def cut_back(self, step: int, positions: Mapping[str, int], *, logged_step: int) -> None:
        """Moves what was written behind the checkpoint of optimizer step `step` into the folder `cut`.

        The steps behind a checkpoint come again, and would be in the files twice.

        Args:
            positions: of the files, when the checkpoint was made.
            logged_step: the last one that was in a log then; tables of later ones come again.
        """
        cut = self.path / CUT
        if self.rank == 0 and self.read_json("manifest.json").get(MODEL_STEP, 0) > step:
            self.model_is_saved(step)  # it is from what is cut: the next checkpoint is newer
        moved = {}
        for path in self._files():
            if path.is_file():
                moved[path.name] = _cut_bytes(path, positions.get(path.name, 0), cut)
        if self.rank == 0:
            moved["completions"] = _cut_tables(self.path / "completions", logged_step, cut / "completions")
            moved["checkpoints"] = _cut_checkpoints(self.path, step, cut)
        if any(moved.values()):
            logger.warning(
                "The run goes on behind step %d: what was written after it is now in %s (%s).",
                step,
                cut,
                ", ".join(f"{count} of {name}" for name, count in moved.items() if count),
            )

    def _files(self) -> list[Path]:
        return [self.completions_file, *([self.metrics_file] if self.rank == 0 else [])]

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        if self.rank == 0:
            _append(self.metrics_file, [metrics])

    def append_completions(
        self, groups: Iterable[Group], *, step: int, reward_names: Sequence[str], **more: Any
    ) -> None:
        """One line per group: the prompt, and per completion text, rewards and advantage."""
        self.path.mkdir(parents=True, exist_ok=True)
        _append(
            self.completions_file, [{"step": step, **more, **group_record(group, reward_names)} for group in groups]
        )

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(_jsonable(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """In place of an earlier file, which a full disk or the end of the process leaves as it was."""
        if self.rank == 0:
            partial = self.path / f".{name}.unfinished"
            with named(self.path / name):
                partial.write_text(text, encoding="utf-8")
                partial.replace(self.path / name)

    def read_json(self, name: str) -> dict[str, Any]:
        """What `write_json` wrote; empty where there is no such file."""
        path = self.path / name
        return read_json(path) if path.is_file() else {}

    def update_json(self, name: str, changes: Mapping[str, Any]) -> None:
        if self.rank == 0:  # another process could read what is being written
            self.write_json(name, {**self.read_json(name), **changes})

    def model_is_saved(self, step: int) -> None:
        """Call when the model in the folder is that of optimizer step `step`."""
        if (self.path / "manifest.json").is_file():  # or nothing was trained here
            self.update_json("manifest.json", {MODEL_STEP: step})


def manifest(*, seed: int, model_name: str, model_hash: str, plan: Sequence[str], **more: Any) -> dict[str, Any]:
    """What is needed to know later how a run came about."""
    return {
        "grupo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "command": [re.sub("hf_[A-Za-z0-9]{16,}", "hf_...", argument) for argument in sys.argv],  # no tokens
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": seed,
        "model": model_name,
        "model_hash": model_hash,
        "git": git_state(),
        "plan": list(plan),
        **more,
    }


def model_hash(model: nn.Module) -> str:
    """BLAKE2 of names, shapes, dtypes and bytes of the parameters; of models above 4 GiB, of the first bytes of each.

    Of a model with an adapter it is that of the frozen parameters, so of the base model.
    """
    import torch

    has_adapter = hasattr(model, "peft_config")
    parameters = [(name, p) for name, p in model.named_parameters() if not (has_adapter and p.requires_grad)]
    size = sum(parameter.numel() * parameter.element_size() for _, parameter in parameters)
    share = min(1.0, HASHED_BYTES_LIMIT / max(size, 1))
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters:
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        hashed = parameter.detach().reshape(-1)[: math.ceil(share * parameter.numel())]
        digest.update(hashed.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def git_state() -> dict[str, Any] | None:
    """Commit of the working directory and whether it has uncommitted changes; None outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Says which file could not be written, and what to do.

    Raises:
        TrainingError: the disk is full, or the folder may not be written to.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}. Make room, or allow it; the run "
            "then goes on from its last checkpoint, with --resume or trainer.train(resume_from_checkpoint=True)."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises a ConfigError where the file is damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON object: it is damaged.") from error


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with named(path), path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(_jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")


def _jsonable(value: Any) -> Any:
    """JSON has no NaN or infinity: they become the strings "nan", "inf", "-inf", so that nothing is lost."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _jsonable(value.item()) if hasattr(value, "item") else str(value)


def _synced_size(path: Path) -> int:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return file.seek(0, os.SEEK_END)


def _cut_bytes(path: Path, position: int, target: Path) -> int:
    """Moves the lines behind a position, the last of which a killed run may have left unfinished; says how many."""
    size = path.stat().st_size
    if size < position:
        logger.warning(
            "%s has %d bytes, and had %d when the checkpoint was made: lines are missing.", path, size, position
        )
    if size <= position:
        return 0
    with path.open("rb") as file:
        file.seek(position)
        late = file.read()
    target.mkdir(exist_ok=True)
    with (target / path.name).open("ab") as file:
        file.write(late if late.endswith(b"\n") else late + b"\n")
    os.truncate(path, position)
    return late.count(b"\n") + (not late.endswith(b"\n"))


def _cut_checkpoints(folder: Path, step: int, target: Path) -> int:
    """Moves checkpoints of later steps, which would be taken for those of the run as it goes on; says how many."""
    late = [number for number in numbers_of_checkpoints(folder) if number > step]
    for number in late:
        target.mkdir(exist_ok=True)
        (folder / f"checkpoint-{number}").replace(fresh_folder(target, f"checkpoint-{number}"))
    return len(late)


def _cut_tables(folder: Path, step: int, target: Path) -> int:
    """Moves the tables of `log_completions` of later steps; says how many."""
    numbers = {path: path.stem.rpartition("_")[2] for path in folder.glob("completions_*.parquet")}
    late = [path for path, number in numbers.items() if number.isdecimal() and int(number) > step]
    for path in late:
        target.mkdir(parents=True, exist_ok=True)
        path.replace(target / path.name)
    return len(late)


def _move_earlier_run(folder: Path, keeping: Collection[str]) -> None:
    if not _matches(folder, RECORDS):
        return
    # Beside an adapter, the weights of a whole model are its base model, which stays where the adapter looks for it.
    weights = ADAPTER if _matches(folder, ADAPTER) else WHOLE_MODEL
    target = fresh_folder(folder, "earlier")
    target.mkdir()
    for entry in _matches(folder, (*RECORDS, *CHECKPOINTS, *weights, *CARD)):
        if entry.name not in keeping:
            entry.rename(target / entry.name)
    logger.warning("%s has an earlier run, which is now in %s.", folder, target)


def _matches(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return list(dict.fromkeys(entry for pattern in patterns for entry in sorted(folder.glob(pattern))))


def check_can_be_written(folder: Path) -> None:
    """Whether files can be put into a folder that is there, or is still to be made.

    Raises:
        ConfigError: they cannot.
    """
    # Not path.exists(), which raises where a folder above may not be looked into.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        raise ConfigError(f"output_dir={str(folder)!r} cannot be made: {there} is a file. Choose another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output_dir={str(folder)!r} cannot be written to: {there} is read-only. Allow it, or choose another one."
        )


def move_files(source: Path, target: Path) -> None:
    """Moves all files of a folder into another one, each in place of an earlier one: none is ever cut short."""
    for path in [path for path in source.rglob("*") if path.is_file()]:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(source)


def fresh_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or with the next free number behind it."""
    candidate, number = parent / name, 2
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate
