"""The policy in the form that decodes fastest: adapters folded in, layers fused, linear layers packed.

Decoding multiplies few rows with every weight of the model. The copy shares module code and all other tensors with the
training model, whose weights are never touched: nothing has to be unmerged and nothing drifts. Quantised weights are
dequantised in it. It is created for each rollout and freed afterwards.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional

from grupo.models.inplace_lora import has_hooks, is_plain_lora
from grupo.models.inspect import base_model, quantizable_layers
from grupo.models.quantization import dense_dtype, dequantize, matches_dense
from grupo.rollout.local.fused_layer import DecodingLayer, Rotation, is_fusible
from grupo.utils.quantized_layers import is_4bit, is_8bit

PACKED_TOLERANCE = 1e-5
"""Largest difference relative to the largest magnitude: only the order of summation may differ."""
DENSE_ITEMSIZE = {"nf4": {"cpu": 4, "cuda": 2}, "int8": {"cpu": 4, "cuda": 0}}
"""Bytes of a quantised weight in the copy, by kind of device; 8-bit layers are not copied on CUDA."""
FOLDED_INTO = (torch.float32, torch.float64)


def make_inference_copy(model: Any) -> nn.Module | None:
    """A copy of the base model in evaluation mode, with active adapters folded in.

    None where the copy could differ from the model: a module's forward was replaced, or an adapter is not confined to
    layers (prompt tuning).
    """
    base = base_model(model)
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        return None
    if any("forward" in vars(module) for module in base.modules() if not _is_prepared(module, base)):
        return None
    return _copied(base, functools.partial(_replacement, rotation=Rotation()), {})


def inference_copy_bytes(model: Any, device_type: str, *, autocast: bool, quantization: str | None = None) -> int:
    """Memory of the weights that `make_inference_copy` allocates on a device of this kind.

    Args:
        quantization: "nf4" or "int8" where the model is still to be loaded in this form.
    """
    if quantization is not None:
        weights = sum(layer.weight.numel() for layer in quantizable_layers(model))
        return weights * DENSE_ITEMSIZE[quantization][device_type]
    packs = device_type == "cpu" and _packing_works()

    def of(module: Any) -> int:
        groups = _groups(module)
        if groups is None:
            if _layer_of(module) is None:
                return 0 if _keep_as_is(module) else sum(map(of, module.children()))
            groups = ((module,),)
        return sum(_new_bytes(group, packs=packs, autocast=autocast) for group in groups)

    return of(base_model(model))


def _new_bytes(group: Sequence[Any], *, packs: bool, autocast: bool) -> int:
    layers = [layer for layer in map(_layer_of, group) if layer is not None]
    dtype = _dtype(layers[0])
    folds = dtype in FOLDED_INTO and not autocast
    packed = packs and folds and dtype == torch.float32
    if len(layers) == 1 and type(layers[0]) is nn.Linear and not packed and not (folds and _deltas(group[0])):
        return 0
    return sum(layer.out_features * layer.in_features for layer in layers) * dtype.itemsize


def unfolded_layers(model: Any) -> int:
    """Number of layers whose adapters the copy cannot fold and computes as peft does: DoRA, biases, embeddings."""
    layers = [module for module in base_model(model).modules() if isinstance(module, BaseTunerLayer)]
    return sum(_layer_of(layer) is None for layer in layers)


@torch.no_grad()
def _replacement(module: Any, rotation: Rotation) -> nn.Module | None:
    """The replacement of a module in the copy; None: a copy of it."""
    groups = _groups(module)
    if groups is not None:
        qkv, output, gate_up, down = map(_fuse_linears, groups)
        return DecodingLayer(
            module, (qkv, output, gate_up, down), rotation, _is_plain_float32(module.input_layernorm.weight)
        )
    if _layer_of(module) is not None:
        return _fuse_linears((module,))
    return module if _keep_as_is(module) else None


def _groups(module: Any) -> tuple[tuple[nn.Module, ...], ...] | None:
    """Linear layers of a decoder layer that is fused, grouped by their input; None: it is not fused."""
    if not is_fusible(module) or any(map(has_hooks, _not_linear(module))):
        return None
    attention, mlp = module.self_attn, module.mlp
    groups = (
        (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,),
    )  # fmt: skip
    return groups if all(_fusable([_layer_of(part) for part in group]) for group in groups) else None


def _keep_as_is(module: nn.Module) -> bool:
    """Whether a module is used as it is: DoRA, embeddings, layers that quantise their inputs."""
    return isinstance(module, BaseTunerLayer) or is_4bit(module) or is_8bit(module)


def _layer_of(module: Any) -> nn.Linear | None:
    """The linear layer of a module, without plain LoRA on it; None: it is something else."""
    layer = module.get_base_layer() if is_plain_lora(module) else module
    if type(layer) is not nn.Linear and not ((is_4bit(layer) or is_8bit(layer)) and matches_dense(layer)):
        return None
    return None if has_hooks(layer) else layer


def _fusable(layers: Sequence[nn.Linear | None]) -> bool:
    """Whether one layer can replace all of them."""
    return layers[0] is not None and len({(type(layer), layer and _dtype(layer)) for layer in layers}) == 1


def _fuse_linears(modules: Sequence[nn.Module]) -> nn.Module:
    """One layer for linear layers with the same input: its output is the concatenation of theirs, with adapters."""
    layers = [layer for layer in map(_layer_of, modules) if layer is not None]
    deltas = [_deltas(module) for module in modules]
    sizes = [layer.out_features for layer in layers]
    dtype, first = _dtype(layers[0]), layers[0].weight
    folds = _can_fold_adapter(first, dtype) and all(b.dtype == dtype for part in deltas for b, _, _ in part)
    if len(layers) == 1 and not (folds and deltas[0]):
        weight = _weight(layers[0])
    else:
        weight = first.new_empty(sum(sizes), layers[0].in_features, dtype=dtype)
        for part, layer, changes in zip(weight.split(sizes), layers, deltas, strict=True):
            _fold(_weight(layer), changes if folds else (), part)
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = (weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers)
        bias = torch.cat([part.detach().to(dtype) for part in biases])
    if folds and weight.device.type == "cpu" and dtype == torch.float32 and _packing_works():
        return _PackedLinear(weight, bias)
    apart = None if folds else _low_rank(deltas, sizes)
    return _Linear(weight, bias, apart, own_dtype=type(layers[0]) is not nn.Linear)


def _dtype(layer: nn.Linear) -> torch.dtype:
    return layer.weight.dtype if type(layer) is nn.Linear else dense_dtype(layer)


def _weight(layer: nn.Linear) -> Tensor:
    return layer.weight.detach() if type(layer) is nn.Linear else dequantize(layer)


def _can_fold_adapter(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether an adapter may be folded into a weight. In half precision, rounding would remove most of its change, and
    all of it in the first steps: completions would come from the base model."""
    return dtype in FOLDED_INTO and not torch.is_autocast_enabled(weight.device.type)


def _deltas(module: Any) -> list[tuple[Tensor, Tensor, float]]:
    """B, A and scale of each active adapter."""
    if not isinstance(module, LoraLayer) or module.merged or module.disable_adapters:
        return []
    layer: Any = module
    return [
        (layer.lora_B[name].weight, layer.lora_A[name].weight, layer.scaling[name])
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


def _fold(weight: Tensor, deltas: Sequence[tuple[Tensor, Tensor, float]], out: Tensor) -> None:
    """weight + sum of scale B A."""
    if not deltas:
        out.copy_(weight)
        return
    for b, a, scale in deltas:
        weight = torch.addmm(weight, b, a, alpha=scale, out=out)


def _low_rank(
    deltas: Sequence[Sequence[tuple[Tensor, Tensor, float]]], sizes: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """A (R, in) and B (out, R) of all adapters of fused layers, each in the rows of its layer, scales in B."""
    flat = [(rows, *delta) for rows, part in enumerate(deltas) for delta in part]
    if not flat:
        return None
    a = torch.cat([a.detach() for _, _, a, _ in flat])
    joint = a.new_zeros(sum(sizes), len(a))
    rank = 0
    for rows, b, _, scale in flat:
        joint.split(list(sizes))[rows][:, rank : rank + b.shape[1]] = b * scale
        rank += b.shape[1]
    return a, joint


def _not_linear(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, without linear layers and their adapters."""
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
    if new is not module:
        new.training = False
    return new


def _is_plain_float32(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)


class _Linear(nn.Module):
    """hidden W^T + bias, plus the adapters that could not be folded into W.

    Args:
        low_rank: A (R, in) and B (out, R).
        own_dtype: the layer computes in its own dtype, whatever the dtype of its input and output.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, low_rank: tuple[Tensor, Tensor] | None, *, own_dtype: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.low_rank = low_rank
        self.own_dtype = own_dtype
        # Some models read these attributes of their layers.
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.own_dtype:
            result = functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).to(hidden.dtype)
        else:
            result = functional.linear(hidden, self.weight, self.bias)
        if self.low_rank is None:
            return result
        a, b = self.low_rank
        change = functional.linear(functional.linear(hidden.to(a.dtype), a), b)
        return (result + change).to(result.dtype)


class _PackedLinear(nn.Module):
    """A linear layer with weights in oneDNN's own layout, which is two to three times as fast for few rows."""

    ROWS_HINT = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS_HINT)
        self.bias = bias
        # Some models read these attributes of their layers.
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")
        return result


@functools.cache
def _packing_works() -> bool:
    """Whether this build of torch has working packed operators; they belong to its compiler and are not public."""
    weight = torch.linspace(-1, 1, 24 * 40).reshape(24, 40)
    hidden, bias = torch.linspace(0, 1, 3 * 40).reshape(1, 3, 40).cos(), torch.linspace(0, 2, 24)
    expected = functional.linear(hidden, weight, bias)
    try:
        found = _PackedLinear(weight, bias)(hidden)
    except (AttributeError, RuntimeError, TypeError):
        return False
    error = float((found - expected).abs().max() / expected.abs().max())
    return found.shape == expected.shape and error <= PACKED_TOLERANCE
