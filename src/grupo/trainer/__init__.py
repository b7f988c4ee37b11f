"""Trainers: `GRPOTrainer`, its collaborators, and the supervised phase.

`GRPOTrainer` is imported on first use, so that its parts can be imported without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grupo.trainer.grpo_trainer import GRPOTrainer as GRPOTrainer

_HOMES = {"GRPOTrainer": "grupo.trainer.grpo_trainer"}
__all__ = ["GRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grupo.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
