"""Two ways through a model for the rows of a rollout: over our own cache where the model takes it, or over the model's.

Both continue rows by one token a step, and forget rows that are finished. R rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from grupo.models.inspect import base_model, vocabulary_size
from grupo.models.memory import LayerWidths
from grupo.models.quantization import arithmetic_dtype
from grupo.models.shared_prompt_attention import (
    LAYOUT_KEYWORD,
    DecodeLayout,
    missing_window_reason,
    packed_attention,
    packing_unsupported_reason,
)
from grupo.rollout.local.kv_cache import AlignedKVCache, cache_bytes
from grupo.types import GroupSpan, PackedLayout

CHECK_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest difference of log-probs at the check of the first rollout, nats; 0.1 in other dtypes."""
PREFILL_TOKENS = 4096
"""Prompt tokens of one forward, where one prompt alone has no more."""


@dataclass(frozen=True)
class PrefilledPrompt:
    """A prompt that was computed, and the completions of it that are still to enter."""

    token_ids: tuple[int, ...]
    cache: Any
    logits: Tensor
    """(V,) after the prompt's last token."""


def prefill_bytes(prompts: int, prompt: int, widths: LayerWidths, *, itemsize: int, cache_itemsize: int) -> int:
    """Memory of `prompts` prompts of `prompt` tokens on their way into the cache: their keys and values, and what one
    forward computes."""
    computed = min(prompts * prompt, max(PREFILL_TOKENS, prompt))
    return cache_bytes(prompts * prompt, widths, itemsize=cache_itemsize) + computed * widths.in_layer(4) * itemsize


class Decoder(Protocol):
    can_refill: bool
    """Whether rows may enter while others are being decoded."""

    def attention(self) -> AbstractContextManager[None]:
        """Kept open around everything else."""
        ...

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> list[PrefilledPrompt]: ...

    def enter(self, entry: PrefilledPrompt, count: int) -> None:
        """`count` rows of this prompt go behind the rows that are there."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """The rows that go on, and their new order."""
        ...

    def step(self, token_ids: Tensor) -> Tensor:
        """(R, V) logits behind one more token of every row."""
        ...


class ForwardSignature:
    """How a model wants to be called."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(type(base_model(model)).forward).parameters
        self.accepts_position_ids = "position_ids" in parameters
        # transformers 5.24 renamed the keyword and the field of the output.
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"


class RowDecoder:
    """Over `AlignedKVCache`: prompts in packed rows without padding, and rows that come and go at any step.

    Used inside of `attention()` only.
    """

    can_refill = True

    def __init__(self, model: nn.Module, *, signature: ForwardSignature, slots: int) -> None:
        self.model = model
        self.signature = signature
        self.slots = slots
        self.device = next(base_model(model).parameters()).device
        self.cache: AlignedKVCache | None = None
        self.positions: list[int] = []
        self.windows: set[int | None] = set()
        """Sliding windows that the layers asked for."""

    def attention(self) -> AbstractContextManager[None]:
        return packed_attention(base_model(self.model))

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> list[PrefilledPrompt]:
        entries: list[PrefilledPrompt] = []
        batch: list[tuple[int, ...]] = []
        for prompt in prompts:
            if batch and sum(map(len, batch)) + len(prompt) > PREFILL_TOKENS:
                entries.extend(self._prefill(batch))
                batch = []
            batch.append(prompt)
        return entries + self._prefill(batch)

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> list[PrefilledPrompt]:
        ids = [token for prompt in prompts for token in prompt]
        positions = [position for prompt in prompts for position in range(len(prompt))]
        spans: list[GroupSpan] = []
        for prompt in prompts:
            spans.append(GroupSpan(spans[-1].stop if spans else 0, len(prompt), ()))
        last = torch.tensor([span.stop - 1 for span in spans], device=self.device)
        layout = PackedLayout(tuple(spans), self.windows)
        output = self._forward([ids], [positions], layout, DynamicCache(), logits_to_keep=last)
        layers = [(layer.keys, layer.values) for layer in output[self.signature.cache_name].layers]
        return [
            PrefilledPrompt(
                prompt,
                [(key[:, :, span.start : span.stop], value[:, :, span.start : span.stop]) for key, value in layers],
                output.logits[0, index],
            )
            for index, (prompt, span) in enumerate(zip(prompts, spans, strict=True))
        ]

    def enter(self, entry: PrefilledPrompt, count: int) -> None:
        if self.cache is None:
            self.cache = AlignedKVCache(entry.cache, self.slots)
        self.cache.enter(entry.cache, count)
        self.positions.extend([len(entry.token_ids)] * count)

    def keep(self, order: Sequence[int]) -> None:
        assert self.cache is not None
        self.cache.keep(order)
        self.positions = [self.positions[row] for row in order]

    def step(self, token_ids: Tensor) -> Tensor:
        cache = self.cache
        assert cache is not None
        cache.advance()
        oldest = cache.oldest
        first = tuple(column - oldest for column in cache.first)
        layout = DecodeLayout(first, cache.column - oldest, self.device)
        output = self._forward(token_ids[:, None], [[position] for position in self.positions], layout, cache)
        self.positions = [position + 1 for position in self.positions]
        logits: Tensor = output.logits[:, -1]
        return logits

    def _forward(self, ids: Any, positions: Any, layout: Any, cache: Any, logits_to_keep: Any = 1) -> Any:
        return self.model(
            input_ids=torch.as_tensor(ids, device=self.device),
            position_ids=torch.tensor(positions, device=self.device),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self.signature.cache_name: cache, LAYOUT_KEYWORD: layout},
        )


class PlainDecoder:
    """Over the model's own kind of cache, prompts padded on the left: for any causal model that has a cache."""

    can_refill = False

    def __init__(self, model: nn.Module, *, signature: ForwardSignature) -> None:
        self.model = model
        self.signature = signature
        self.device = next(base_model(model).parameters()).device
        self.cache: Any = None
        self.mask = torch.zeros(0, 0, dtype=torch.long)
        self._waiting: list[int] = []
        """Row of the prefill of each row that has entered, until the first step."""

    def attention(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> list[PrefilledPrompt]:
        ids, self.mask = pad_left(prompts, self.device)
        self.cache, self._waiting = None, []
        logits = self._forward(ids, (self.mask.cumsum(-1) - 1).clamp_min(0))
        return [PrefilledPrompt(prompt, index, logits[index]) for index, prompt in enumerate(prompts)]

    def enter(self, entry: PrefilledPrompt, count: int) -> None:
        self._waiting.extend([entry.cache] * count)

    def keep(self, order: Sequence[int]) -> None:
        if self._waiting:
            self._waiting = [self._waiting[row] for row in order]
        else:
            self._reorder(order)

    def step(self, token_ids: Tensor) -> Tensor:
        if self._waiting:
            self._reorder(self._waiting)
            self._waiting = []
        self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], 1)], dim=1)
        return self._forward(token_ids[:, None], self.mask.sum(-1, keepdim=True) - 1)

    def _reorder(self, order: Sequence[int]) -> None:
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.cache.reorder_cache(index)
        self.mask = self.mask.index_select(0, index)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        extra = {"position_ids": positions} if self.signature.accepts_position_ids else {}
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            use_cache=True,
            logits_to_keep=1,
            **extra,
            **{self.signature.cache_name: self.cache},
        )
        self.cache = output[self.signature.cache_name]
        logits: Tensor = output.logits[:, -1]
        return logits


def supports_row_cache(model: nn.Module, signature: ForwardSignature, *, like: nn.Module) -> bool:
    """Whether decoding `model` over `AlignedKVCache` gives the log-probs of a forward of `like` without any cache.

    Two prompts of different lengths are continued, one of them by two rows, of which one leaves.
    """
    base = base_model(model)
    size = vocabulary_size(base)
    if size is None or not signature.accepts_position_ids or packing_unsupported_reason(base) is not None:
        return False
    prompts = [tuple((5 * place + 2) % size for place in range(length)) for length in (7, 4)]
    steps = [[(11 * place + row) % size for place in range(4)] for row in range(3)]
    decoder = RowDecoder(model, signature=signature, slots=3)
    try:
        with decoder.attention():
            long, short = decoder.prefill(prompts)
            decoder.enter(long, 1)
            found = [decoder.step(torch.tensor([steps[0][0]], device=decoder.device))[0]]
            decoder.enter(short, 2)
            for index in range(2):
                tokens = [steps[0][1 + index], steps[1][index], steps[2][index]]
                decoder.step(torch.tensor(tokens, device=decoder.device))
            decoder.keep([0, 2])
            logits = decoder.step(torch.tensor([steps[0][3], steps[2][2]], device=decoder.device))
        found += [logits[0], logits[1]]
        expected = [
            like(input_ids=torch.tensor([[*prompt, *ids]], device=decoder.device), use_cache=False).logits[0, -1]
            for prompt, ids in ((prompts[0], steps[0][:1]), (prompts[0], steps[0]), (prompts[1], steps[2][:3]))
        ]
    # What a model's own code does with a cache and a keyword that it does not know.
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, NotImplementedError):
        return False
    if missing_window_reason(base, PackedLayout((), decoder.windows)) is not None:
        return False
    pairs = (torch.log_softmax(torch.stack(values).float(), -1) for values in (found, expected))
    difference = float((next(pairs) - next(pairs)).abs().max())
    return difference <= CHECK_TOLERANCE.get(arithmetic_dtype(base, decoder.device), 0.1)


def pad_left(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(R, P) ids with 0 on the left, and the mask that hides it. The padding id is never attended to or read."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :] = torch.tensor(sequence, dtype=torch.long)
        mask[row, longest - len(sequence) :] = 1
    return ids.to(device), mask.to(device)
