"""Linear layers of bitsandbytes: their dequantised weights, and the arithmetic in which they compute.

bitsandbytes is an extra; it is imported only where one of its layers is created or read. NF4 with double quantisation
is that of QLoRA (arXiv:2305.14314), int8 that of LLM.int8() (arXiv:2208.07339).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_bitsandbytes_available

from grupo.errors import ConfigError, UnsupportedError
from grupo.utils.quantized_layers import is_4bit, is_8bit, quantized_layers

QUANTIZATIONS = ("nf4", "int8")


def quantization_config(name: str, compute_dtype: torch.dtype, *, asked: str) -> Any:
    """The configuration with which `from_pretrained` loads a model in 4 or 8 bits.

    Args:
        name: "nf4" or "int8".
        compute_dtype: dtype in which 4-bit layers multiply; their weights are dequantised into it.
        asked: the setting that requests it, as written by the user.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    from transformers import BitsAndBytesConfig

    if not is_bitsandbytes_available():
        raise ConfigError(
            f"{asked} needs the package bitsandbytes, which is not installed or too old. Install it "
            "(pip install 'bitsandbytes>=0.50'), or load the model in 16 or 32 bits instead."
        )
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=name,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def matches_dense(layer: Any) -> bool:
    """Whether a quantised layer computes the same, up to rounding, as a plain one with its `dequantize` weight.

    Not in 8 bits on CUDA, where inputs are quantised as well, and not if autocast has another dtype than the layer,
    which ignores autocast.
    """
    device = layer.weight.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dense_dtype(layer):
        return False
    return not is_packed_for_cpu(layer) if is_4bit(layer) else device == "cpu"


def dense_dtype(layer: Any) -> torch.dtype:
    """Dtype in which a quantised layer computes."""
    if is_4bit(layer):
        dtype: torch.dtype = layer.compute_dtype or layer.weight.quant_state.dtype
        return dtype
    return torch.float32


def dequantize(layer: Any) -> Tensor:
    """(out, in) dequantised weight of a quantised layer, newly allocated."""
    from bitsandbytes import functional

    if is_4bit(layer):
        state = copy.copy(layer.weight.quant_state)
        state.dtype = dense_dtype(layer)
        weight: Tensor = functional.dequantize_4bit(layer.weight.data, state)
        return weight
    # The scales move from the weight to the state in the first forward.
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    weight = functional.int8_vectorwise_dequant(layer.weight.data, scales)
    return weight


def dense_bytes(model: nn.Module) -> int:
    """Memory of all parameters, with quantised ones in the dtype in which they are multiplied."""
    dense = {id(layer.weight): dense_dtype(layer) for layer in quantized_layers(model)}
    return sum(
        num_params(parameter) * dense.get(id(parameter), parameter.dtype).itemsize for parameter in model.parameters()
    )


def num_params(parameter: Tensor) -> int:
    """Number of weights in a parameter; a 4-bit parameter holds two per byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def arithmetic_dtype(model: nn.Module, device: torch.device) -> torch.dtype:
    """The least precise dtype in which `model` computes its layers."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    own = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return max((own, *map(dense_dtype, quantized_layers(model))), key=lambda dtype: torch.finfo(dtype).eps)


def is_packed_for_cpu(layer: Any) -> bool:
    return bool(getattr(layer.weight.quant_state, "packing_format_for_cpu", False))


def check_unpacked(model: nn.Module, instead: str) -> None:
    """Refuses a model with 4-bit layers that bitsandbytes has packed.

    The scales that the weights were quantised with are lost: packed ones are rounded to bfloat16.

    Args:
        instead: what to do about it, a sentence of the message.

    Raises:
        ConfigError: a layer is packed.
    """
    # bitsandbytes 0.50, Linear4bit.forward
    if any(is_packed_for_cpu(layer) for layer in quantized_layers(model) if is_4bit(layer)):
        raise ConfigError(
            "The 4-bit layers of the model were run in evaluation mode on this CPU, for which bitsandbytes packs their "
            "weights into another format: their scales are rounded, and no gradient passes through them any more. "
            f"{instead}"
        )


def check_quantized(model: Any) -> None:
    """Refuses quantised models that cannot be trained, or would silently get wrong gradients.

    Raises:
        ConfigError: there is no adapter, or layers were converted for inference.
        UnsupportedError: DoRA on 8-bit layers on the CPU.
    """
    layers = list(quantized_layers(model))
    if not layers:
        return
    if not getattr(model, "peft_config", None):
        raise ConfigError(
            "The weights of the model are quantised and cannot be trained themselves. Train an adapter on them "
            "(peft_config=LoraConfig(...), FastLanguageModel.get_peft_model, or `lora` in a recipe), or load the model "
            "without quantisation."
        )
    # peft 0.21, dequantize_module_weight: on the CPU it creates the weight again without its scales.
    on_cpu = any(is_8bit(layer) and layer.weight.device.type == "cpu" for layer in layers)
    if on_cpu and any(getattr(config, "use_dora", False) for config in model.peft_config.values()):
        raise UnsupportedError(
            "DoRA on 8-bit layers fails on the CPU, inside peft, at the second forward. Use 4 bits (nf4), or LoRA "
            "without use_dora."
        )
    check_unpacked(
        model,
        "Load the model again, and do not call model.eval() before training; model.fast_generate and "
        "FastLanguageModel.for_inference leave the layers as they are.",
    )
