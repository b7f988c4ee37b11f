"""The in-process engine: cached decoding with the model that is being trained. R rows, V vocabulary."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grupo.models.load import base_model
from grupo.records import Completion, FinishReason
from grupo.rollout.engine import GenerationRequest
from grupo.rollout.sampling import Draw, draw_tokens
from grupo.sampling import SamplingSpec


@dataclass
class _Row:
    """A completion in the making."""

    request: int
    place: int
    token_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


class LocalEngine:
    """Samples from `model` as it is now: nothing to synchronise, nothing to copy.

    Each prompt is prefilled once and its cache is fanned out to the completions of the group. The model's own
    `generation_config` is not read, except for its stop tokens.

    Args:
        model: called as `model(input_ids=..., past_key_values=...)`; not wrapped for several ranks.
        decode: token ids to text without special tokens.
        stop_token_ids: every id that ends a completion.
    """

    def __init__(self, model: nn.Module, *, decode: Callable[[list[int]], str], stop_token_ids: Sequence[int]) -> None:
        self.model = model
        self.decode = decode
        self.stop_token_ids = tuple(stop_token_ids)
        parameters = inspect.signature(type(base_model(model)).forward).parameters
        self._takes_positions = "position_ids" in parameters
        # transformers 5.24 renamed the keyword and the field of the output.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[list[Completion]]:
        finished: dict[tuple[int, int], Completion] = {}
        if any(request.seeds for request in requests):
            with torch.no_grad(), _evaluation_mode(self.model):
                for row, stopped in self._decode(requests, sampling):
                    finished[row.request, row.place] = self._completion(row, stopped)
        return [
            [finished[index, place] for place in range(len(request.seeds))] for index, request in enumerate(requests)
        ]

    def _decode(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[tuple[_Row, bool]]:
        """Yields each row when it is finished, with whether a stop token ended it."""
        device = next(self.model.parameters()).device
        rows = [_Row(index, place) for index, request in enumerate(requests) for place in range(len(request.seeds))]
        counts = torch.tensor([len(request.seeds) for request in requests], device=device)
        fan_out = torch.arange(len(requests), device=device).repeat_interleave(counts)
        stop_ids = torch.tensor(
            sorted({*self.stop_token_ids, *sampling.stop_token_ids}), dtype=torch.long, device=device
        )

        prompt_ids, mask = _pad_left([request.prompt.token_ids for request in requests], device)
        seen = None
        logits, cache = self._forward(prompt_ids, mask, positions=(mask.cumsum(-1) - 1).clamp_min(0), cache=None)
        if sampling.repetition_penalty != 1.0:
            seen = torch.zeros(len(requests), logits.shape[-1], dtype=torch.bool, device=device)
            seen.scatter_(1, prompt_ids, mask.bool())
            seen = seen.index_select(0, fan_out)
        cache.reorder_cache(fan_out)
        logits, mask = logits.index_select(0, fan_out), mask.index_select(0, fan_out)
        seeds = [seed for request in requests for seed in request.seeds]
        uniforms = _uniforms(seeds, sampling).to(device)

        for step in range(sampling.max_new_tokens):
            draw = draw_tokens(logits, sampling, uniforms[:, step], seen)
            _append(rows, draw)
            stopped = torch.isin(draw.token_ids, stop_ids)
            last = step + 1 == sampling.max_new_tokens
            if last or bool(stopped.any()):
                stopped_rows = stopped.tolist()
                for row, row_stopped in zip(rows, stopped_rows, strict=True):
                    if row_stopped or last:
                        yield row, row_stopped
                if last or all(stopped_rows):
                    return
                # Rows that stopped leave at once: nothing is computed for a finished completion.
                going = (~stopped).nonzero().squeeze(-1)
                rows = [rows[index] for index in going.tolist()]
                cache.reorder_cache(going)
                mask, uniforms = mask.index_select(0, going), uniforms.index_select(0, going)
                seen = None if seen is None else seen.index_select(0, going)
                next_ids = draw.token_ids.index_select(0, going)
            else:
                next_ids = draw.token_ids
            if seen is not None:
                seen.scatter_(1, next_ids.unsqueeze(-1), True)
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
            logits, cache = self._forward(
                next_ids.unsqueeze(-1), mask, positions=mask.sum(-1, keepdim=True) - 1, cache=cache
            )

    def _forward(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """(R, V) logits after the last token, and the cache."""
        extra = {self._cache_name: cache, **({"position_ids": positions} if self._takes_positions else {})}
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **extra,
        )
        return output.logits[:, -1], output[self._cache_name]

    def _completion(self, row: _Row, stopped: bool) -> Completion:
        return Completion(
            token_ids=tuple(row.token_ids),
            text=self.decode(row.token_ids),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            behavior_logprobs=tuple(row.behavior_logprobs),
            sampled_logprobs=tuple(row.sampled_logprobs),
            entropies=tuple(row.entropies),
        )


def _append(rows: Sequence[_Row], draw: Draw) -> None:
    values = (column.tolist() for column in draw)
    for row, token_id, behavior, sampled, entropy in zip(rows, *values, strict=True):
        row.token_ids.append(token_id)
        row.behavior_logprobs.append(behavior)
        row.sampled_logprobs.append(sampled)
        row.entropies.append(entropy)


def _pad_left(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(R, P) ids with 0 on the left, and the mask that hides it. The padding id is never attended to or read."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :] = torch.tensor(sequence, dtype=torch.long)
        mask[row, longest - len(sequence) :] = 1
    return ids.to(device), mask.to(device)


def _uniforms(seeds: Sequence[int], sampling: SamplingSpec) -> Tensor:
    """(R, max_new_tokens) float64, each row from its own seed."""
    if sampling.temperature == 0:
        return torch.zeros(len(seeds), sampling.max_new_tokens, dtype=torch.float64)
    rows = [
        torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(rows)


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`eval()` for the rollout: dropout off, and gradient checkpointing, which would drop the cache, off too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
