"""Activations that wait in host memory between forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

SMALLEST_OFFLOADED = 4096
"""Numbers of a tensor: smaller ones are not worth the way."""


@contextlib.contextmanager
def offload_activations(model: nn.Module) -> Iterator[None]:
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
