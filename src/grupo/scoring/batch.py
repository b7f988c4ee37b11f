"""From samples to micro-batches: the only place that pads and builds masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grupo.records import MicroBatch, Sample


def micro_batches(samples: Sequence[Sample], rows_per_batch: int) -> Iterator[list[Sample]]:
    """Rows of similar length together, so that little is padded. Losses do not depend on the order or on the cuts."""
    ordered = sorted(samples, key=lambda sample: len(sample.prompt_ids) + len(sample.completion_ids), reverse=True)
    for start in range(0, len(ordered), rows_per_batch):
        yield ordered[start : start + rows_per_batch]


def collate(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    pad_to_multiple_of: int | None = None,
) -> MicroBatch:
    """Pads rows on the right, prompt and completion without a gap.

    Args:
        dtype: of all numbers but token ids.
        pad_to_multiple_of: rounds S up, for devices that compile once per shape.
    """
    completions = [sample.completion_ids for sample in samples]
    rows = [(*sample.prompt_ids, *sample.completion_ids) for sample in samples]
    completion_lengths = torch.tensor([len(ids) for ids in completions])
    completion_mask = _length_mask(completion_lengths)
    has_loss = torch.tensor([sample.has_loss for sample in samples])
    batch = MicroBatch(
        input_ids=_pad_right(rows, pad_token_id, torch.long, pad_to_multiple_of or 1),
        lengths=torch.tensor([len(row) for row in rows]),
        prompt_lengths=torch.tensor([len(sample.prompt_ids) for sample in samples]),
        completion_ids=_pad_right(completions, pad_token_id, torch.long),
        completion_mask=completion_mask,
        loss_mask=completion_mask & has_loss[:, None],
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=dtype),
        live_groups=torch.tensor([sample.group_is_live for sample in samples]),
        behavior_logprobs=_pad_optional([sample.behavior_logprobs for sample in samples], dtype),
        old_logprobs=_pad_optional([sample.old_logprobs for sample in samples], dtype),
        reference_logprobs=_pad_optional([sample.reference_logprobs for sample in samples], dtype),
    )
    return to_device(batch, device)


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch on another device; every field, by iterating over them."""
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved: dict[str, Any] = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    return MicroBatch(**moved)


def _length_mask(lengths: Tensor) -> Tensor:
    """(B, T) bool, True on the first `lengths` positions of each row."""
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _pad_right(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype, multiple: int = 1) -> Tensor:
    longest = max(len(row) for row in rows)
    width = -(-longest // multiple) * multiple
    padded = torch.full((len(rows), width), value, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def _pad_optional(rows: Sequence[Sequence[float] | None], dtype: torch.dtype) -> Tensor | None:
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        return None
    return _pad_right(present, 0.0, dtype)
