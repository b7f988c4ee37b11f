"""Checkpoints on disk: a folder that is there as a whole or not at all, and that proves it.

A checkpoint is written into `unfinished/checkpoint-N`. When every process has written its files, they are synced to
the disk, their sizes and hashes go into the marker, the last file, and the folder is renamed to `checkpoint-N`. What
ends the process in between, whatever it is, leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grupo.metrics import AllGather

MARKER = "grupo_checkpoint.json"
UNFINISHED = "unfinished"
"""Folder in the run's folder in which checkpoints are written."""

# What a full disk or a missing permission raises, through Python, torch (RuntimeError) and safetensors.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def write_checkpoint(
    target: Path,
    write: Callable[[Path], None],
    *,
    about: Mapping[str, Any],
    seals: bool,
    all_gather: AllGather,
) -> str | None:
    """Writes the checkpoint `target`, or nothing; returns why it could not be written. All processes call it together.

    Args:
        write: puts the files of this process into the folder that it is given.
        about: plain values that the marker keeps beside sizes and hashes.
        seals: whether this process makes, seals and renames the folder: one of all, or one on each machine.
    """
    partial = target.parent / UNFINISHED / target.name

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        seal(partial, about)
        _put_in_place(partial, target)

    parts: list[Callable[[], None] | None] = [
        begin if seals else None,
        lambda: write(partial),
        finish if seals else None,
    ]
    for part in parts:
        reasons: list[str] = [reason for reason in all_gather(_why_not(part)) if reason is not None]
        if reasons:
            if seals:
                shutil.rmtree(partial, ignore_errors=True)
            return str(reasons[0])
    return None


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """Syncs all files of a folder to the disk and writes the marker, with their sizes and hashes, last."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "blake2b": _hash(path)}
    content = {**about, "files": files}
    (folder / MARKER).write_text(json.dumps({**content, "blake2b": _digest(content)}, indent=1), encoding="utf-8")
    for path in (folder / MARKER, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _sync(path)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """What was written about a checkpoint; None where the marker is missing or damaged."""
    try:
        content = json.loads((folder / MARKER).read_bytes())
        return dict(content) if content.pop("blake2b") == _digest(content) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def damage(folder: Path, files: Sequence[str] = ("*",)) -> list[str]:
    """What is wrong with a checkpoint, file by file, read to the last byte; empty where it is whole.

    Args:
        files: patterns of the names that are looked at.
    """
    if not folder.is_dir():
        return ["there is no such folder"]
    marker = read_marker(folder)
    if marker is None:
        return [f"{MARKER} is missing or damaged, which is written last"]
    chosen = {name: wanted for name, wanted in marker["files"].items() if any(fnmatch(name, one) for one in files)}
    return [text for name, wanted in chosen.items() if (text := _damage_of(folder / name, name, wanted))]


def numbers_of_checkpoints(run: Path) -> list[int]:
    """Optimizer steps after which there is a checkpoint, whole or not, the newest first."""
    names = (path.name.removeprefix("checkpoint-") for path in run.glob("checkpoint-*") if path.is_dir())
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def delete_old_checkpoints(run: Path, limit: int | None, *, kept: Collection[str | Path]) -> None:
    """Deletes the oldest checkpoints of a run, so that `limit` are left, those that are `kept` among them; None: none.

    transformers goes by the beginning of a name, and would delete an export called `checkpoint-8-merged`, or the newest
    checkpoint because another program has left one with a higher number. Here a marker says whose it is.
    """
    if limit is None or limit < 1:
        return
    ours = [run / f"checkpoint-{number}" for number in numbers_of_checkpoints(run)]
    ours = [checkpoint for checkpoint in ours if (checkpoint / MARKER).is_file()]
    held = {Path(name).resolve() for name in kept}
    spare = [checkpoint for checkpoint in ours if checkpoint.resolve() not in held]
    for checkpoint in spare[max(limit - (len(ours) - len(spare)), 0) :]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def put_finished_in_place(run: Path) -> None:
    """Renames what was sealed when the process ended, and removes what was not."""
    unfinished = run / UNFINISHED
    if not unfinished.is_dir():
        return
    for number in numbers_of_checkpoints(unfinished):
        name = f"checkpoint-{number}"
        if not (run / name).exists() and not damage(unfinished / name):
            (unfinished / name).rename(run / name)
    shutil.rmtree(unfinished, ignore_errors=True)


def _why_not(part: Callable[[], None] | None) -> str | None:
    try:
        if part is not None:
            part()
    except WRITE_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _put_in_place(partial: Path, target: Path) -> None:
    # Of the same step: then there are two whole ones, and either is good, whenever the process ends.
    older = partial.with_name(f"{target.name}-older")
    shutil.rmtree(older, ignore_errors=True)
    if target.exists():
        target.rename(older)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(partial.parent, ignore_errors=True)


def _damage_of(path: Path, name: str, wanted: Mapping[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"{name} has {size:,} of {wanted['bytes']:,} bytes"
        return None if _hash(path) == wanted["blake2b"] else f"{name} is not as it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync(path: Path) -> None:
    """Has the disk hold what was written, of a file or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
