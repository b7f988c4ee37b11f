"""A short supervised phase before GRPO, on the plain `transformers.Trainer`. B rows, S tokens."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from grupo.config import GRPOConfig
from grupo.data.demonstrations import Demonstration, demonstrations, dialogues, drop_too_long, sample_rows
from grupo.data.prompts import PromptTokenizer
from grupo.errors import ConfigError, TrainingError
from grupo.models.inspect import check_trainable, context_length, vocabulary_size
from grupo.models.load import enable_input_grads
from grupo.trainer.hf_trainer import AdapterTrainer
from grupo.utils.files import move_files, write_errors_as
from grupo.utils.messages import pluralize

NO_LOSS = -100
"""Label of tokens without loss, as in torch's cross-entropy."""

FOLDER = "sft"
"""Subfolder of a GRPO run for the model after the supervised phase."""
SETTINGS, METRICS = "sft.yaml", "sft.jsonl"
CHECKPOINTS = f"{FOLDER}.checkpoints"
"""Subfolder of the run for checkpoints of the phase, if `sft.training` asks for them."""

DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,  # only warns without an accelerator, and batches are small
}
ADAPTER_LEARNING_RATE, MODEL_LEARNING_RATE = 1e-3, 2e-5
"""Defaults. With 22 steps of the first, SmolLM2-135M adopts a format of tags."""
SHARED = ("seed", "data_seed", "bf16", "fp16", "use_cpu", "gradient_checkpointing", "report_to", "disable_tqdm")
"""Settings of the GRPO run that also apply to the phase, unless its own settings name them."""


class SftPhase:
    """The supervised phase of a run, checked on construction.

    Args:
        config: configuration of the GRPO run.
        rows: dataset rows with demonstrations.
        answer: template of the answers; None if rows have a column `completion` or `messages`.
        num_rows: number of rows to show, chosen by the seed; None for all.
        training: fields of `transformers.TrainingArguments`.
        trains_adapter: True if an adapter is trained, False for the whole model.
        settings: text that identifies the phase, written to `sft.yaml`.

    Raises:
        ConfigError, DataError: a setting or row that cannot be used.
    """

    def __init__(
        self,
        config: GRPOConfig,
        rows: Any,
        *,
        answer: str | None,
        num_rows: int | None,
        training: Mapping[str, Any],
        trains_adapter: bool,
        settings: str,
    ) -> None:
        self.config, self.settings = config, settings
        self.dialogues = dialogues(sample_rows(rows, num_rows, config.seed), answer)
        self.args = self._arguments(training, ADAPTER_LEARNING_RATE if trains_adapter else MODEL_LEARNING_RATE)

    def describe(self) -> str:
        count, world_size = len(self.dialogues), self.args.world_size
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * world_size
        steps = math.ceil(math.ceil(count / per_step) * self.args.num_train_epochs)
        steps = self.args.max_steps if self.args.max_steps > 0 else steps
        text = f"{pluralize(count, 'demonstration')}, {pluralize(steps, 'optimizer step')} of supervised fine-tuning"
        repeated = -count % (self.args.train_batch_size * world_size)
        if world_size > 1 and repeated:
            text += f"; to fill the batches of {world_size} processes, each epoch repeats {repeated} of them"
        return text

    def demonstrations(self, tokenizer: PromptTokenizer) -> list[Demonstration]:
        return demonstrations(self.dialogues, tokenizer)

    def run(
        self,
        model: Any,
        tokenizer: Any,
        shown: Sequence[Demonstration],
        folder: Path,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        """Trains the model in place and saves it in `folder`, completely or not at all.

        Raises:
            TrainingError: the folder cannot be written to.
        """
        trainer = sft_trainer(model, shown, tokenizer, self.args, callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.train()
        _undo_trainer_changes(trainer, model, checkpointing=bool(self.config.gradient_checkpointing))
        partial = folder / f"{FOLDER}.unfinished" if folder.is_dir() else folder.with_name(f"{FOLDER}.unfinished")
        if trainer.is_world_process_zero():
            shutil.rmtree(partial, ignore_errors=True)
        remedy = "The supervised phase is not saved. Free some space or fix the permissions, then start again."
        try:
            with write_errors_as(folder, remedy):
                trainer.save_model(str(partial))
                if trainer.is_world_process_zero():
                    lines = [json.dumps(line) for line in trainer.state.log_history]
                    (partial / METRICS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
                    (partial / SETTINGS).write_text(self.settings, encoding="utf-8")
                    _move_into_place(partial, folder)
        except TrainingError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        PartialState().wait_for_everyone()

    def _arguments(self, given: Mapping[str, Any], learning_rate: float) -> TrainingArguments:
        shared = {name: getattr(self.config, name) for name in SHARED}
        try:
            args = TrainingArguments(
                output_dir=str(self.config.output_dir),
                remove_unused_columns=False,
                **{**shared, "learning_rate": learning_rate, **DEFAULTS, **given},
            )
        except (TypeError, ValueError, ImportError) as error:
            raise ConfigError(
                f"sft.training={dict(given)!r} cannot be used: {' '.join(str(error).split())}. Its keys are the fields "
                "of transformers.TrainingArguments."
            ) from error
        if args.save_strategy != SaveStrategy.NO:
            # Not among the checkpoints of GRPO, from which a run is resumed.
            args.output_dir = str(Path(str(args.output_dir)) / CHECKPOINTS)
        return args


def sft_folder(phase: SftPhase) -> str | None:
    """The folder with the model of the supervised phase of an interrupted run; None if the phase is still to be run.

    Raises:
        ConfigError: it was made with other settings.
    """
    folder = Path(str(phase.config.output_dir)) / FOLDER
    if not folder.is_dir():
        return None
    settings = folder / SETTINGS
    if not settings.is_file() or settings.read_text(encoding="utf-8") != phase.settings:
        raise ConfigError(
            f"The supervised phase in {folder} was made with other settings ({SETTINGS} in it has them). Set them back "
            "to resume the run, or start a new run without --resume."
        )
    return str(folder)


def check_phase_matches(run: Path, *, wanted: bool, found: str | None) -> None:
    """A run can be resumed from a checkpoint with a supervised phase if and only if it started with one.

    Args:
        run: folder of the run that has the checkpoint.
        wanted: True if the recipe has a supervised phase.
        found: the result of `sft_folder`.

    Raises:
        ConfigError: the recipe and the run differ.
    """
    if wanted and found is None:
        raise ConfigError(
            f"{run} has checkpoints but no folder {FOLDER!r}: the run started without a supervised phase, or the "
            "folder was deleted. Remove `sft` from the recipe to resume it (--set sft=null), or restore the folder."
        )
    if not wanted and (run / FOLDER / SETTINGS).is_file():
        raise ConfigError(
            f"The run in {run} started with a supervised phase, but the recipe has no `sft`. Resume it with its own "
            f"recipe, {run / 'recipe.yaml'}."
        )


def sft_trainer(
    model: Any,
    shown: Sequence[Demonstration],
    tokenizer: Any,
    args: TrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """A trainer that teaches `model` the answers of the demonstrations: mean cross-entropy over their tokens, in nats.

    The model is trained in place, so GRPO can continue with the same adapter. Arguments, schedules and callbacks of
    transformers work as always.

    Args:
        model: a causal language model with trainable parameters, with or without an adapter.
        tokenizer: saved with the model.

    Raises:
        ConfigError: no parameter of the model is trainable.
        DataError: no demonstration fits into the model's context.
    """
    check_trainable(model)
    shown = drop_too_long(shown, context_length=context_length(model), vocabulary_size=vocabulary_size(model))
    if args.gradient_checkpointing:
        enable_input_grads(model)
    return AdapterTrainer(
        model=model,
        args=args,
        train_dataset=[_features(item) for item in shown],  # type: ignore[arg-type]
        data_collator=pad_batch,
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


def _features(item: Demonstration) -> dict[str, list[int]]:
    return {
        "input_ids": [*item.prompt_ids, *item.answer_ids],
        "labels": [NO_LOSS] * len(item.prompt_ids) + list(item.answer_ids),
    }


def pad_batch(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
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


def _undo_trainer_changes(trainer: Any, model: Any, *, checkpointing: bool) -> None:
    """Removes mixed precision and gradient checkpointing, which the trainer added to the model."""
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    if trainer.args.gradient_checkpointing and not checkpointing:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def _move_into_place(partial: Path, folder: Path) -> None:
    """One rename if possible; otherwise file by file into an existing run folder."""
    if not folder.exists():
        partial.rename(folder)
        return
    move_files(partial, folder)
