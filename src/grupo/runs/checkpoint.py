"""Checkpoints on disk: a folder that is complete or absent, with a marker that proves it.

A checkpoint is written to `unfinished/checkpoint-N`. When every process has written its files, they are synced to
disk, their sizes and hashes are written to the marker, the last file, and the folder is renamed to `checkpoint-N`.
Whatever ends the process in between, earlier checkpoints stay as they were.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grupo.metrics import AllGather
from grupo.utils.files import fsync

MARKER = "grupo_checkpoint.json"
UNFINISHED = "unfinished"
"""Subfolder of the run folder in which checkpoints are written."""

# What a full disk or a missing permission raises in Python, torch (RuntimeError) and safetensors.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def write_checkpoint(
    target: Path,
    write: Callable[[Path], None],
    *,
    about: Mapping[str, Any],
    is_writer: bool,
    all_gather: AllGather,
) -> str | None:
    """Writes the checkpoint `target` completely or not at all; all processes call it together.

    Args:
        write: writes the files of this process to the given folder.
        about: plain values for the marker.
        is_writer: True on the one process (or one per machine) that makes the folder, marks it and renames it.

    Returns:
        The reason why nothing was written, or None.
    """
    partial = target.parent / UNFINISHED / target.name

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        write_marker(partial, about)
        _move_into_place(partial, target)

    stages: list[Callable[[], None] | None] = [
        begin if is_writer else None,
        lambda: write(partial),
        finish if is_writer else None,
    ]
    for stage in stages:
        reasons: list[str] = [reason for reason in all_gather(_failure(stage)) if reason is not None]
        if reasons:
            if is_writer:
                shutil.rmtree(partial, ignore_errors=True)
            return str(reasons[0])
    return None


def write_marker(folder: Path, about: Mapping[str, Any]) -> None:
    """Syncs all files of a folder to disk, then writes their sizes and hashes to the marker."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER):
        fsync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "blake2b": _file_hash(path)}
    content = {**about, "files": files}
    (folder / MARKER).write_text(json.dumps({**content, "blake2b": _digest(content)}, indent=1), encoding="utf-8")
    for path in (folder / MARKER, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        fsync(path)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The content of the marker; None if it is missing or damaged."""
    try:
        content = json.loads((folder / MARKER).read_bytes())
        return dict(content) if content.pop("blake2b") == _digest(content) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def checkpoint_problems(folder: Path, patterns: Sequence[str] = ("*",)) -> list[str]:
    """One line per damaged file of a checkpoint, read to the last byte; empty if it is intact.

    Args:
        patterns: of the names of the files to check.
    """
    if not folder.is_dir():
        return ["the folder does not exist"]
    marker = read_marker(folder)
    if marker is None:
        return [f"{MARKER} is missing or damaged; it is written last"]
    chosen = {name: entry for name, entry in marker["files"].items() if any(fnmatch(name, one) for one in patterns)}
    return [problem for name, entry in chosen.items() if (problem := _file_problem(folder / name, name, entry))]


def checkpoint_steps(run: Path) -> list[int]:
    """Optimizer steps that have a checkpoint, intact or not, latest first."""
    names = (path.name.removeprefix("checkpoint-") for path in run.glob("checkpoint-*") if path.is_dir())
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def delete_old_checkpoints(run: Path, limit: int | None, *, kept: Collection[str | Path]) -> None:
    """Deletes the oldest checkpoints until at most `limit` are left, `kept` ones included; None deletes nothing.

    transformers goes by the beginning of a name, and would delete an export called `checkpoint-8-merged`, or the
    newest checkpoint because another program left one with a higher number. Here the marker decides.
    """
    if limit is None or limit < 1:
        return
    ours = [run / f"checkpoint-{step}" for step in checkpoint_steps(run)]
    ours = [checkpoint for checkpoint in ours if (checkpoint / MARKER).is_file()]
    protected = {Path(name).resolve() for name in kept}
    deletable = [checkpoint for checkpoint in ours if checkpoint.resolve() not in protected]
    for checkpoint in deletable[max(limit - (len(ours) - len(deletable)), 0) :]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def recover_finished(run: Path) -> None:
    """Renames checkpoints that were complete when the process ended, and removes incomplete ones."""
    unfinished = run / UNFINISHED
    if not unfinished.is_dir():
        return
    for step in checkpoint_steps(unfinished):
        name = f"checkpoint-{step}"
        if not (run / name).exists() and not checkpoint_problems(unfinished / name):
            (unfinished / name).rename(run / name)
    shutil.rmtree(unfinished, ignore_errors=True)


def _failure(stage: Callable[[], None] | None) -> str | None:
    try:
        if stage is not None:
            stage()
    except WRITE_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _move_into_place(partial: Path, target: Path) -> None:
    # An earlier checkpoint of the same step moves aside first: whenever the process ends, one of the two is complete.
    older = partial.with_name(f"{target.name}-older")
    shutil.rmtree(older, ignore_errors=True)
    if target.exists():
        target.rename(older)
    partial.rename(target)
    fsync(target.parent)
    shutil.rmtree(partial.parent, ignore_errors=True)


def _file_problem(path: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size:,} of {entry['bytes']:,} bytes"
        return None if _file_hash(path) == entry["blake2b"] else f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def _file_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
