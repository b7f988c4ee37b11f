"""`manifest.json`: versions, command, model and code state, so that a run can be reproduced later."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grupo._version import __version__

if TYPE_CHECKING:
    from torch import nn

MODEL_STEP = "model_step"
"""Manifest key: the optimizer step at which the model in the run folder was saved. Later checkpoints are newer."""

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "tokenizers", "bitsandbytes")
HASHED_BYTES_LIMIT = 4 * 2**30


def manifest(*, seed: int, model_name: str, model_hash: str, plan: Sequence[str], **more: Any) -> dict[str, Any]:
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
    """BLAKE2 of the names, shapes, dtypes and bytes of the parameters; above 4 GiB, of the first bytes of each.

    With an adapter, only frozen parameters count: the hash is that of the base model.
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
    """Commit of the working directory, and whether it has uncommitted changes; None outside a repository."""
    commit = _git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}


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
