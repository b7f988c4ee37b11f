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
"""Rows that are decoded together, by kind of device."""
MAX_ROWS_ELSEWHERE = 256
_NO_NUMBERS = (
    "The model's logits are NaN or infinite, so no token can be drawn. Its weights are damaged, or it overflows in its "
    "dtype: load them again, and use bfloat16 or float32 instead of float16."
)
COPY_HEADROOM = 1.5
"""The model's size times this must be free for a copy of it: the cache comes on top."""


@dataclass
class _Row:
    """A completion in the making."""

    request: int
    place: int
    uniforms: list[float]
    token_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


@dataclass
class _PendingRequest:
    """A request of which some completions have not begun."""

    index: int
    request: GenerationRequest
    begun: int = 0
    entry: PrefilledPrompt | None = None


class LocalEngine:
    """Samples from `model` as it is now: nothing to synchronise.

    Each prompt is prefilled once and its cache is fanned out to the completions of the group. A completion that ends
    leaves its place to the next one that waits. Adapters are folded into a copy of their layers for the time of a
    rollout, where memory allows. The model's own `generation_config` is not read, except for its stop tokens.

    Args:
        model: called as `model(input_ids=..., past_key_values=...)`; not wrapped for several ranks.
        decode: token ids to text without special tokens.
        stop_token_ids: every id that ends a completion.
        autocast: context of every forward, that of scoring.
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
                "The adapters of %d layers decode unfolded, which takes longer: they are not plain LoRA.", unfolded
            )
        self._supports_row_cache: bool | None = None
        self.copies: bool | None = None
        """Whether a copy decodes; None: decided at the first rollout, by the free memory."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[list[Completion]]:
        finished: dict[tuple[int, int], Completion] = {}
        if any(request.seeds for request in requests):
            # Without dropout, and without gradient checkpointing, which would drop the cache.
            with torch.no_grad(), evaluation_mode(self.model), self.autocast():
                model = self._decoding_model()
                decoder = self._decoder(model, requests)
                # Faster still, but tensors that are made in it can never take part in training: only for the copy.
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
            # Once: with folded adapters numbers are rounded differently, and a run is to stay the same all along.
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
        """Yields each row when it is finished, with whether a stop token ended it."""
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
            # One transfer a step; token ids are exact in float64.
            ids, *numbers = torch.stack([column.double() for column in draw]).tolist()
            if any(map(math.isnan, numbers[0])):
                raise TrainingError(_NO_NUMBERS)
            going = []
            for place, (row, token, behavior, sampled, entropy) in enumerate(zip(rows, ids, *numbers, strict=True)):
                row.token_ids.append(int(token))
                row.behavior_logprobs.append(behavior)
                row.sampled_logprobs.append(sampled)
                row.entropies.append(entropy)
                stopped = int(token) in stop_ids
                if stopped or len(row.token_ids) == sampling.max_new_tokens:
                    yield row, stopped
                else:
                    going.append(place)
            next_ids = draw.token_ids
            if len(going) < len(rows):
                # Rows that stopped leave at once: nothing is computed for a finished completion.
                order = _compact_order(going)
                decoder.keep(order)
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
        self, decoder: Decoder, waiting: deque[_PendingRequest], running: int, sampling: SamplingSpec
    ) -> tuple[list[_Row], Tensor, Tensor | None]:
        """Rows for the free places, in order of the requests; their (R, V) logits, and the tokens of their prompts."""
        free = self.max_rows - running
        coming: list[tuple[_PendingRequest, int]] = []
        for item in waiting:
            count = min(free, len(item.request.seeds) - item.begun)
            if count:
                coming.append((item, count))
            free -= count
            if not free:
                break
        fresh = [item for item, _ in coming if item.entry is None]
        if fresh:
            entries = decoder.prefill([item.request.prompt.token_ids for item in fresh])
            for item, entry in zip(fresh, entries, strict=True):
                item.entry = entry
        rows: list[_Row] = []
        logits, seen = [], []
        for item, count in coming:
            assert item.entry is not None
            decoder.enter(item.entry, count)
            seeds = item.request.seeds[item.begun : item.begun + count]
            places = range(item.begun, item.begun + count)
            rows.extend(
                _Row(item.index, place, _uniforms(seed, sampling)) for place, seed in zip(places, seeds, strict=True)
            )
            logits.append(item.entry.logits.expand(count, -1))
            if sampling.repetition_penalty != 1.0:
                of_prompt = torch.zeros(1, logits[-1].shape[-1], dtype=torch.bool, device=logits[-1].device)
                of_prompt[0, list(item.request.prompt.token_ids)] = True
                seen.append(of_prompt.expand(count, -1))
            item.begun += count
            if not decoder.can_refill:
                item.entry = None
        while waiting and waiting[0].begun == len(waiting[0].request.seeds):
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
    """Completions that are decoded together on a device of this kind, unless an engine is told otherwise."""
    return MAX_ROWS.get(device_type, MAX_ROWS_ELSEWHERE)


def _compact_order(going: Sequence[int]) -> list[int]:
    """The rows that go on, those at the end moved into the places that became free; the others stay where they are."""
    count = len(going)
    staying = {row for row in going if row < count}
    moving = iter(row for row in going if row >= count)
    return [place if place in staying else next(moving) for place in range(count)]


def _uniforms(seed: int, sampling: SamplingSpec) -> list[float]:
    """(max_new_tokens,) of one completion, from its own seed."""
    if sampling.temperature == 0:
        return [0.0] * sampling.max_new_tokens
    generator = torch.Generator().manual_seed(seed)
    numbers: list[float] = torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator).tolist()
    return numbers
