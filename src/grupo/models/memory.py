"""How much memory there is, how much of it a token takes in training, and giving back what is not used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from grupo.models.activation_recompute import is_gated

CPU_ACTIVATION_BYTES = 1280 << 20
"""Of one micro-batch on the CPU: more hardly makes it faster."""
SHARE_OF_FREE_MEMORY = 0.4
TRIM_EVERY_LAYERS = {"forward": 5, "backward": 10}
SMALLEST_OFFLOADED = 4096
"""Numbers of a tensor: smaller ones are not worth the way."""


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be allocated now; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def default_token_budget(base: Any, device: torch.device, *, checkpointing: bool) -> int | None:
    """Tokens whose activations fit: 40 % of the free memory, on the CPU 1,280 MiB at most. None: it cannot be told."""
    return token_budget(base, device.type, free_bytes(device), checkpointing=checkpointing)


def token_budget(base: Any, device_type: str, free: int | None, *, checkpointing: bool) -> int | None:
    """The same for a device of this kind with `free` bytes."""
    per_token = activation_bytes_per_token(base, checkpointing=checkpointing)
    if per_token is None or free is None:
        return None
    room = int(free * SHARE_OF_FREE_MEMORY)
    return max(1, (min(room, CPU_ACTIVATION_BYTES) if device_type == "cpu" else room) // per_token)


def activation_bytes_per_token(base: Any, *, checkpointing: bool) -> int | None:
    """What backward needs of one token, by the sizes in the model's configuration; None where it does not tell them.

    Per layer: inputs of both norms, queries, keys and values, attention output twice, and two tensors as wide as the
    feed-forward part, or four where none is recomputed (`cheap_activations_recomputed`). With checkpointing one layer
    of that, whole, and the input of every layer.
    """
    sizes = Sizes.of(base)
    if sizes is None:
        return None
    kept = 2 if not checkpointing and any(map(is_gated, base.modules())) else 4
    layer = sizes.in_layer(kept)
    numbers = sizes.layers * sizes.hidden + layer if checkpointing else sizes.layers * layer
    element_size: int = next(base.parameters()).element_size()
    return numbers * element_size


@dataclass(frozen=True)
class Sizes:
    """Numbers of one token in the tensors of one layer."""

    layers: int
    hidden: int
    queries: int
    """Of all heads."""
    keys: int
    """Of all key-value heads, and as many values."""
    inner: int
    """Width of the feed-forward part, or of all experts that a token goes to."""

    def in_layer(self, kept: int) -> int:
        """Numbers of one token that backward needs of a layer, with `kept` tensors as wide as its input and its
        feed-forward part."""
        return kept * self.hidden + 3 * self.queries + 2 * self.keys + kept * self.inner

    @classmethod
    def of(cls, base: Any) -> Sizes | None:
        """None where the model's configuration does not tell them."""
        config = base.config.get_text_config() if hasattr(base, "config") else None
        hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
        heads, inner = getattr(config, "num_attention_heads", None), getattr(config, "intermediate_size", None)
        if not (hidden and layers and heads and inner):
            return None
        size = getattr(config, "head_dim", None) or hidden // heads
        keys = (getattr(config, "num_key_value_heads", None) or heads) * size
        return cls(layers, hidden, heads * size, keys, inner * (getattr(config, "num_experts_per_tok", None) or 1))


@contextlib.contextmanager
def activations_in_host_memory(model: nn.Module) -> Iterator[None]:
    """What a forward inside of it saves for backward goes to host memory, and comes back when backward needs it.

    Parameters and buffers stay where they are, unlike with `torch.autograd.graph.save_on_cpu`. Gradients are the same.
    """
    staying = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.numel() < SMALLEST_OFFLOADED or tensor.untyped_storage().data_ptr() in staying:
            return tensor.device, tensor
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        # In the order of the device's stream, on which the copy back waits for it.
        return tensor.device, pinned.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a device, or of the CPU's allocator, which has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def give_back_memory(device: torch.device) -> None:
    """Returns freed memory to the system, where the C library would keep it.

    Tensors are aligned, and glibc before 2.38 cannot put a new aligned block where one of the same size was freed
    (glibc bug 14581), so that a process holds nearly twice what it uses.
    """
    trim = _malloc_trim()
    if trim is not None and device.type == "cpu":
        trim(0)


@contextlib.contextmanager
def memory_given_back_between_layers(decoder: nn.Module | None, device: torch.device) -> Iterator[None]:
    """`give_back_memory` behind every fifth layer of a forward, and every tenth of a backward, inside of it.

    What lies free between the tensors that backward keeps would otherwise be half of the process. While a forward fills
    memory that costs little; in backward, freed memory would be used again, and is more often left.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or device.type != "cpu" or _malloc_trim() is None:
        yield
        return

    def give_back(*_: object) -> None:
        give_back_memory(device)

    def in_backward(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(give_back)

    every = TRIM_EVERY_LAYERS
    handles = [
        layer.register_forward_hook(give_back) for layer in list(layers)[every["forward"] - 1 :: every["forward"]]
    ]
    handles += [layer.register_forward_hook(in_backward) for layer in list(layers)[:: every["backward"]][1:]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None on other systems and C libraries."""
    if not sys.platform.startswith("linux"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
