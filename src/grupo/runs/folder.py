"""What a run leaves on disk. Files first; terminal and trackers are views of them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grupo.records import Group

if TYPE_CHECKING:
    from torch import nn

HASHED_BYTES_LIMIT = 4 * 2**30
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "tokenizers")


class RunFolder:
    """Writes `metrics.jsonl`, `completions.jsonl`, `manifest.json` and `summary.json` below one folder.

    Lines are appended and flushed one by one, so a killed run keeps all that it had logged. A fresh run never overwrites
    an earlier one: the older files are renamed to `metrics.1.jsonl` and so on.
    """

    def __init__(self, path: str | Path, *, rank: int = 0) -> None:
        self.path = Path(path)
        self.rank = rank
        suffix = "" if rank == 0 else f".rank{rank}"
        self.metrics_file = self.path / "metrics.jsonl"
        self.completions_file = self.path / f"completions{suffix}.jsonl"

    def start(self, *, resumed: bool) -> None:
        """Makes the folder; a fresh run moves the files of an earlier one aside."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not resumed:
            _move_aside(self.completions_file)
            if self.rank == 0:
                _move_aside(self.metrics_file)

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        if self.rank == 0:
            _append(self.metrics_file, [metrics])

    def append_completions(self, groups: Iterable[Group], *, step: int, reward_names: Sequence[str], **more: Any) -> None:
        """One line per group: the prompt, and per completion text, rewards and advantage."""
        _append(self.completions_file, [{"step": step, **more, **group_record(group, reward_names)} for group in groups])

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        if self.rank == 0:
            text = json.dumps(_jsonable(content), indent=2, ensure_ascii=False, allow_nan=False)
            (self.path / name).write_text(text + "\n", encoding="utf-8")


def group_record(group: Group, reward_names: Sequence[str]) -> dict[str, Any]:
    """A group as people and other programs read it."""
    return {
        "prompt_id": group.prompt.id,
        "row": group.prompt.row,
        "prompt": group.prompt.content,
        "completions": [
            {
                "text": rollout.completion.text,
                "tokens": len(rollout.completion.token_ids),
                "finish_reason": rollout.completion.finish_reason.value,
                "rewards": dict(zip(reward_names, rollout.scores, strict=True)),
                "statuses": {name: status.value for name, status in zip(reward_names, rollout.statuses, strict=True)},
                "reward": reward,
                "advantage": advantage,
            }
            for rollout, reward, advantage in zip(group.rollouts, group.rewards, group.advantages, strict=True)
        ],
    }


def manifest(*, seed: int, model: nn.Module, model_name: str, plan: Sequence[str], **more: Any) -> dict[str, Any]:
    """What is needed to know later how a run came about."""
    return {
        "grupo": installed_version("grupo"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": seed,
        "model": model_name,
        "model_hash": model_hash(model),
        "git": git_state(),
        "plan": list(plan),
        **more,
    }


def model_hash(model: nn.Module) -> str | None:
    """BLAKE2 of names, shapes, dtypes and bytes of all parameters; None for models too large to read through."""
    parameters = list(model.named_parameters())
    if sum(parameter.numel() * parameter.element_size() for _, parameter in parameters) > HASHED_BYTES_LIMIT:
        return None
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters:
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
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


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
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


def _move_aside(path: Path) -> None:
    if path.exists():
        number = 1
        while (target := path.with_suffix(f".{number}{path.suffix}")).exists():
            number += 1
        path.rename(target)
