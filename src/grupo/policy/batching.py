"""From samples to micro-batches: the only place that pads, packs and builds masks."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grupo.types import GroupSpan, MicroBatch, PackedLayout, TrainingSample


def micro_batches(
    samples: Sequence[TrainingSample],
    micro_batch_size: int,
    *,
    max_sequence_tokens: int | None = None,
    token_budget: int | None = None,
    packed: bool = False,
) -> Iterator[list[TrainingSample]]:
    """Cuts samples into micro-batches. Losses do not depend on the order or on the cuts.

    Args:
        micro_batch_size: most completions of a micro-batch.
        max_sequence_tokens: most tokens of a prompt with one completion. Packed micro-batches may then hold the tokens
            of `micro_batch_size` such sequences, however many completions these are.
        token_budget: most tokens of a micro-batch, padding included; a single completion above it stands alone.
            None: no limit.
        packed: completions of one prompt stand together and count its tokens once. Otherwise rows of similar length
            stand together, so that little is padded.
    """
    if packed:
        if max_sequence_tokens is not None:
            room = micro_batch_size * max_sequence_tokens
            micro_batch_size, token_budget = len(samples), room if token_budget is None else min(room, token_budget)
        yield from _packed_batches(samples, micro_batch_size, token_budget)
        return
    ordered = sorted(samples, key=_row_length, reverse=True)
    start = 0
    while start < len(ordered):
        # The first row is the longest, and all are padded to it.
        fitting = micro_batch_size if token_budget is None else max(1, token_budget // _row_length(ordered[start]))
        stop = start + min(micro_batch_size, fitting)
        yield ordered[start:stop]
        start = stop


def _packed_batches(
    samples: Sequence[TrainingSample], rows: int, token_budget: int | None
) -> Iterator[list[TrainingSample]]:
    budget = token_budget or sum(map(_row_length, samples))
    pieces = [
        piece
        for members in _by_prompt(samples)
        for piece in _split_group(sorted(members, key=_completion_length, reverse=True), rows, budget)
    ]
    batch: list[TrainingSample] = []
    used = 0
    for piece in sorted(pieces, key=lambda piece: _completion_length(piece[0]), reverse=True):
        tokens = len(piece[0].prompt_ids) + sum(map(_completion_length, piece))
        if batch and (len(batch) + len(piece) > rows or used + tokens > budget):
            yield [sample for members in _by_prompt(batch) for sample in members]
            batch, used = [], 0
        batch, used = [*batch, *piece], used + tokens
    if batch:
        yield [sample for members in _by_prompt(batch) for sample in members]


def _split_group(group: Sequence[TrainingSample], rows: int, budget: int) -> list[list[TrainingSample]]:
    """Completions of one prompt, longest first, in as few pieces as fit; about as many tokens in each.

    A piece more is a prompt computed once more.
    """
    room = min(max(budget - len(group[0].prompt_ids), 1), sum(map(_completion_length, group)))
    fewest = len(_pack(group, rows, room))
    # The smallest room that takes no more pieces makes them even.
    smallest = bisect.bisect_left(range(room), True, key=lambda tokens: len(_pack(group, rows, tokens)) <= fewest)
    return _pack(group, rows, smallest)


def _pack(group: Sequence[TrainingSample], rows: int, room: int) -> list[list[TrainingSample]]:
    """Piece after piece of at most `rows` completions and `room` tokens; a longer completion stands alone."""
    pieces: list[list[TrainingSample]] = []
    used = 0
    for sample in group:
        length = _completion_length(sample)
        if not pieces or len(pieces[-1]) == rows or used + length > room:
            pieces.append([])
            used = 0
        pieces[-1].append(sample)
        used += length
    return pieces


def _by_prompt(samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """Samples whose prompts have the same tokens, which is all that sharing takes."""
    groups: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_ids, []).append(sample)
    return list(groups.values())


def _row_length(sample: TrainingSample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)


def _completion_length(sample: TrainingSample) -> int:
    return len(sample.completion_ids)


def collate(
    samples: Sequence[TrainingSample],
    *,
    pad_token_id: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    pad_to_multiple_of: int | None = None,
    packed: bool = False,
) -> MicroBatch:
    """One micro-batch of padded rows, or one packed row in which neighbours with the same prompt share it.

    Args:
        dtype: of all numbers but token ids.
        pad_to_multiple_of: rounds S up, for devices that compile once per shape.
    """
    multiple = pad_to_multiple_of or 1
    completions = [sample.completion_ids for sample in samples]
    completion_lengths = torch.tensor([len(ids) for ids in completions])
    prompt_lengths = torch.tensor([len(sample.prompt_ids) for sample in samples])
    completion_mask = _length_mask(completion_lengths)
    has_loss = torch.tensor([sample.has_loss for sample in samples])
    tokens: dict[str, Any] = (
        _packed_row(samples, pad_token_id, multiple) if packed else _padded_rows(samples, pad_token_id, multiple)
    )
    batch = MicroBatch(
        **tokens,
        lengths=prompt_lengths + completion_lengths,
        prompt_lengths=prompt_lengths,
        completion_ids=_pad_right(completions, pad_token_id, torch.long),
        completion_mask=completion_mask,
        loss_mask=completion_mask & has_loss[:, None],
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=dtype),
        has_signal=torch.tensor([sample.group_has_signal for sample in samples]),
        behavior_logprobs=_pad_optional([sample.behavior_logprobs for sample in samples], dtype),
        old_logprobs=_pad_optional([sample.old_logprobs for sample in samples], dtype),
        reference_logprobs=_pad_optional([sample.reference_logprobs for sample in samples], dtype),
    )
    return to_device(batch, device)


def _padded_rows(samples: Sequence[TrainingSample], pad_token_id: int, multiple: int) -> dict[str, Any]:
    rows = [(*sample.prompt_ids, *sample.completion_ids) for sample in samples]
    input_ids = _pad_right(rows, pad_token_id, torch.long, multiple)
    logit_indices = [
        index * input_ids.shape[1] + len(sample.prompt_ids) - 1 + step
        for index, sample in enumerate(samples)
        for step in range(len(sample.completion_ids))
    ]
    return {
        "input_ids": input_ids,
        "position_ids": None,
        "layout": None,
        "logit_indices": torch.tensor(logit_indices),
        "num_tokens": sum(map(len, rows)),
    }


def _packed_row(samples: Sequence[TrainingSample], pad_token_id: int, multiple: int) -> dict[str, Any]:
    ids: list[int] = []
    positions: list[int] = []
    logit_indices: list[int] = []
    groups: list[GroupSpan] = []
    for prompt, run in itertools.groupby(samples, key=lambda sample: sample.prompt_ids):
        members = list(run)
        start = len(ids)
        ids.extend(prompt)
        positions.extend(range(len(prompt)))
        last_of_prompt = len(ids) - 1
        for sample in members:
            first = len(ids)
            ids.extend(sample.completion_ids)
            positions.extend(range(len(prompt), len(prompt) + len(sample.completion_ids)))
            # The first token is predicted by the prompt's last one, which all completions share.
            logit_indices.extend([last_of_prompt, *range(first, len(ids) - 1)])
        groups.append(GroupSpan(start, len(prompt), tuple(map(_completion_length, members))))
    num_tokens = len(ids)
    padding = -num_tokens % multiple
    return {
        "input_ids": torch.tensor([[*ids, *[pad_token_id] * padding]]),
        "position_ids": torch.tensor([[*positions, *[0] * padding]]),
        "layout": PackedLayout(tuple(groups)),
        "logit_indices": torch.tensor(logit_indices),
        "num_tokens": num_tokens,
    }


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch on another device; every field, by iterating over them."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()
    }
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
