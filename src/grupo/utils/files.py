"""Reading and writing files safely: replaced in one rename, appended line by line, synced on request."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grupo.errors import ConfigError, TrainingError

RESUME_LATER = (
    "Free some space or fix the permissions, then continue from the last checkpoint with --resume or "
    "trainer.train(resume_from_checkpoint=True)."
)


@contextlib.contextmanager
def write_errors_as(path: Path, remedy: str = RESUME_LATER) -> Iterator[None]:
    """Names the file or folder that could not be written, and what to do.

    Raises:
        TrainingError: the disk is full, or the folder is not writable.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrainingError(f"{path} cannot be written: {reason}. {remedy}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        ConfigError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON object: it is damaged.") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(to_json(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one rename: a full disk, or the end of the process, leaves the earlier file unchanged."""
    partial = path.with_name(f".{path.name}.unfinished")
    with write_errors_as(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def append_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with write_errors_as(path), path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(to_json(record), ensure_ascii=False, allow_nan=False) + "\n")


def to_json(value: Any) -> Any:
    """`value` in types that JSON has. NaN and infinity become "nan", "inf" and "-inf", so that nothing is lost."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return to_json(value.item()) if hasattr(value, "item") else str(value)


def fsync(path: Path) -> None:
    """Returns when the disk holds a file, or the list of names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_files(source: Path, target: Path) -> None:
    """Moves all files below a folder into another one; each replaces an earlier file in one rename."""
    for path in [path for path in source.rglob("*") if path.is_file()]:
        destination = target / path.relative_to(source)
        destination.parent.mkdir(parents=True, exist_ok=True)
        path.replace(destination)
    shutil.rmtree(source)


def unused_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or `parent/name-2` and so on if that exists."""
    candidate, number = parent / name, 2
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate
