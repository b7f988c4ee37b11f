"""What the machine could do at best: matrix products, memory reads, and the bare products of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from suite.measure import interleaved


def matrix_flops(size: int = 2048, repeats: int = 10) -> float:
    """Best of `repeats` products of two square float32 matrices, floating point operations a second."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    seconds = interleaved({"product": lambda: left @ right}, repeats)["product"]
    return 2 * size**3 / min(seconds)


def read_bandwidth(numbers: int = 2**28, repeats: int = 10) -> float:
    """Best of `repeats` sums over float32 numbers that fit in no cache, bytes a second."""
    values = torch.ones(numbers)
    return 4 * numbers / min(interleaved({"sum": values.sum}, repeats)["sum"])


def decode_steps(model: Any, rows: int, steps: int) -> Callable[[], None]:
    """The bare products of some decode steps: `rows` vectors through every linear layer, the head included."""
    layers = [module for module in model.modules() if hasattr(module, "in_features")]
    inputs = {layer.in_features: torch.randn(rows, 1, layer.in_features) for layer in layers}

    @torch.no_grad()
    def run() -> None:
        for _ in range(steps):
            for layer in layers:
                layer(inputs[layer.in_features])

    return run


def scoring_flop(model: Any, tokens: int, scored_tokens: int) -> float:
    """Floating point operations of forward and backward with frozen weights, attention and adapters left out.

    Four for each weight and token: two forward, two for the gradient of the layer's input. The head meets scored
    positions only.
    """
    head = model.get_output_embeddings().weight.numel()
    adapters = [name for name, _ in model.named_modules() if "lora_" in name]
    linear = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    body = sum(count for name, count in linear.items() if name not in adapters) - head
    return 4.0 * (body * tokens + head * scored_tokens)


def measure_machine(*, size: int = 2048, numbers: int = 2**28) -> dict[str, Any]:
    return {"gflops": matrix_flops(size) / 1e9, "gb_per_s": read_bandwidth(numbers) / 1e9}
