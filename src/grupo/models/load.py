"""Loading a model and its tokenizer, and preparing the model for training."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import GENERATION_CONFIG_NAME

from grupo.errors import ConfigError, summarize_error
from grupo.models.inspect import base_model, model_name_or_path
from grupo.utils.hub import is_unreachable
from grupo.utils.quantized_layers import keep_unpacked, set_evaluation_mode

logger = logging.getLogger("grupo")

HUB_KWARGS = ("revision", "cache_dir", "token")
"""Keywords of from_pretrained that locate the files."""


def load_policy(
    name_or_path: str,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
) -> Any:
    """The causal language model in evaluation mode, in float32 unless `model_init_kwargs` names a dtype.

    Quantised layers are in training mode, so that the model computes what is trained (`set_evaluation_mode`).

    flash_attention_2 falls back to sdpa with one line where its package is not installed.
    """
    from transformers import AutoModelForCausalLM

    kwargs = dict(model_init_kwargs or {})
    kwargs.setdefault("dtype", kwargs.pop("torch_dtype", torch.float32))
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] != "auto":
        known = (*DTYPES, "float64")
        kwargs["dtype"] = parse_dtype(kwargs["dtype"], setting="model_init_kwargs: dtype", known=known)
    if kwargs.get("attn_implementation") == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        logger.warning("attn_implementation='flash_attention_2' needs the package flash-attn; 'sdpa' is used instead.")
        kwargs["attn_implementation"] = "sdpa"
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    loader: Any = AutoModelForCausalLM
    from_cache = is_unreachable(name_or_path)
    if from_cache:
        kwargs["local_files_only"] = True
        # The search for an adapter has keywords of its own.
        kwargs["adapter_kwargs"] = {**kwargs.get("adapter_kwargs", {}), "local_files_only": True}
    try:
        model, report = loader.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, output_loading_info=True, **kwargs
        )
    except (OSError, ValueError, SafetensorError) as error:
        if from_cache:
            raise ConfigError(_not_in_cache("model", name_or_path)) from error
        raise ConfigError(
            f"The model {name_or_path!r} cannot be loaded: {summarize_error(error)} Set `model` to a causal language "
            "model: a folder with a config.json and weights, or a name on the Hub."
        ) from error
    _check_head(model, name_or_path, report["missing_keys"])
    set_evaluation_mode(model)
    keep_unpacked(model)
    return model


def _check_head(model: Any, name: str, missing_keys: Iterable[str]) -> None:
    """Refuses the weights of a bare decoder, which load into a causal language model with a random head."""
    head = model.get_output_embeddings()
    missing = set(missing_keys)
    for key, parameter in model.named_parameters():
        if key in missing and head is not None and parameter is getattr(head, "weight", None):
            raise ConfigError(
                f"The weights of {name!r} have no language model head ({key} is missing), so it would start from "
                "random numbers. Save the model from AutoModelForCausalLM, or use one that has its head."
            )


def _not_in_cache(what: str, name: str) -> str:
    return (
        f"The {what} {name!r} is not a local folder, the Hub cannot be reached, and the cache on this machine does not "
        "have all of its files. Connect to the network, or give the path of a local folder."
    )


def device_dtype() -> torch.dtype:
    """Default dtype: float32 on the CPU; on an accelerator bfloat16, or float16 where that is not supported."""
    if not torch.accelerator.is_available():
        return torch.float32
    return torch.bfloat16 if supports_bfloat16() else torch.float16


def supports_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


DTYPES = ("float32", "bfloat16", "float16")


def parse_dtype(dtype: str | torch.dtype, *, setting: str = "dtype", known: Sequence[str] = DTYPES) -> torch.dtype:
    """The torch dtype of this name.

    Raises:
        ConfigError: it is not one of the `known` dtypes.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise ConfigError(f"{setting}={dtype!r} is not a supported dtype: use {', '.join(map(repr, known))}.")
    found: torch.dtype = getattr(torch, name)
    return found


def load_tokenizer(
    model: Any, model_init_kwargs: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The tokenizer that belongs to `model`, by the name that it was loaded from.

    Raises:
        ConfigError: it is not known where the model was loaded from, or there is no tokenizer there.
    """
    from transformers import AutoTokenizer

    name = model_name_or_path(model)
    if not name:
        raise ConfigError(
            "It is not known where the model was loaded from, so its tokenizer cannot be found. Pass the tokenizer: "
            "GRPOTrainer(..., processing_class=tokenizer)."
        )
    where = {key: value for key, value in (model_init_kwargs or {}).items() if key in HUB_KWARGS and value is not None}
    from_cache = is_unreachable(name)
    if from_cache:
        where["local_files_only"] = True
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    except (OSError, ValueError) as error:
        if from_cache:
            raise ConfigError(_not_in_cache("tokenizer", name)) from error
        raise ConfigError(
            f"The tokenizer of {name!r} cannot be loaded: {summarize_error(error)} Save the tokenizer with the "
            "model, or pass it: GRPOTrainer(..., processing_class=tokenizer)."
        ) from error


def repair_generation_config(model: Any) -> None:
    """Reloads an inconsistent generation_config so that save_pretrained accepts it.

    Many models are published with a temperature and without do_sample. transformers saves such a configuration only
    while it is unchanged, and training changes the special tokens: saving the first checkpoint would fail.
    """
    base = base_model(model)
    config = getattr(base, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        with tempfile.TemporaryDirectory() as scratch:
            config.to_json_file(Path(scratch) / GENERATION_CONFIG_NAME)
            base.generation_config = type(config).from_pretrained(scratch)


def enable_input_grads(model: Any) -> None:
    """Makes embeddings require gradients; re-entrant checkpointing needs that when only adapters are trained."""
    embeddings = model.get_input_embeddings()
    if hasattr(model, "enable_input_require_grads") and not any(p.requires_grad for p in embeddings.parameters()):
        model.enable_input_require_grads()


def prepare_for_kbit_training(model: Any) -> Any:
    """A quantised model with its norms and embeddings in float32; any other model unchanged."""
    from peft import prepare_model_for_kbit_training

    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model
