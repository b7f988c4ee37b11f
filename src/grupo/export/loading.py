"""Loads the trained policy in float32 on the CPU, adapter on dequantised base, from a folder or a live model."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from transformers.quantizers.auto import AutoQuantizationConfig

from grupo.errors import ConfigError, ExportError, UnsupportedError, summarize_error
from grupo.export.source import ADAPTER_CONFIG, adapter_weights, find_source
from grupo.models.inspect import base_model, model_name_or_path
from grupo.models.load import load_policy, load_tokenizer
from grupo.models.peft_io import find_adapter, missing_weights, resize_to_saved_vocab
from grupo.models.quantization import check_unpacked
from grupo.utils.files import read_json
from grupo.utils.hub import is_unreachable
from grupo.utils.quantized_layers import set_evaluation_mode


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy that is owned by the caller and may be changed."""

    model: Any
    """Float32 model: a PeftModel, or a plain model if there is no adapter."""
    tokenizer: Any
    """None if none was found."""
    dtype: torch.dtype
    """Dtype of the base model before its quantisation."""
    was_quantised: bool


def open_folder(
    folder: str | Path, *, base: str | None, quantization_config: Any, tokenizer: Any, trust_remote_code: bool
) -> LoadedPolicy:
    """The policy in the folder of a run, a checkpoint, an adapter or a model.

    Args:
        base: name or path of the base model, if it is not where the adapter says.
        quantization_config: quantisation of the base model in training.

    Raises:
        ConfigError: no such folder, base model or weights.
        UnsupportedError: the base is quantised by another library than bitsandbytes.
    """
    source = find_source(folder)
    if base is not None and not source.is_adapter:
        raise ConfigError(
            f"{source.folder} is a whole model, and base={base!r} applies only to an adapter. Leave it out."
        )
    quantised = source.quantization
    revision = {"revision": source.adapter_config["revision"]} if source.adapter_config.get("revision") else {}
    try:
        adapter = find_adapter(str(source.folder)) if source.is_adapter and base is None else None
        name = base or (str(source.folder) if adapter is None else adapter.base)
        config = _config(name, trust_remote_code=trust_remote_code, **(revision if base is None else {}))
        if quantization_config is None and quantised and not hasattr(config, "quantization_config"):
            quantization_config = AutoQuantizationConfig.from_dict(quantised)
        model = load_policy(
            name,
            {"dtype": torch.float32, **(revision if base is None else {})},
            trust_remote_code=trust_remote_code,
            quantization_config=quantization_config,
        )
    except ConfigError as error:
        if not source.is_adapter:
            raise
        raise ConfigError(f"{error} It is the base model of the adapter {source.folder}; give its current "
                          "location with base=NAME_OR_PATH (--base).") from error  # fmt: skip
    was_quantised = is_quantised(model)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if tokenizer is None:
        tokenizer = _tokenizer_of(source.folder, model, trust_remote_code=trust_remote_code)
    model = _plain_float32(model)
    if source.is_adapter:
        model = _attach(model, source.folder)
    return LoadedPolicy(model, tokenizer, dtype, was_quantised)


def open_model(model: Any, *, tokenizer: Any, trust_remote_code: bool) -> LoadedPolicy:
    """A float32 copy of a live model, which is not changed.

    Raises:
        ConfigError: this is no model, or its 4-bit layers were packed by bitsandbytes.
        UnsupportedError: the adapter is of an unsupported kind, or several are active.
    """
    if not hasattr(model, "config"):
        raise ConfigError(
            f"{type(model).__name__} is neither a model of transformers or PEFT nor the path of a folder."
        )
    has_adapter = hasattr(model, "get_base_model")
    if not has_adapter and getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            "The model has an adapter that was loaded by transformers. Load it with "
            "peft.AutoPeftModelForCausalLM.from_pretrained(folder), or pass the adapter's folder."
        )
    if tokenizer is None and model_name_or_path(model):
        tokenizer = _tokenizer_of(None, model, trust_remote_code=trust_remote_code)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedError("Weights of the model are on disk or not loaded (device_map). Pass its folder instead.")
    check_unpacked(
        model,
        "Load the model again, or, where it has an adapter, save that by model.save_pretrained(folder) and pass the "
        "folder.",
    )
    dtype, was_quantised = _dtype_in_memory(base_model(model)), is_quantised(base_model(model))
    if not has_adapter:
        return LoadedPolicy(_base_copy(model), tokenizer, dtype, was_quantised)
    (adapter,) = _one_adapter(model)
    # The adapter is saved and loaded, so that weights missing from its files are noticed.
    with _saved(model, adapter) as folder:
        again = _attach(_base_copy(model), folder)
    _check_all_trained_is_there(model, again, adapter)
    return LoadedPolicy(again, tokenizer, dtype, was_quantised)


def on_original_base(policy: LoadedPolicy, base: str | None, *, trust_remote_code: bool) -> Any:
    """The adapter on its base model before quantisation.

    Raises:
        ConfigError: there is no adapter, the base was not quantised, or it exists only in its quantised form.
    """
    if not policy.was_quantised or not hasattr(policy.model, "get_base_model"):
        raise ConfigError(
            "base_weights='original' applies only to an adapter that was trained on a quantised base; leave it out."
        )
    name = base or model_name_or_path(policy.model)
    original = load_policy(name, {"dtype": torch.float32}, trust_remote_code=trust_remote_code)
    if is_quantised(original):
        raise ConfigError(
            f"base_weights='original': {name!r} itself is quantised. Give the model from which it was made: "
            "base=NAME_OR_PATH (--base)."
        )
    with _saved(policy.model, *_one_adapter(policy.model)) as folder:
        return _attach(original, folder)


@contextlib.contextmanager
def _saved(model: Any, adapter: str) -> Iterator[Path]:
    """The adapter in a temporary folder, without an initialisation that would change the base model again."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, selected_adapters=[adapter], save_embedding_layers=False)
        folder = Path(scratch) if adapter == "default" else Path(scratch) / adapter
        config = read_json(folder / ADAPTER_CONFIG)
        # PiSSA and others move a part of the base model into the adapter at initialisation, which is already done.
        if "init_lora_weights" in config:
            (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, "init_lora_weights": True}), encoding="utf-8")
        yield folder


def is_quantised(model: Any) -> bool:
    return bool(getattr(model, "is_quantized", False)) or getattr(model, "hf_quantizer", None) is not None


def _attach(model: Any, folder: Path) -> Any:
    """The adapter in a folder on its base model, in float32."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(folder))
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedError(
            f"{folder} has virtual tokens ({config.peft_type.value}), which are not part of any weight and cannot be "
            "merged. Export it with --to adapter."
        )
    saved = adapter_weights(folder)
    resize_to_saved_vocab(model, saved)
    try:
        with warnings.catch_warnings():
            # Merging decides, and logs, whether head and embedding stay tied.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            adapted = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=True)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The adapter {folder} does not fit the base model {model_name_or_path(model)!r}: {error}"
        ) from error
    missing, _ = missing_weights(adapted, saved)
    if missing:
        raise ConfigError(
            f"The adapter {folder} lacks {len(missing)} of its weights, for example {min(missing)}: it is damaged, or "
            f"belongs to another base model than {model_name_or_path(model)!r}."
        )
    adapted = adapted.float()
    set_evaluation_mode(adapted)
    return adapted


def _base_copy(model: Any) -> Any:
    """A copy of the model without its adapter, with dequantised float32 weights on the CPU.

    The weights are converted one by one, because the model may be on a GPU that has no room for two copies.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in memo:
                weight = _dequantised(module, parameter).detach().to("cpu", torch.float32, copy=True)
                memo[id(parameter)] = nn.Parameter(weight, requires_grad=False)
        for tensor in _computed_tensors(vars(module)):
            memo[id(tensor)] = tensor.detach()  # of tied adapters; autograd does not allow copying it
    copied = copy.deepcopy(model, memo)
    for part in copied.modules():
        # Wrappers of accelerate around the forward of the original model.
        for name in ("forward", "_hf_hook", "_old_forward"):
            vars(part).pop(name, None)
    if hasattr(copied, "get_base_model"):
        for name, part in list(copied.base_model.model.named_modules()):
            if isinstance(part, ModulesToSaveWrapper):  # PEFT's unload would keep the trained weights
                copied.base_model.model.set_submodule(name, part.original_module)
        copied = copied.unload()
    return _plain_float32(copied.to("cpu"))


def _computed_tensors(values: Mapping[Any, Any]) -> Iterator[Tensor]:
    for value in values.values():
        if isinstance(value, Tensor) and not value.is_leaf:
            yield value
        elif type(value) is dict:
            yield from _computed_tensors(value)


def _plain_float32(model: Any) -> Any:
    """Replaces quantised layers by plain ones and removes the quantisation from the configuration."""
    quantizer = getattr(model, "hf_quantizer", None)
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            weight = _dequantised(module, module.weight).detach().to("cpu", torch.float32)
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)
    if quantizer is not None:
        method = getattr(quantizer.quantization_config, "quant_method", "an unknown method")
        method = str(getattr(method, "value", method))
        if not method.startswith("bitsandbytes"):
            raise UnsupportedError(
                f"The base model is quantised by {method}; this version of grupo dequantises only bitsandbytes. Train "
                "and merge on the model before its quantisation, or export with --to adapter."
            )
        quantizer.remove_quantization_config(model)
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method"):
            vars(model).pop(flag, None)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    set_evaluation_mode(model)
    return model


def _dequantised(module: Any, parameter: Tensor) -> Tensor:
    if type(parameter).__name__ not in ("Params4bit", "Int8Params"):
        return parameter
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weight: Any = dequantize_bnb_weight(cast(nn.Parameter, parameter), getattr(module, "state", None))
    return cast(Tensor, weight)


def _one_adapter(model: Any) -> list[str]:
    active = list(getattr(model, "active_adapters", []))
    if len(active) != 1:
        raise UnsupportedError(
            f"The model has {len(active)} active adapters ({', '.join(active) or 'none'}), and only one can be merged. "
            "Choose it with model.set_adapter(NAME); model.add_weighted_adapter(...) combines several."
        )
    return active


def _check_all_trained_is_there(model: Any, again: Any, adapter: str) -> None:
    """Raises an error for trained weights that PEFT does not save, which would be lost silently."""
    now = {name.replace(f".{adapter}.", ".default."): tensor for name, tensor in again.named_parameters()}
    for name, parameter in model.named_parameters():
        key = name.replace(f".{adapter}.", ".default.")
        if parameter.requires_grad and not (
            key in now and torch.equal(now[key].detach(), parameter.detach().to("cpu", torch.float32))
        ):
            raise ExportError(
                f"{name} was trained, but PEFT does not save it with the adapter. Add its module to modules_to_save."
            )


def _config(name: str, *, trust_remote_code: bool, **where: Any) -> Any:
    """The stored configuration of a model, with the dtype of its weights.

    Raises:
        ConfigError: there is no such model.
    """
    if is_unreachable(name):
        where["local_files_only"] = True
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"There is no model {name!r}: it is neither a local folder nor available from the Hub."
        ) from error


def _dtype_in_memory(model: Any) -> torch.dtype:
    if is_quantised(model):
        return model.config.dtype if isinstance(model.config.dtype, torch.dtype) else torch.float32
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def _tokenizer_of(folder: Path | None, model: Any, *, trust_remote_code: bool) -> Any:
    """The tokenizer in the folder, or else that of the base model; None if there is none."""
    if folder is not None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        try:
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The tokenizer in {folder} cannot be loaded: {summarize_error(error)} Restore its "
                "missing files, or remove the others to use the tokenizer of the base model."
            ) from error
    try:
        return load_tokenizer(model, trust_remote_code=trust_remote_code)
    except ConfigError:
        return None
