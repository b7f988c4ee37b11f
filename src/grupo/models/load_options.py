"""Options with which a model was loaded or given its adapter, stored on the model for the trainer and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "grupo_load_options"


@dataclass
class LoadOptions:
    tokenizer: Any = None
    max_seq_length: int | None = None
    """Most tokens of prompt and completion together."""
    checkpointing: bool | None = None
    """Activations are recomputed in backward; None: not specified."""
    offload: bool = False
    """With checkpointing: the inputs of the layers wait in host memory until backward."""
    full_finetuning: bool = False
    """All weights are trained, without an adapter."""


def load_options(model: Any) -> LoadOptions:
    """Options of the model, or of the one that its adapter is on; the defaults if none were set."""
    options = getattr(model, _ATTRIBUTE, None)
    return options if isinstance(options, LoadOptions) else LoadOptions()


def set_load_options(model: Any, options: LoadOptions) -> None:
    setattr(model, _ATTRIBUTE, options)
