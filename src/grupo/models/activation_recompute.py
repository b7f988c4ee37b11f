"""Backward without the outputs of norms and activation functions: they are cheap to compute again from what is kept.

In a layer of Llama's form they are four tenths of what backward needs. Unlike with checkpointing, no matrix is
multiplied twice. The same modules compute them from the same tensors, so that gradients are the same to the last bit.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_IS_GATED_PRODUCT: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Of each feed-forward part that was met, whether it puts its layers together as their names say."""
_ACTIVE_CONTEXTS: list[_RecomputeTable] = []
"""Of the contexts below that are open."""
MAX_CACHED_VALUES = 2
"""That stay when they were needed: all projections behind a norm read its output, one after the other."""


@contextlib.contextmanager
def recompute_cheap_activations(decoder: nn.Module | None) -> Iterator[None]:
    """For all forwards of `decoder` inside of it, whose backward must come inside of it, too.

    Not together with checkpointing or offload, which decide themselves what is kept.
    """
    if decoder is None:
        yield
        return
    recipes = _RecomputeTable()
    _ACTIVE_CONTEXTS.append(recipes)
    handles: list[Any] = [decoder.register_forward_hook(lambda *_: recipes.of_storage.clear())]
    for module in decoder.modules():
        if is_norm(module):
            handles.append(module.register_forward_hook(recipes.after_norm))
        elif is_gated(module):
            handles.extend(_Gated(recipes, module).handles)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recipes.pack, _unpack):
            yield
    finally:
        _ACTIVE_CONTEXTS.remove(recipes)
        for handle in handles:
            handle.remove()
        recipes.latest.clear()


def register_recompute(output: Tensor, compute: Callable[..., Tensor], *inputs: Tensor) -> None:
    """For a function of ours: its output is `compute(*inputs)`, which backward may do again. The inputs are kept."""
    if _ACTIVE_CONTEXTS and output.requires_grad and output.is_contiguous():
        kept = tuple(tensor.detach() for tensor in inputs)
        _ACTIVE_CONTEXTS[-1].add(output, lambda: compute(*kept), *kept)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("RMSNorm")


def is_gated(module: nn.Module) -> bool:
    """Whether a feed-forward part has the layers of down(act(gate(x)) * up(x))."""
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(isinstance(getattr(module, part, None), nn.Module) for part in parts)


class _Recompute:
    """How to compute one tensor again, under the autocast of its forward."""

    def __init__(self, compute: Callable[[], Tensor], inputs: tuple[Tensor, ...], latest: deque[Any]) -> None:
        self.compute = compute
        self.inputs = inputs
        self.versions = [tensor._version for tensor in inputs]
        self.latest = latest
        device = inputs[0].device.type
        self.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def value(self) -> Tensor:
        """
        Raises:
            RuntimeError: what it is computed from was overwritten.
        """
        for recipe, value in self.latest:
            if recipe is self:
                return value  # type: ignore[no-any-return]
        if [tensor._version for tensor in self.inputs] != self.versions:
            raise RuntimeError("A tensor that backward needs was modified in place after the forward pass.")
        device, dtype, enabled = self.autocast
        with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            value = self.compute()
        self.latest.append((self, value))
        return value


class _RecomputeTable:
    """Of the tensors of the running forward, by their storage."""

    def __init__(self) -> None:
        self.of_storage: dict[int, tuple[StorageWeakRef, _Recompute]] = {}
        self.latest: deque[tuple[_Recompute, Tensor]] = deque(maxlen=MAX_CACHED_VALUES)

    def add(self, output: Tensor, compute: Callable[[], Tensor], *inputs: Tensor) -> _Recompute:
        recipe = _Recompute(compute, inputs, self.latest)
        # A weak reference keeps no numbers, but its address, which so cannot become that of another storage.
        reference = StorageWeakRef(output.untyped_storage())
        self.of_storage[reference.cdata] = (reference, recipe)
        return recipe

    def after_norm(self, norm: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) == 1 and isinstance(output, Tensor) and output.requires_grad and output.is_contiguous():
            hidden = inputs[0].detach()
            self.add(output, lambda: norm.forward(hidden), hidden)

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        if type(tensor) is not Tensor:
            return tensor
        _, recipe = self.of_storage.get(tensor.untyped_storage()._cdata, (None, None))
        if recipe is None:
            return tensor
        return _Packed(recipe, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class _Gated:
    """Follows the forward of one feed-forward part by hooks: activation, its factor, their product."""

    def __init__(self, recipes: _RecomputeTable, module: Any) -> None:
        self.recipes = recipes
        self.module = module
        self.activated: tuple[Tensor, _Recompute] | None = None
        self.factor: Tensor | None = None
        self.handles = [
            module.act_fn.register_forward_hook(self.after_activation),
            module.up_proj.register_forward_hook(self.after_up),
            module.down_proj.register_forward_pre_hook(self.before_down),
        ]

    def after_activation(self, act: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if output.requires_grad and output.is_contiguous():
            gate = inputs[0].detach()
            self.activated = output.detach(), self.recipes.add(output, lambda: act.forward(gate), gate)

    def after_up(self, up: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.factor = output.detach()

    def before_down(self, down: nn.Module, inputs: tuple[Any, ...]) -> None:
        activated, factor, self.activated, self.factor = self.activated, self.factor, None, None
        if activated is None or factor is None or not inputs[0].requires_grad or not inputs[0].is_contiguous():
            return
        value, recipe = activated
        if self.module not in _IS_GATED_PRODUCT:
            _IS_GATED_PRODUCT[self.module] = torch.equal(inputs[0].detach(), value * factor)
        if _IS_GATED_PRODUCT[self.module]:
            self.recipes.add(inputs[0], lambda: recipe.value() * factor, factor)


@dataclass(frozen=True)
class _Packed:
    """What stands for a saved tensor, and where in the recomputed one its numbers are."""

    recipe: _Recompute
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Tensor | _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.recipe.value().contiguous().as_strided(packed.size, packed.stride, packed.offset)
