"""Comparison of two models by their logits on real text. T tokens, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grupo.errors import ExportError
from grupo.utils.quantized_layers import evaluation_mode

TEXT = """\
Problem: A baker fills 12 trays with 18 rolls each and sells 197 of them before noon. How many rolls are left?
<think>12 trays of 18 rolls are 12 * 18 = 216 rolls. After selling 197, 216 - 197 = 19 are left.</think>
<answer>19</answer>
def mean(values: list[float]) -> float:
    return sum(values) / len(values)
The old lighthouse keeper wrote: "It's raining again, and the sea, as grey as slate, won't let us go before spring."
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; 东京は晴れ, привет!
"""
"""English, arithmetic, tags, code, and characters that take several tokens."""

EXACT_TOLERANCE = 1e-3
"""Nats. Rounding errors between two ways to compute the same float32 logits are below this."""

BOUNDS = {"float32": 1e-6, "float16": 2e-4, "bfloat16": 1e-2, "f16": 2e-4, "q8_0": 3e-2}
"""Largest divergence from float32 weights, in nats per token, by the dtype that the weights are rounded to."""

LIVE_TOLERANCE = 0.1
"""The same, between a model in memory and its float32 copy; 8-bit products, which round their input, reach 0.02."""


@dataclass(frozen=True)
class Difference:
    """Difference of two sets of logits (T, V)."""

    largest: float
    """Largest difference of a log-prob, in nats, over all tokens of the vocabulary."""
    divergence: float
    """Kullback-Leibler divergence from the first to the second distribution, in nats, mean over T."""


def check_ids(tokenizer: Any, vocabulary_size: int) -> Tensor:
    """Token ids (1, T) of real text; evenly spaced ids without a tokenizer."""
    if tokenizer is not None:
        ids = tokenizer(TEXT, add_special_tokens=True)["input_ids"]
        ids = [token for token in ids if token < vocabulary_size]
        if len(ids) > 1:
            return torch.tensor([ids])
    count = min(256, vocabulary_size)
    return torch.arange(count)[None] * vocabulary_size // count


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits (T, V) in float32 on the CPU, without dropout; the model is left in the modes that it was in."""
    device = model.get_input_embeddings().weight.device
    with evaluation_mode(model):
        logits: Tensor = model(input_ids=ids.to(device), use_cache=False).logits[0].float().cpu()
    return logits


def difference(left: Tensor, right: Tensor) -> Difference:
    """Difference of two logit tensors (T, V); infinite if one has a NaN or another shape."""
    if left.shape != right.shape or not (left.isfinite().all() and right.isfinite().all()):
        return Difference(float("inf"), float("inf"))
    left, right = left.log_softmax(-1), right.log_softmax(-1)
    return Difference(float((left - right).abs().max()), float((left.exp() * (left - right)).sum(-1).mean()))


def check_same(left: Tensor, right: Tensor, what: str) -> Difference:
    """Raises an ExportError if a log-prob differs by more than EXACT_TOLERANCE."""
    found = difference(left, right)
    if not found.largest <= EXACT_TOLERANCE:
        raise ExportError(
            f"{what}: on {len(left)} tokens of text the log-probs differ by up to {found.largest:.3g} nats, and "
            f"{EXACT_TOLERANCE:g} is the limit. Nothing was written."
        )
    return found


def check_close(left: Tensor, right: Tensor, what: str, bound: float) -> Difference:
    """Raises an ExportError if the divergence is more than `bound` nats per token."""
    found = difference(left, right)
    if not found.divergence <= bound:
        raise ExportError(
            f"{what} is not the trained one: on {len(left)} tokens of text it diverges by {found.divergence:.3g} nats "
            f"per token, and {bound:g} is the limit. Nothing was written."
        )
    return found
