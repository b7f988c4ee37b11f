"""What scripts call on a model to save it: adapters, merged models, GGUF files, uploads."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grupo import export
from grupo.errors import ConfigError, UnsupportedError
from grupo.models.inspect import base_model
from grupo.models.load_options import load_options
from grupo.models.peft_io import has_new_tokens, save_adapter
from grupo.models.quantization import arithmetic_dtype

logger = logging.getLogger("grupo")

GGUF_METHODS = {
    "f16": "f16",
    "not_quantized": "f16",
    "q8_0": "q8_0",
    "fast_quantized": "q8_0",
}
"""Unsloth's names -> what is written."""


def save_lora(model: Any, save_directory: str | Path, tokenizer: Any = None) -> None:
    """The adapter, whole, as peft loads it; with the tokenizer where one is given, or where it has new tokens."""
    if not getattr(model, "peft_config", None):
        raise ConfigError("save_lora: the model has no adapter. FastLanguageModel.get_peft_model gives it one.")
    save_adapter(model, save_directory)
    if tokenizer is None and has_new_tokens(model):
        tokenizer = load_options(model).tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(str(save_directory))


def save_pretrained_merged(
    model: Any, save_directory: str | Path, tokenizer: Any = None, save_method: str = "merged_16bit"
) -> None:
    """The model with its adapter folded in, in 16 bits ("merged_16bit"), or the adapter alone ("lora").

    Raises:
        UnsupportedError: another save_method.
    """
    _check_method(save_method)
    tokenizer = tokenizer or load_options(model).tokenizer
    if save_method == "lora":
        save_lora(model, save_directory, tokenizer)
    else:
        export.merge(model, save_directory, tokenizer=tokenizer, dtype=_half(model))


def push_to_hub_merged(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    token: str | None = None,
    private: bool | None = None,
) -> str:
    """`save_pretrained_merged` to the Hub; returns the address."""
    _check_method(save_method)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_pretrained_merged(model, folder, tokenizer, save_method)
        return str(export.push(folder, repo_id, token=token, private=private))


def save_pretrained_gguf(
    model: Any,
    save_directory: str | Path,
    tokenizer: Any = None,
    quantization_method: str | Sequence[str] = "fast_quantized",
) -> list[Path]:
    """The merged model as GGUF files, one for each method: "f16", or "q8_0", which "fast_quantized" means as well.

    Returns:
        The files: FOLDER-F16.gguf, FOLDER-Q8_0.gguf, named after the folder that they are in.

    Raises:
        UnsupportedError: another method.
    """
    kinds = _gguf_kinds(quantization_method)
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{folder.resolve().name}-{kind.upper()}.gguf" for kind in kinds]
    for kind, file in zip(kinds, files, strict=True):
        export.to_gguf(model, file, tokenizer=tokenizer or load_options(model).tokenizer, quantization=kind)
    return files


def push_to_hub_gguf(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    quantization_method: str | Sequence[str] = "fast_quantized",
    token: str | None = None,
    private: bool | None = None,
) -> str:
    """`save_pretrained_gguf` to the Hub; returns the address."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / repo_id.rpartition("/")[2]
        save_pretrained_gguf(model, folder, tokenizer, quantization_method)
        return str(export.push(folder, repo_id, token=token, private=private))


def _check_method(method: str) -> None:
    if method not in ("merged_16bit", "lora"):
        raise UnsupportedError(
            f"save_method={method!r} is not supported: weights are merged in high precision and saved in 16 bits. Use "
            "'merged_16bit', or 'lora' for the adapter alone; whoever loads the merged model can quantise it."
        )


def _gguf_kinds(methods: str | Sequence[str]) -> list[str]:
    wanted = [methods] if isinstance(methods, str) else list(methods)
    unknown = [method for method in wanted if method not in GGUF_METHODS]
    if unknown or not wanted:
        raise UnsupportedError(
            f"quantization_method={methods!r} is not supported: {', '.join(map(repr, GGUF_METHODS))} are. llama.cpp's "
            "llama-quantize makes smaller ones of an F16 file."
        )
    return list(dict.fromkeys(GGUF_METHODS[method] for method in wanted))


def _half(model: Any) -> str:
    """The 16-bit dtype nearest to what the model computes in."""
    base = base_model(model)
    dtype = str(arithmetic_dtype(base, next(base.parameters()).device)).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else "bfloat16"
