"""The policy in the form that decodes fastest: adapters folded into their layers, linear layers packed.

Decoding multiplies a handful of rows with every weight of the model. The copy that is made here shares modules' code
and all other tensors with the training model, whose weights are never touched: there is nothing to unmerge and nothing
to drift. It is made anew for each rollout and freed after it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional

from grupo.models.load import base_model

PACKED_TOLERANCE = 1e-5
"""Relative to the largest magnitude: products may be summed up in another order, and no more."""


def decoding_copy(model: Any) -> nn.Module | None:
    """The base model as a structure of its own, in evaluation mode, with active adapters folded in.

    None where such a copy could differ from the model: a module's forward was replaced, or an adapter is none of layers
    alone (prompt tuning).
    """
    base = base_model(model)
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        return None
    if any("forward" in vars(module) for module in base.modules() if not _is_prepared(module, base)):
        return None
    return _copied(base, _folded, {})


@torch.no_grad()
def _folded(module: nn.Module) -> nn.Module | None:
    """What stands for a module in the copy; None: a copy of it."""
    if isinstance(module, LoraLinear) and _is_plain_lora(module):
        layer: Any = module.get_base_layer()
        weight: Tensor = layer.weight
        if not module.merged and not module.disable_adapters:
            deltas = [
                module.get_delta_weight(adapter) for adapter in module.active_adapters if adapter in module.lora_A
            ]
            for delta in deltas:
                weight = weight + delta.to(weight.dtype)
        return _fastest(weight, layer.bias)
    if isinstance(module, BaseTunerLayer):
        # Itself, as it reads the weights of its parts: DoRA, quantised layers, embeddings.
        return module
    if type(module) is nn.Linear and not _has_hooks(module):
        return _fastest(module.weight, module.bias)
    return None


def _is_plain_lora(module: LoraLinear) -> bool:
    """y = W x + scale B A x on a linear layer that keeps its weights as they are; neither DoRA nor quantised."""
    layer = module.get_base_layer()
    plain = type(layer) is nn.Linear and not module.lora_variant and not any(module.lora_bias.values())
    return plain and not _has_hooks(module) and not _has_hooks(layer)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_prepared(module: nn.Module, base: nn.Module) -> bool:
    """Its forward was replaced by `accelerate`, which runs it under autocast; the engine opens autocast itself."""
    return module is base and hasattr(module, "_original_forward")


def _copied(
    module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None], done: dict[int, nn.Module]
) -> nn.Module:
    """A module with the same parameters, buffers and hooks, and copies of its children."""
    if id(module) in done:
        return done[id(module)]
    new = replacement(module)
    if new is None:
        new = copy.copy(module)
        vars(new).pop("forward", None)
        new._parameters = dict(module._parameters)
        new._buffers = dict(module._buffers)
        new._modules = {}
        done[id(module)] = new
        for name, child in module._modules.items():
            new._modules[name] = None if child is None else _copied(child, replacement, done)
    done[id(module)] = new
    new.training = False
    return new


def _fastest(weight: Tensor, bias: Tensor | None) -> nn.Module:
    in_float32 = weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)
    if weight.device.type == "cpu" and in_float32 and _packing_works():
        return _PackedLinear(weight.detach(), bias)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
    return layer


class _PackedLinear(nn.Module):
    """A linear layer in oneDNN's own order of weights, which multiplies few rows two to three times as fast."""

    ROWS_HINT = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS_HINT)
        self.bias = None if bias is None else bias.detach()
        # Some models read these of their layers.
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")
        return result


@functools.cache
def _packing_works() -> bool:
    """Whether this build of torch has the operators, and they multiply; they are those of its compiler, not public."""
    weight = torch.linspace(-1, 1, 24 * 40).reshape(24, 40)
    hidden, bias = torch.linspace(0, 1, 3 * 40).reshape(1, 3, 40).cos(), torch.linspace(0, 2, 24)
    expected = functional.linear(hidden, weight, bias)
    try:
        found = _PackedLinear(weight, bias)(hidden)
    except (AttributeError, RuntimeError, TypeError):
        return False
    error = float((found - expected).abs().max() / expected.abs().max())
    return found.shape == expected.shape and error <= PACKED_TOLERANCE
