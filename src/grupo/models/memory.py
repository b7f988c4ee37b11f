"""How much memory there is, how much of it a token takes in training, and giving back what is not used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch import nn

CPU_ACTIVATION_BYTES = 768 << 20
"""Of one micro-batch on the CPU: more does not make it faster."""
SHARE_OF_FREE_MEMORY = 0.4
TRIM_EVERY_LAYERS = 10


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be allocated now; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def default_token_budget(base: Any, device: torch.device, *, checkpointing: bool) -> int | None:
    """Tokens whose activations fit: 40 % of the free memory, on the CPU 768 MiB at most. None: it cannot be told."""
    per_token = activation_bytes_per_token(base, checkpointing=checkpointing)
    free = free_bytes(device)
    if per_token is None or free is None:
        return None
    room = int(free * SHARE_OF_FREE_MEMORY)
    return max(1, (min(room, CPU_ACTIVATION_BYTES) if device.type == "cpu" else room) // per_token)


def activation_bytes_per_token(base: Any, *, checkpointing: bool) -> int | None:
    """What backward needs of one token, by the sizes in the model's configuration; None where it does not tell them.

    Per layer: inputs and outputs of both norms, queries, keys and values, attention output before and after its
    transposition, and four times the width of the feed-forward layer. With checkpointing one layer of that, and the
    input of every layer.
    """
    config = base.config.get_text_config() if hasattr(base, "config") else None
    hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    heads, inner = getattr(config, "num_attention_heads", None), getattr(config, "intermediate_size", None)
    if not (hidden and layers and heads and inner):
        return None
    size = getattr(config, "head_dim", None) or hidden // heads
    key_value = (getattr(config, "num_key_value_heads", None) or heads) * size
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    layer = 4 * hidden + 3 * heads * size + 3 * key_value + 4 * inner
    numbers = layers * hidden + layer if checkpointing else layers * layer
    return int(numbers) * next(base.parameters()).element_size()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a device, or of the CPU's allocator, which has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def give_back_memory(device: torch.device) -> None:
    """Returns freed memory to the system, where the C library would keep it.

    Tensors are aligned, and glibc before 2.38 cannot put a new aligned block where one of the same size was freed (glibc
    bug 14581), so that a process holds nearly twice what it uses.
    """
    trim = _malloc_trim()
    if trim is not None and device.type == "cpu":
        trim(0)


@contextlib.contextmanager
def memory_given_back_between_layers(decoder: nn.Module | None, device: torch.device) -> Iterator[None]:
    """In every forward, `give_back_memory` behind every tenth layer."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or device.type != "cpu" or _malloc_trim() is None:
        yield
        return
    chosen = list(layers)[TRIM_EVERY_LAYERS - 1 :: TRIM_EVERY_LAYERS]
    handles = [layer.register_forward_hook(lambda *_: give_back_memory(device)) for layer in chosen]
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
