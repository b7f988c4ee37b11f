from __future__ import annotations

from pathlib import Path
from typing import Any


def to_gguf(
    model: Any, output_file: str | Path, *, tokenizer: Any = None, quantization: str = "q8_0", **options: Any
) -> Any:
    """Writes a GGUF file of a model, or of an adapter merged into its base."""
    raise NotImplementedError
