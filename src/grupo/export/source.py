"""Finding the adapter or model to export in a folder, and writing the result atomically."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grupo.errors import ConfigError, ExportError
from grupo.runs.checkpoint import MARKER, checkpoint_problems
from grupo.runs.latest import ADAPTER_WEIGHTS, MODEL_FILES, MODEL_WEIGHTS, resolve_latest
from grupo.utils.files import read_json
from grupo.utils.messages import BASE_QUANTIZATION

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Source:
    """A folder with an adapter, or with a whole model."""

    folder: Path
    is_adapter: bool
    run: Path
    """Run folder of the model, with its card and metrics; `folder` itself if the model is not from a run."""

    @property
    def adapter_config(self) -> dict[str, Any]:
        return read_json(self.folder / ADAPTER_CONFIG) if self.is_adapter else {}

    @property
    def quantization(self) -> dict[str, Any] | None:
        """Quantisation of the base model while the adapter was trained; None if not quantised or not known."""
        for path in (self.folder / BASE_QUANTIZATION, self.run / "manifest.json"):
            if self.is_adapter and path.is_file():
                found = read_json(path)
                return found.get("quantization") if path.name == "manifest.json" else found
        return None


def find_source(path: str | Path) -> Source:
    """The model in a run folder, checkpoint, adapter folder or model folder.

    For a run it is the newest model (`resolve_latest`).

    Raises:
        ConfigError: there is no model in it, or it is a damaged checkpoint.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder. Give the folder of a run, of a checkpoint, of an adapter or of a model."
        )
    is_checkpoint = folder.name.startswith("checkpoint-") and (folder / "trainer_state.json").is_file()
    if is_checkpoint:
        if (folder / MARKER).is_file() and (wrong := checkpoint_problems(folder, MODEL_FILES)):
            raise ConfigError(f"The checkpoint {folder} is damaged: {', '.join(wrong)}. Use another one.")
        return _model_in(folder, folder.parent)
    return _model_in(Path(resolve_latest(str(folder))), folder)


def _model_in(folder: Path, run: Path) -> Source:
    manifest = read_json(run / "manifest.json")
    trained = manifest.get("adapter")
    if trained not in (None, "default") and (folder / trained / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"The run trained the adapter {trained!r}, which is in {folder / trained}: give that folder.")
    if (folder / ADAPTER_CONFIG).is_file():
        if not _has(folder, ADAPTER_WEIGHTS):
            raise ConfigError(f"{folder} has an {ADAPTER_CONFIG} but no weights ({ADAPTER_WEIGHTS[0]}).")
        return Source(folder, True, run)
    if (folder / "config.json").is_file() and _has(folder, MODEL_WEIGHTS):
        return Source(folder, False, run)
    raise ConfigError(
        f"{folder} has neither an adapter ({ADAPTER_CONFIG}) nor a model (config.json with {MODEL_WEIGHTS[0]}) nor a "
        "checkpoint. Give the folder of a run, of one of its checkpoints, of an adapter or of a model."
    )


def require_absent(path: Path) -> None:
    """Raises a ConfigError if `path` is a file or a folder that is not empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"{path} exists already, and nothing is overwritten. Choose another output, or remove it.")


@contextlib.contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """A scratch folder that becomes `path` in one rename if the block ends without an error.

    Raises:
        ConfigError: `path` exists already.
        ExportError: it cannot be written.
    """
    require_absent(path)
    with scratch_next_to(path) as scratch:
        yield scratch
        scratch.chmod(0o755)
        require_absent(path)
        scratch.rename(path)  # replaces at most an empty folder


@contextlib.contextmanager
def scratch_next_to(path: Path) -> Iterator[Path]:
    """A scratch folder on the same disk as `path`; it is removed at the end if it still exists.

    Raises:
        ExportError: the folder, or a file that the block writes into it, cannot be written.
    """
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        yield scratch
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExportError(f"{path} cannot be written: {reason}. Free some space, or choose another output.") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def adapter_weights(folder: Path) -> dict[str, Any]:
    """Tensors of an adapter by name, on the CPU. Raises a ConfigError if their file is damaged."""
    from peft.utils import load_peft_weights

    try:
        return dict(load_peft_weights(str(folder), device="cpu"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"The weights of the adapter in {folder} cannot be read: {error}.") from error
