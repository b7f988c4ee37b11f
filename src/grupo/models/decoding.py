"""The policy in the form that decodes fastest: adapters folded in, layers in few operators, linear layers packed.

Decoding multiplies a handful of rows with every weight of the model. The copy that is made here shares modules' code
and all other tensors with the training model, whose weights are never touched: there is nothing to unmerge and nothing
to drift. It is made anew for each rollout and freed after it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional

from grupo.models.decoding_layer import DecodingLayer, Rotation, is_fusible
from grupo.models.load import base_model
from grupo.models.lora import has_hooks, is_plain_lora

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
    return _copied(base, functools.partial(_replacement, rotation=Rotation()), {})


def unfolded_layers(model: Any) -> int:
    """Layers whose adapters the copy computes as peft does, beside their weights: DoRA, biases, embeddings, others."""
    layers = [module for module in base_model(model).modules() if isinstance(module, BaseTunerLayer)]
    return sum(_layer_of(layer) is None for layer in layers)


@torch.no_grad()
def _replacement(module: Any, rotation: Rotation) -> nn.Module | None:
    """What stands for a module in the copy; None: a copy of it."""
    if is_fusible(module) and not any(map(has_hooks, _not_linear(module))):
        attention, mlp = module.self_attn, module.mlp
        groups = (
            (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,),
        )  # fmt: skip
        if all(_layer_of(part) is not None for group in groups for part in group):
            qkv, output, gate_up, down = (_joint(group) for group in groups)
            return DecodingLayer(
                module, (qkv, output, gate_up, down), rotation, _is_plain_float32(module.input_layernorm.weight)
            )
    if _layer_of(module) is not None:
        return _joint((module,))
    # Itself, as it reads the weights of its parts: DoRA, quantised layers, embeddings.
    keeps_itself: bool = isinstance(module, BaseTunerLayer)
    return module if keeps_itself else None


def _layer_of(module: Any) -> nn.Linear | None:
    """The linear layer that a module computes, but for plain LoRA on it; None: it does something else."""
    if is_plain_lora(module):
        layer: nn.Linear = module.get_base_layer()
        return layer
    return module if type(module) is nn.Linear and not has_hooks(module) else None


def _joint(modules: Sequence[nn.Module]) -> nn.Module:
    """Linear layers of the same input as one, whose output is theirs one after the other; adapters folded in."""
    layers = [layer for layer in map(_layer_of, modules) if layer is not None]
    weights: list[Tensor] = [layer.weight for layer in layers]
    deltas = [_deltas(module) for module in modules]
    if len(layers) == 1 and not deltas[0]:
        weight = weights[0].detach()
    else:
        weight = weights[0].new_empty(sum(len(part) for part in weights), weights[0].shape[1])
        for part, frozen, changes in zip(weight.split([len(part) for part in weights]), weights, deltas, strict=True):
            _fold(frozen, changes, part)
    if all(layer.bias is None for layer in layers):
        return _fastest(weight, None)
    biases = (weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers)
    return _fastest(weight, torch.cat(tuple(biases)))


def _deltas(module: Any) -> list[tuple[Tensor, Tensor, float]]:
    """B, A and scale of each adapter that acts."""
    if not isinstance(module, LoraLinear) or module.merged or module.disable_adapters:
        return []
    layer: Any = module
    return [
        (layer.lora_B[name].weight, layer.lora_A[name].weight, layer.scaling[name])
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


def _fold(weight: Tensor, deltas: Sequence[tuple[Tensor, Tensor, float]], out: Tensor) -> None:
    """weight + sum of scale B A, rounded once."""
    if len(deltas) == 1 and weight.dtype == deltas[0][0].dtype:
        b, a, scale = deltas[0]
        torch.addmm(weight, b, a, alpha=scale, out=out)
        return
    total = weight
    for b, a, scale in deltas:
        total = torch.addmm(total.to(b.dtype), b, a, alpha=scale)
    out.copy_(total)


def _not_linear(module: nn.Module) -> Iterator[nn.Module]:
    """A module and what is in it, without linear layers and their adapters."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.Linear | BaseTunerLayer):
            yield from _not_linear(child)


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


def _is_plain_float32(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)


def _fastest(weight: Tensor, bias: Tensor | None) -> nn.Module:
    if weight.device.type == "cpu" and _is_plain_float32(weight) and _packing_works():
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
