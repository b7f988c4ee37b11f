"""Plain LoRA layers: which they are, and a forward of them that fills less memory. N tokens, r rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor, nn

from grupo.utils.quantized_layers import is_4bit, is_8bit


def is_plain_lora(module: nn.Module) -> bool:
    """y = W x + scale B A x on a linear layer, quantised or not; not DoRA."""
    if not isinstance(module, LoraLayer):
        return False
    layer = module.get_base_layer()
    if not (isinstance(module, LoraLinear) and type(layer) is nn.Linear) and not is_4bit(layer) and not is_8bit(layer):
        return False
    plain = not module.lora_variant and not any(module.lora_bias.values())
    return plain and not has_hooks(module) and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextlib.contextmanager
def inplace_lora(model: nn.Module) -> Iterator[None]:
    """Plain LoRA layers add to the output of their base layer where it stands.

    PEFT's own forward makes three tensors of the output's size on the way, in as many passes over memory.
    """
    # What 8-bit layers return may be a view, which autograd lets nobody write into.
    plain: list[Any] = [module for module in model.modules() if is_plain_lora(module)]
    changed = [module for module in plain if not is_8bit(module.get_base_layer())]
    for module in changed:
        module.lora_variant.update(dict.fromkeys(module.lora_A, _IN_PLACE))
    try:
        yield
    finally:
        for module in changed:
            module.lora_variant.clear()


class _InPlace(LoraVariant):
    """What PEFT calls instead of its own sum."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **keywords: Any) -> Tensor:
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        low_rank = a(module.lora_dropout[active_adapter](x))
        scale = module.scaling[active_adapter]
        if result.dtype == low_rank.dtype == b.weight.dtype and result.is_contiguous():
            added: Tensor = _AddProduct.apply(result, low_rank, b.weight, scale)
            return added
        total: Tensor = result + b(low_rank) * scale
        return total


class _AddProduct(torch.autograd.Function):
    """result + scale low_rank B^T, written into `result` (..., out); low_rank (..., r), B (out, r)."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, low_rank: Tensor, b: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(result)
        ctx.save_for_backward(low_rank, b)
        ctx.scale = scale
        result.flatten(0, -2).addmm_(low_rank.flatten(0, -2), b.T, alpha=scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        low_rank, b = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_low_rank = (rows @ b).mul_(ctx.scale).view_as(low_rank)
        return grad, grad_low_rank, (rows.T @ low_rank.flatten(0, -2)).mul_(ctx.scale), None


_IN_PLACE = _InPlace()
