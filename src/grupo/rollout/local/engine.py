"""The in-process engine: cached decoding with the model that is being trained. R rows, V vocabulary."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grupo.errors import TrainingError
from grupo.models.memory import free_bytes
from grupo.models.quantization import dense_bytes
from grupo.rollout.engine import GenerationRequest
from grupo.rollout.local.decoders import (
    Decoder,
    ForwardSignature,
    PlainDecoder,
    PrefilledPrompt,
    RowDecoder,
    supports_row_cache,
)
from grupo.rollout.local.inference_copy import make_inference_copy, unfolded_layers
from grupo.rollout.local.token_sampling import sample_tokens
from grupo.sampling import SamplingSpec
from grupo.types import Completion, FinishReason
from grupo.utils.malloc import trim_host_memory
from grupo.utils.quantized_layers import evaluation_mode

logger = logging.getLogger("grupo")

MAX_ROWS = {"cpu": 64}
"""Most rows that are decoded together, by kind of device."""
MAX_ROWS_ELSEWHERE = 256
_NONFINITE_LOGITS = (
    "The model's logits are NaN or infinite, so no token can be sampled. Its weights are damaged, or it overflows in "
    "its dtype: load them again, and use bfloat16 or float32 instead of float16."
)
COPY_HEADROOM = 1.5
"""Free memory that a copy needs, as a multiple of the model's size: the cache needs memory too."""


@dataclass
class _Row:
    """A completion that is being sampled."""

    request: int
    place: int
    uniforms: list[float]
    token_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


@dataclass
class _PendingRequest:
    """A request with completions that are not started yet."""

    index: int
    request: GenerationRequest
    started: int = 0
    prompt: PrefilledPrompt | None = None


class LocalEngine:
    """Samples from the current weights of `model`: there is nothing to synchronise.

    Each prompt is prefilled once, and its cache is copied to the completions of the group. When a completion ends, the
    next one that waits takes its place. During a rollout adapters are folded into a copy of their layers, if memory
    allows. The model's own `generation_config` is not read, except for its stop tokens.

    Args:
        model: called as `model(input_ids=..., past_key_values=...)`; not wrapped for several ranks.
        decode: token ids to text without special tokens.
        stop_token_ids: every id that ends a completion.
        autocast: context of each forward, the same as for computing log-probs.
        max_rows: completions that are decoded together; None: 64 on the CPU, 256 elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: Callable[[list[int]], str],
        stop_token_ids: Sequence[int],
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        max_rows: int | None = None,
    ) -> None:
        self.model = model
        self.decode = decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.autocast = autocast
        self.device = next(model.parameters()).device
        self.max_rows = max_rows or max_rows_for(self.device.type)
        self._signature = ForwardSignature(model)
        if unfolded := unfolded_layers(model):
            logger.info(
                "The adapters of %d layers are not plain LoRA and cannot be folded into them: decoding is slower.",
                unfolded,
            )
        self._supports_row_cache: bool | None = None
        self.copies: bool | None = None
        """Whether a copy decodes; None: decided by the free memory at the first rollout."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[list[Completion]]:
        finished: dict[tuple[int, int], Completion] = {}
        if any(request.seeds for request in requests):
            # Without dropout, and without gradient checkpointing, which would drop the cache.
            with torch.no_grad(), evaluation_mode(self.model), self.autocast():
                model = self._decoding_model()
                decoder = self._decoder(model, requests)
                # Faster still, but tensors created in it can never be used in training: only for the copy.
                inference = contextlib.nullcontext() if model is self.model else torch.inference_mode()
                with decoder.attention(), inference:
                    for row, stopped in self._rows(decoder, requests, sampling):
                        finished[row.request, row.place] = self._completion(row, stopped)
                del decoder, model
            trim_host_memory(self.device.type)
        return [
            [finished[index, place] for place in range(len(request.seeds))] for index, request in enumerate(requests)
        ]

    def _decoding_model(self) -> nn.Module:
        if self.copies is None:
            # Decided once: folded adapters round differently, and a run must not change half-way.
            self.copies = copy_fits(self.model, free_bytes(self.device))
        copied = make_inference_copy(self.model) if self.copies else None
        return self.model if copied is None else copied

    def _decoder(self, model: nn.Module, requests: Sequence[GenerationRequest]) -> Decoder:
        if self._supports_row_cache is None:
            self._supports_row_cache = supports_row_cache(model, self._signature, like=self.model)
        if not self._supports_row_cache:
            return PlainDecoder(self.model, signature=self._signature)
        slots = min(self.max_rows, sum(len(request.seeds) for request in requests))
        return RowDecoder(model, signature=self._signature, slots=slots)

    def _rows(
        self, decoder: Decoder, requests: Sequence[GenerationRequest], sampling: SamplingSpec
    ) -> Iterator[tuple[_Row, bool]]:
        """Yields each finished row, and whether a stop token ended it."""
        stop_ids = {*self.stop_token_ids, *sampling.stop_token_ids}
        waiting = deque(_PendingRequest(index, request) for index, request in enumerate(requests) if request.seeds)
        rows: list[_Row] = []
        logits: Tensor | None = None
        seen: Tensor | None = None
        while rows or waiting:
            if waiting and len(rows) < self.max_rows and (decoder.can_refill or not rows):
                new_rows, new_logits, new_seen = self._enter(decoder, waiting, len(rows), sampling)
                logits = new_logits if logits is None else torch.cat([logits, new_logits])
                seen = new_seen if seen is None or new_seen is None else torch.cat([seen, new_seen])
                rows.extend(new_rows)
            assert logits is not None
            uniforms = [row.uniforms[len(row.token_ids)] for row in rows]
            draw = sample_tokens(
                logits, sampling, torch.tensor(uniforms, dtype=torch.float64, device=logits.device), seen
            )
            # One transfer per step; token ids are exact in float64.
            ids, *numbers = torch.stack([column.double() for column in draw]).tolist()
            if any(map(math.isnan, numbers[0])):
                raise TrainingError(_NONFINITE_LOGITS)
            remaining = []
            for place, (row, token, behavior, sampled, entropy) in enumerate(zip(rows, ids, *numbers, strict=True)):
                row.token_ids.append(int(token))
                row.behavior_logprobs.append(behavior)
                row.sampled_logprobs.append(sampled)
                row.entropies.append(entropy)
                stopped = int(token) in stop_ids
                if stopped or len(row.token_ids) == sampling.max_new_tokens:
                    yield row, stopped
                else:
                    remaining.append(place)
            next_ids = draw.token_ids
            if len(remaining) < len(rows):
                # Finished rows are dropped at once: nothing is computed for them.
                order = _compact_order(remaining)
                decoder.reorder_rows(order)
                rows = [rows[place] for place in order]
                index = torch.tensor(order, dtype=torch.long, device=next_ids.device)
                next_ids = next_ids.index_select(0, index)
                seen = None if seen is None else seen.index_select(0, index)
            if not rows:
                logits = seen = None
                continue
            if seen is not None:
                seen.scatter_(1, next_ids.unsqueeze(-1), True)
            logits = decoder.step(next_ids)

    def _enter(
        self, decoder: Decoder, waiting: deque[_PendingRequest], active: int, sampling: SamplingSpec
    ) -> tuple[list[_Row], Tensor, Tensor | None]:
        """New rows for the free slots, in the order of the requests; their (R, V) logits and prompt tokens."""
        free = self.max_rows - active
        coming: list[tuple[_PendingRequest, int]] = []
        for item in waiting:
            count = min(free, len(item.request.seeds) - item.started)
            if count:
                coming.append((item, count))
            free -= count
            if not free:
                break
        fresh = [item for item, _ in coming if item.prompt is None]
        if fresh:
            entries = decoder.prefill([item.request.prompt.token_ids for item in fresh])
            for item, entry in zip(fresh, entries, strict=True):
                item.prompt = entry
        rows: list[_Row] = []
        logits, seen = [], []
        for item, count in coming:
            assert item.prompt is not None
            decoder.add_rows(item.prompt, count)
            seeds = item.request.seeds[item.started : item.started + count]
            places = range(item.started, item.started + count)
            rows.extend(
                _Row(item.index, place, _uniforms(seed, sampling)) for place, seed in zip(places, seeds, strict=True)
            )
            logits.append(item.prompt.logits.expand(count, -1))
            if sampling.repetition_penalty != 1.0:
                of_prompt = torch.zeros(1, logits[-1].shape[-1], dtype=torch.bool, device=logits[-1].device)
                of_prompt[0, list(item.request.prompt.token_ids)] = True
                seen.append(of_prompt.expand(count, -1))
            item.started += count
            if not decoder.can_refill:
                item.prompt = None
        while waiting and waiting[0].started == len(waiting[0].request.seeds):
            waiting.popleft()
        return rows, torch.cat(logits), torch.cat(seen) if seen else None

    def _completion(self, row: _Row, stopped: bool) -> Completion:
        return Completion(
            token_ids=tuple(row.token_ids),
            text=self.decode(row.token_ids[:-1] if stopped else row.token_ids),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            behavior_logprobs=tuple(row.behavior_logprobs),
            sampled_logprobs=tuple(row.sampled_logprobs),
            entropies=tuple(row.entropies),
        )


def copy_fits(model: nn.Module, free: int | None) -> bool:
    """Whether `free` bytes are enough for a copy that decodes; None: they are not known, and taken as enough."""
    return free is None or free > COPY_HEADROOM * dense_bytes(model)


def max_rows_for(device_type: str) -> int:
    """Most completions that are decoded together on this kind of device, unless `max_rows` is set."""
    return MAX_ROWS.get(device_type, MAX_ROWS_ELSEWHERE)


def _compact_order(remaining: Sequence[int]) -> list[int]:
    """The remaining rows: those at the end fill the free indices, and the others keep theirs."""
    count = len(remaining)
    staying = {row for row in remaining if row < count}
    moving = iter(row for row in remaining if row >= count)
    return [place if place in staying else next(moving) for place in range(count)]


def _uniforms(seed: int, sampling: SamplingSpec) -> list[float]:
    """(max_new_tokens,) random numbers of one completion, from its own seed."""
    if sampling.temperature == 0:
        return [0.0] * sampling.max_new_tokens
    generator = torch.Generator().manual_seed(seed)
    numbers: list[float] = torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator).tolist()
    return numbers
