"""What was asked of a model when it was loaded or got its adapter, where training has to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "grupo_load_options"


@dataclass
class LoadOptions:
    """Kept on the model; None where nobody has asked."""

    tokenizer: Any = None
    max_seq_length: int | None = None
    """Tokens of prompt and completion together, at most."""
    checkpointing: bool | None = None
    """Layers are computed again in backward."""
    offload: bool = False
    """With checkpointing: the inputs of the layers wait in host memory until then."""
    full_finetuning: bool = False
    """All weights, without an adapter."""


def load_options(model: Any) -> LoadOptions:
    """Of a model or of the one below its adapter."""
    asked = getattr(model, _ATTRIBUTE, None)
    return asked if isinstance(asked, LoadOptions) else LoadOptions()


def set_load_options(model: Any, asked: LoadOptions) -> None:
    setattr(model, _ATTRIBUTE, asked)
