"""Settings of a run: `GRPOConfig` and the batch arithmetic that follows from it.

`GRPOConfig` is imported on first use: it needs transformers, and the batch arithmetic does not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grupo.config.grpo_config import GRPOConfig as GRPOConfig

_HOMES = {"GRPOConfig": "grupo.config.grpo_config"}
__all__ = ["GRPOConfig"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grupo.config' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
