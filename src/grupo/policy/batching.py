"""Training samples to micro-batches: the only module that pads, packs and builds masks."""

from __future__ import annotations

import bisect
import dataclasses
import functools
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
    """Splits samples into micro-batches. Losses depend neither on the order nor on the split.

    Args:
        micro_batch_size: maximum number of completions per micro-batch.
        max_sequence_tokens: maximum number of tokens of a prompt with one completion. If given, packed micro-batches
            are limited to the tokens of `micro_batch_size` such sequences, and not in their number of completions.
        token_budget: maximum number of tokens per micro-batch, padding included; a single completion above it gets a
            micro-batch of its own. None: no limit.
        packed: completions of one prompt share a micro-batch and count its tokens once. Otherwise sequences of similar
            length share a micro-batch, to keep padding small.
    """
    if packed:
        if max_sequence_tokens is not None:
            room = micro_batch_size * max_sequence_tokens
            micro_batch_size, token_budget = len(samples), room if token_budget is None else min(room, token_budget)
        yield from _packed_batches(samples, micro_batch_size, token_budget)
        return
    ordered = sorted(samples, key=_sequence_length, reverse=True)
    start = 0
    while start < len(ordered):
        # The first sequence is the longest, and all others are padded to its length.
        fitting = micro_batch_size if token_budget is None else max(1, token_budget // _sequence_length(ordered[start]))
        stop = start + min(micro_batch_size, fitting)
        yield ordered[start:stop]
        start = stop


def largest_micro_batch(
    completions: int, micro_batch_size: int, *, group_size: int, prompt: int, completion: int, **limits: Any
) -> tuple[int, int]:
    """(tokens, completions) of the largest micro-batch, when all prompts and completions have the same length.

    Args:
        completions: completions of one step on this rank, `group_size` of each prompt.
        prompt, completion: tokens of a prompt and of a completion.
        limits: as in `micro_batches`.
    """
    prompts = [(index, *[0] * (prompt - 1)) for index in range(completions)]
    ids = (0,) * completion
    samples = [TrainingSample(prompts[index // group_size], ids, 1.0, True, True, None) for index in range(completions)]

    def tokens(batch: Sequence[TrainingSample]) -> int:
        return (len(_by_prompt(batch)) if limits["packed"] else len(batch)) * prompt + len(batch) * completion

    largest = max(micro_batches(samples, micro_batch_size, **limits), key=tokens)
    return tokens(largest), len(largest)


def _packed_batches(
    samples: Sequence[TrainingSample], max_completions: int, token_budget: int | None
) -> Iterator[list[TrainingSample]]:
    budget = token_budget or sum(map(_sequence_length, samples))
    pieces = [
        piece
        for members in _by_prompt(samples)
        for piece in _split_group(sorted(members, key=_completion_length, reverse=True), max_completions, budget)
    ]
    batch: list[TrainingSample] = []
    used = 0
    for piece in sorted(pieces, key=lambda piece: _completion_length(piece[0]), reverse=True):
        tokens = len(piece[0].prompt_ids) + sum(map(_completion_length, piece))
        if batch and (len(batch) + len(piece) > max_completions or used + tokens > budget):
            yield [sample for members in _by_prompt(batch) for sample in members]
            batch, used = [], 0
        batch, used = [*batch, *piece], used + tokens
    if batch:
        yield [sample for members in _by_prompt(batch) for sample in members]


def _split_group(group: Sequence[TrainingSample], max_completions: int, budget: int) -> list[list[TrainingSample]]:
    """Splits completions of one prompt, longest first, into as few pieces as fit, of about equal size in tokens.

    Each additional piece computes the prompt once more.
    """
    room = min(max(budget - len(group[0].prompt_ids), 1), sum(map(_completion_length, group)))
    split = functools.partial(_pack, group, max_completions)
    fewest = len(split(room))
    # The smallest room that needs no additional piece makes the pieces even.
    return split(bisect.bisect_left(range(room), True, key=lambda tokens: len(split(tokens)) <= fewest))


def _pack(group: Sequence[TrainingSample], max_completions: int, room: int) -> list[list[TrainingSample]]:
    """Fills pieces of at most `max_completions` completions and `room` tokens; a longer completion has its own."""
    pieces: list[list[TrainingSample]] = []
    used = 0
    for sample in group:
        length = _completion_length(sample)
        if not pieces or len(pieces[-1]) == max_completions or used + length > room:
            pieces.append([])
            used = 0
        pieces[-1].append(sample)
        used += length
    return pieces


def _by_prompt(samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """Groups samples by the tokens of their prompts: equal tokens are all that sharing a prompt requires."""
    groups: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_ids, []).append(sample)
    return list(groups.values())


def _sequence_length(sample: TrainingSample) -> int:
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
    """One micro-batch: padded sequences, or one packed sequence in which neighbours with the same prompt share it.

    Args:
        dtype: dtype of advantages and log-probs.
        pad_to_multiple_of: rounds S up to a multiple, for devices that compile once per shape.
    """
    multiple = pad_to_multiple_of or 1
    completions = [sample.completion_ids for sample in samples]
    completion_lengths = torch.tensor([len(ids) for ids in completions])
    prompt_lengths = torch.tensor([len(sample.prompt_ids) for sample in samples])
    completion_mask = _length_mask(completion_lengths)
    has_loss = torch.tensor([sample.has_loss for sample in samples])
    lay_out = _packed_sequence if packed else _padded_sequences
    batch = MicroBatch(
        **lay_out(samples, pad_token_id, multiple),
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


def _padded_sequences(samples: Sequence[TrainingSample], pad_token_id: int, multiple: int) -> dict[str, Any]:
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


def _packed_sequence(samples: Sequence[TrainingSample], pad_token_id: int, multiple: int) -> dict[str, Any]:
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
            # The prompt's last token, which all its completions share, predicts their first tokens.
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
    """Copies a micro-batch to another device."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()
    }
    return MicroBatch(**moved)


def _length_mask(lengths: Tensor) -> Tensor:
    """(B, T) bool, True at the first `lengths` positions of each completion."""
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
