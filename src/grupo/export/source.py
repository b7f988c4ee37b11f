"""What a folder holds that can be exported: an adapter or a whole model; and where the result goes."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grupo.errors import ConfigError
from grupo.names import BASE_QUANTIZATION

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


@dataclass(frozen=True)
class Source:
    """A folder with an adapter, or with a whole model."""

    folder: Path
    is_adapter: bool
    run: Path
    """The run folder that the model is from, with its card and metrics; `folder` itself where it is from none."""

    @property
    def adapter_config(self) -> dict[str, Any]:
        return read_json(self.folder / ADAPTER_CONFIG) if self.is_adapter else {}

    @property
    def quantization(self) -> dict[str, Any] | None:
        """How the base model was quantised while the adapter was trained; None where it was not, or nobody knows."""
        for path in (self.folder / BASE_QUANTIZATION, self.run / "manifest.json"):
            if self.is_adapter and path.is_file():
                found = read_json(path)
                return found.get("quantization") if path.name == "manifest.json" else found
        return None


def find_source(path: str | Path) -> Source:
    """The model in a run folder, checkpoint, adapter folder or model folder.

    Of a run that saved no model, which was killed most likely, it is the newest complete checkpoint.

    Raises:
        ConfigError: there is no model in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder. Give the folder of a run, of one of its checkpoints, of an adapter or of a model."
        )
    is_checkpoint = folder.name.startswith("checkpoint-") and (folder / "trainer_state.json").is_file()
    run = folder.parent if is_checkpoint else folder
    if (folder / ADAPTER_CONFIG).is_file():
        if not _has(folder, ADAPTER_WEIGHTS):
            raise ConfigError(f"{folder} has an {ADAPTER_CONFIG} and no weights beside it ({ADAPTER_WEIGHTS[0]}).")
        return Source(folder, True, run)
    if (folder / "config.json").is_file() and _has(folder, MODEL_WEIGHTS):
        return Source(folder, False, run)
    if any(folder.glob("checkpoint-*/trainer_state.json")):
        newest = find_source(_newest_whole_checkpoint(folder))
        return Source(newest.folder, newest.is_adapter, folder)
    raise ConfigError(
        f"{folder} has neither an adapter ({ADAPTER_CONFIG}) nor a model (config.json with {MODEL_WEIGHTS[0]}) nor a "
        "checkpoint. Give the folder of a run, of one of its checkpoints, of an adapter or of a model."
    )


def _newest_whole_checkpoint(run: Path) -> Path:
    from grupo.runs.checkpoint import damage, numbers_of_checkpoints

    damaged = []
    for number in numbers_of_checkpoints(run):
        checkpoint = run / f"checkpoint-{number}"
        wrong = damage(checkpoint)
        if not wrong:
            return checkpoint
        damaged.append(f"{checkpoint.name}: {', '.join(wrong)}")
    raise ConfigError(f"{run} has no saved model and no checkpoint that is whole ({'; '.join(damaged)}).")


def check_free(path: Path) -> None:
    """Raises a ConfigError where `path` has something in it already."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"{path} exists already, and nothing is overwritten. Choose another output, or remove it.")


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A scratch folder that becomes `path` in one rename, if the block ends without an error.

    Raises:
        ConfigError: `path` is there already.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        yield scratch
        scratch.chmod(0o755)
        check_free(path)
        scratch.rename(path)  # onto an empty folder at most
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def read_json(path: Path) -> dict[str, Any]:
    """Raises a ConfigError where the file is damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON object: it is damaged.") from error
