"""grupo: Group Relative Policy Optimization for small reasoning models, on a CPU, one GPU or many.

Names are imported on first use, so that `import grupo` costs nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from grupo._version import __version__

if TYPE_CHECKING:
    from grupo.chat_templates import get_chat_template as get_chat_template
    from grupo.chat_templates import set_chat_template as set_chat_template
    from grupo.config import GRPOConfig as GRPOConfig
    from grupo.config.batch_plan import StepPlan as StepPlan
    from grupo.rollout.engine import Engine as Engine
    from grupo.rollout.engine import GenerationRequest as GenerationRequest
    from grupo.rollout.scripted import ScriptedEngine as ScriptedEngine
    from grupo.sampling import SamplingParams as SamplingParams
    from grupo.sampling import SamplingSpec as SamplingSpec
    from grupo.sampling import vLLMSamplingParams as vLLMSamplingParams
    from grupo.tasks.registry import make_task as make_task
    from grupo.trainer import GRPOTrainer as GRPOTrainer
    from grupo.trainer.memory_estimate import memory_estimate as memory_estimate
    from grupo.trainer.sft_trainer import sft_trainer as sft_trainer
    from grupo.unsloth import FastLanguageModel as FastLanguageModel
    from grupo.unsloth import FastModel as FastModel
    from grupo.unsloth import PatchFastRL as PatchFastRL
    from grupo.unsloth import is_bfloat16_supported as is_bfloat16_supported

_HOMES = {
    "Engine": "grupo.rollout.engine",
    "FastLanguageModel": "grupo.unsloth",
    "FastModel": "grupo.unsloth",
    "GRPOConfig": "grupo.config",
    "GRPOTrainer": "grupo.trainer",
    "GenerationRequest": "grupo.rollout.engine",
    "PatchFastRL": "grupo.unsloth",
    "SamplingParams": "grupo.sampling",
    "SamplingSpec": "grupo.sampling",
    "ScriptedEngine": "grupo.rollout.scripted",
    "StepPlan": "grupo.config.batch_plan",
    "get_chat_template": "grupo.chat_templates",
    "is_bfloat16_supported": "grupo.unsloth",
    "make_task": "grupo.tasks.registry",
    "memory_estimate": "grupo.trainer.memory_estimate",
    "set_chat_template": "grupo.chat_templates",
    "sft_trainer": "grupo.trainer.sft_trainer",
    "vLLMSamplingParams": "grupo.sampling",
}

__all__ = [
    "Engine",
    "FastLanguageModel",
    "FastModel",
    "GRPOConfig",
    "GRPOTrainer",
    "GenerationRequest",
    "PatchFastRL",
    "SamplingParams",
    "SamplingSpec",
    "ScriptedEngine",
    "StepPlan",
    "__version__",
    "get_chat_template",
    "is_bfloat16_supported",
    "make_task",
    "memory_estimate",
    "set_chat_template",
    "sft_trainer",
    "vLLMSamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grupo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
