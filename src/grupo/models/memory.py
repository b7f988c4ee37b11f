"""How much memory is free, how many tokens of activations fit into it, and what a forward need not hold on to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from grupo.models.activation_recompute import is_gated
from grupo.utils.malloc import can_trim_host_memory, trim_host_memory

CPU_ACTIVATION_BYTES = 1280 << 20
"""Of one micro-batch on the CPU: more hardly makes it faster."""
SHARE_OF_FREE_MEMORY = 0.4
TRIM_EVERY_LAYERS = {"forward": 5, "backward": 10}


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
    """Memory that backward needs for one token; None where the model's configuration does not give its sizes."""
    widths = LayerWidths.of(base)
    if widths is None:
        return None
    element_size: int = next(base.parameters()).element_size()
    return _saved_numbers(base, widths, checkpointing=checkpointing) * element_size


def activation_bytes(
    base: Any,
    widths: LayerWidths,
    tokens: int,
    *,
    itemsize: int,
    device_type: str,
    checkpointing: bool,
    offload: bool,
) -> int:
    """Memory of the activations of a micro-batch; on the CPU with what was freed and not yet returned to the system.

    Args:
        itemsize: bytes of one number of the hidden states.
        offload: whether saved activations wait in host memory, which makes no difference on the CPU.
    """
    layer = tokens * widths.in_layer(4) * itemsize
    if offload and device_type != "cpu":
        return layer
    saved = tokens * _saved_numbers(base, widths, checkpointing=checkpointing) * itemsize
    # Between two trims, the process keeps what these layers have computed and freed.
    return saved + (TRIM_EVERY_LAYERS["forward"] * layer if device_type == "cpu" else 0)


def _saved_numbers(base: Any, widths: LayerWidths, *, checkpointing: bool) -> int:
    """Numbers that backward needs for one token.

    Per layer: inputs of both norms, queries, keys and values, attention output twice, and two tensors as wide as the
    feed-forward part, or four where none is recomputed (`recompute_cheap_activations`). With checkpointing: one whole
    layer of that, and the input of every layer.
    """
    kept = 2 if not checkpointing and any(map(is_gated, base.modules())) else 4
    layer = widths.in_layer(kept)
    return widths.layers * widths.hidden + layer if checkpointing else widths.layers * layer


@dataclass(frozen=True)
class LayerWidths:
    """Sizes of a model: numbers of one token in the tensors of one layer."""

    layers: int
    hidden: int
    queries: int
    """Queries of all heads."""
    keys: int
    """Keys of all key-value heads; the values are as many."""
    inner: int
    """Width of the feed-forward part, or of all experts that a token goes to."""

    @property
    def cached(self) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * 2 * self.keys

    def in_layer(self, kept: int) -> int:
        """Numbers of one token that backward needs in a layer, with `kept` tensors as wide as its input and its
        feed-forward part."""
        return kept * self.hidden + 3 * self.queries + 2 * self.keys + kept * self.inner

    @classmethod
    def of(cls, base: Any) -> LayerWidths | None:
        """The sizes in the model's configuration; None where it does not give them."""
        config = base.config.get_text_config() if hasattr(base, "config") else None
        hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
        heads, inner = getattr(config, "num_attention_heads", None), getattr(config, "intermediate_size", None)
        if not (hidden and layers and heads and inner):
            return None
        size = getattr(config, "head_dim", None) or hidden // heads
        keys = (getattr(config, "num_key_value_heads", None) or heads) * size
        return cls(layers, hidden, heads * size, keys, inner * (getattr(config, "num_experts_per_tok", None) or 1))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a device, or of the CPU's allocator, which has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def trim_between_layers(decoder: nn.Module | None, device: torch.device) -> Iterator[None]:
    """`trim_host_memory` after every fifth layer of a forward, and every tenth of a backward, inside of it.

    What lies free between the tensors that backward keeps would otherwise be half of the process. While a forward fills
    memory that costs little; in backward, freed memory would be used again, and is more often left.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or device.type != "cpu" or not can_trim_host_memory():
        yield
        return

    def trim(*_: object) -> None:
        trim_host_memory(device.type)

    def trim_in_backward(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(trim)

    every = TRIM_EVERY_LAYERS
    handles = [layer.register_forward_hook(trim) for layer in list(layers)[every["forward"] - 1 :: every["forward"]]]
    handles += [layer.register_forward_hook(trim_in_backward) for layer in list(layers)[:: every["backward"]][1:]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
