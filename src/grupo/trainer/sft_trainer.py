"""A short supervised phase before GRPO, on the plain `transformers.Trainer`. B rows, S tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from grupo.data.demonstrations import Demonstration, that_fit
from grupo.models.inspect import check_trainable, context_length, vocabulary_size
from grupo.models.load import enable_input_grads
from grupo.trainer.hf_trainer import AdapterTrainer

NO_LOSS = -100
"""The label of tokens that are read and not learned, as torch's cross-entropy has it."""


def sft_trainer(
    model: Any,
    shown: Sequence[Demonstration],
    tokenizer: Any,
    args: TrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """A trainer that teaches `model` the answers of the demonstrations: mean cross-entropy over their tokens, in nats.

    The model is trained in place, so that the same adapter can go on with GRPO. It is the trainer of transformers with
    rows of ours; its arguments, schedules and callbacks work as always.

    Args:
        model: a causal language model with something to train, with or without an adapter.
        tokenizer: saved beside the model.

    Raises:
        ConfigError: nothing of the model is trainable.
        DataError: no demonstration fits into the model's context.
    """
    check_trainable(model)
    shown = that_fit(shown, context_length=context_length(model), vocabulary_size=vocabulary_size(model))
    if args.gradient_checkpointing:
        enable_input_grads(model)
    return AdapterTrainer(
        model=model,
        args=args,
        train_dataset=[_row(item) for item in shown],  # type: ignore[arg-type]
        data_collator=padded,
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


def _row(item: Demonstration) -> dict[str, list[int]]:
    return {
        "input_ids": [*item.prompt_ids, *item.answer_ids],
        "labels": [NO_LOSS] * len(item.prompt_ids) + list(item.answer_ids),
    }


def padded(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
    """(B, S) `input_ids`, `attention_mask` and `labels`, padded on the right, where no pad token is needed."""
    longest = max(len(row["input_ids"]) for row in rows)

    def column(name: str, padding: int) -> Tensor:
        return torch.tensor([[*row[name], *[padding] * (longest - len(row[name]))] for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": column("input_ids", 0),
        "attention_mask": torch.tensor(mask),
        "labels": column("labels", NO_LOSS),
    }
