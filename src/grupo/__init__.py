"""grupo: Group Relative Policy Optimization for small reasoning models, on a CPU, one GPU or many.

Names are imported on first use, so that `import grupo` costs nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grupo.config import GRPOConfig as GRPOConfig
    from grupo.rollout.engine import Engine as Engine
    from grupo.rollout.engine import GenerationRequest as GenerationRequest
    from grupo.rollout.scripted import ScriptedEngine as ScriptedEngine
    from grupo.sampling import SamplingSpec as SamplingSpec
    from grupo.step_plan import StepPlan as StepPlan
    from grupo.trainer import GRPOTrainer as GRPOTrainer

__version__ = "0.1.0"

_HOMES = {
    "Engine": "grupo.rollout.engine",
    "GRPOConfig": "grupo.config",
    "GRPOTrainer": "grupo.trainer",
    "GenerationRequest": "grupo.rollout.engine",
    "SamplingSpec": "grupo.sampling",
    "ScriptedEngine": "grupo.rollout.scripted",
    "StepPlan": "grupo.step_plan",
}

__all__ = [
    "Engine",
    "GRPOConfig",
    "GRPOTrainer",
    "GenerationRequest",
    "SamplingSpec",
    "ScriptedEngine",
    "StepPlan",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grupo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
