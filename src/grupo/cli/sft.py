"""`grupo sft`, and the supervised phase of `grupo train`: answers in the wanted form, before reinforcement starts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError
from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed
from transformers.trainer_utils import SaveStrategy

from grupo.cli.progress import ProgressLines, say, step_bar
from grupo.config import GRPOConfig
from grupo.data.demonstrations import Demonstration, chosen_rows, demonstrations, dialogues
from grupo.data.prompts import NumberedRows, PromptTokenizer, row_numbers
from grupo.errors import ConfigError, TrainingError
from grupo.recipes.build import (
    as_one_run,
    default_folder,
    fresh_adapter,
    has_adapter,
    quantization,
    start_model,
    training_fields,
    with_start,
)
from grupo.recipes.data import dataset_rows, recipe_rows
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import to_yaml
from grupo.runs.folder import RunFolder, check_writable
from grupo.trainer import GRPOTrainer
from grupo.trainer.setup import as_mapping, load_policy_and_tokenizer
from grupo.trainer.sft_trainer import sft_trainer
from grupo.utils.files import move_files
from grupo.utils.messages import pluralize

FOLDER = "sft"
"""In the run folder of a GRPO run: the model that the supervised phase has left."""
SETTINGS, METRICS = "sft.yaml", "sft.jsonl"
CHECKPOINTS = f"{FOLDER}.checkpoints"
"""In the run folder: those of the phase, where `sft.training` asks for them."""
DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,  # it only warns without an accelerator, and batches are small
}
LEARNING_RATES = {"adapter": 1e-3, "whole model": 2e-5}
"""By what is trained, where none is set. With 22 steps of the first one SmolLM2-135M takes up a format of tags."""
SHARED = ("seed", "data_seed", "bf16", "fp16", "use_cpu", "gradient_checkpointing", "report_to", "disable_tqdm")
"""Settings that the supervised phase takes from `training`, unless its own say otherwise."""
SHOWN = {"loss": "loss {:.3f}", "grad_norm": "gradient norm {:.3f}"}


def sft(recipe: Recipe, console: Console, *, dry_run: bool = False) -> int:
    """Runs the supervised phase of a recipe alone, and leaves its model in the run folder. Returns the exit code.

    Raises:
        ConfigError, DataError: before anything is written, with what to set instead.
    """
    if recipe.sft is None:
        raise ConfigError(
            "The recipe has no `sft`, which says what answers to show. For example --set "
            "sft.answer='<think>{question}</think><answer>{answer}</answer>'."
        )
    folder = recipe.training.get("output_dir")
    if folder is None:
        folder = default_folder(recipe, "-sft")
    recipe = with_start(recipe.model_copy(update={"training": {**recipe.training, "output_dir": folder}}))
    config = GRPOConfig(**training_fields(recipe))
    recipe, console = as_one_run(recipe, config, console)
    folder = str(recipe.training["output_dir"])
    check_writable(Path(folder))
    phase = Phase(recipe, config, recipe_rows(recipe, config.seed)[0])
    say(console, phase.describe())
    set_seed(config.seed)
    model, tokenizer = load_policy_and_tokenizer(
        start_model(recipe), config, quantization_config=quantization(recipe), peft_config=fresh_adapter(recipe)
    )
    shown = demonstrations(phase.shown, PromptTokenizer(tokenizer, as_mapping(config.chat_template_kwargs)))
    if not dry_run:
        RunFolder(folder, rank=config.process_index).open(resumed=False)
        phase.run(model, tokenizer, shown, Path(folder), console)
        say(console, f"run folder  {escape(folder)}")
    return 0


def primed_folder(phase: Phase) -> str | None:
    """Where an interrupted run has left the model of its supervised phase; None where that is still to be done.

    Raises:
        ConfigError: it was made with other settings.
    """
    folder = Path(str(phase.config.output_dir)) / FOLDER
    if not folder.is_dir():
        return None
    if _read(folder / SETTINGS) != phase.settings():
        raise ConfigError(
            f"The supervised phase in {folder} was made with other settings ({SETTINGS} in it has them). Set them back "
            "to resume the run, or start a new one without --resume."
        )
    return str(folder)


def check_phase(recipe: Recipe, folder: Path, *, primed: str | None) -> None:
    """A run goes on from a checkpoint with a supervised phase exactly if it began with one.

    Args:
        folder: of the run that has the checkpoint.
        primed: what `primed_folder` has found.

    Raises:
        ConfigError: it began otherwise.
    """
    if recipe.sft is not None and primed is None:
        raise ConfigError(
            f"{folder} has checkpoints and no folder {FOLDER!r}: the run began without a supervised phase, or the "
            "folder was deleted. Take `sft` out of the recipe to resume it (--set sft=null), or bring the folder back."
        )
    if recipe.sft is None and (folder / FOLDER / SETTINGS).is_file():
        raise ConfigError(
            f"The run in {folder} began with a supervised phase, and the recipe has no `sft`. Resume it with its own "
            f"recipe, {folder / 'recipe.yaml'}."
        )


def prime(phase: Phase, trainer: GRPOTrainer, console: Console, *, dry_run: bool) -> None:
    """The supervised phase of a GRPO run, on the trainer's own model, which is then its reference policy as well."""
    shown = demonstrations(phase.shown, trainer.policy.prompt_tokenizer)
    say(console, phase.describe())
    if dry_run:
        return
    folder = trainer.run_folder.path
    # The trainer opens its folder later, with a manifest of the model as it is then.
    RunFolder(folder, rank=trainer.config.process_index).open(resumed=False)
    phase.run(trainer.model, trainer.tokenizer, shown, folder / FOLDER, console)
    trainer.take_reference()


class Phase:
    """The supervised phase of a recipe: checked when it is made, and then run.

    Args:
        rows: the training rows of the recipe; only without a dataset of its own are they shown.
    """

    def __init__(self, recipe: Recipe, config: GRPOConfig, rows: Sequence[Any]) -> None:
        assert recipe.sft is not None
        self.recipe, self.config = recipe, config
        source = rows if recipe.sft.dataset is None else dataset_rows(recipe.sft.dataset)
        numbers = row_numbers(source)
        places = chosen_rows(source, recipe.sft.rows, config.seed)
        rows = NumberedRows([source[place] for place in places], [numbers[place] for place in places])
        self.shown = dialogues(rows, recipe.sft.answer)
        self.args = self._arguments(recipe.sft.training)

    def describe(self) -> str:
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        steps = math.ceil(math.ceil(len(self.shown) / per_step) * self.args.num_train_epochs)
        steps = self.args.max_steps if self.args.max_steps > 0 else steps
        shown = pluralize(len(self.shown), "demonstration")
        said = f"[bold]sft[/]      {shown}, {pluralize(steps, 'optimizer step')} of supervised fine-tuning"
        repeated = -len(self.shown) % (self.args.train_batch_size * self.args.world_size)
        if self.args.world_size > 1 and repeated:
            said += f"; to fill the batches of {self.args.world_size} processes, each epoch repeats {repeated} of them"
        return said

    def run(self, model: Any, tokenizer: Any, shown: Sequence[Demonstration], folder: Path, console: Console) -> None:
        """Trains the model in place, and leaves it in `folder`, whole or not at all.

        Raises:
            TrainingError: the folder cannot be written.
        """
        trainer = sft_trainer(model, shown, tokenizer, self.args)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        with step_bar(console) as bar:
            trainer.add_callback(ProgressLines(console, bar, SHOWN))
            trainer.train()
        _leave_as_it_was(trainer, model, checkpointing=bool(self.config.gradient_checkpointing))
        partial = folder / f"{FOLDER}.unfinished" if folder.is_dir() else folder.with_name(f"{FOLDER}.unfinished")
        if trainer.is_world_process_zero():
            shutil.rmtree(partial, ignore_errors=True)
        try:
            trainer.save_model(str(partial))
            if trainer.is_world_process_zero():
                lines = [json.dumps(line) for line in trainer.state.log_history]
                (partial / METRICS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
                (partial / SETTINGS).write_text(self.settings(), encoding="utf-8")
                _put_in_place(partial, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise TrainingError(
                f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}. Nothing of the supervised "
                "phase is saved. Make room, or allow it, and start again."
            ) from error
        PartialState().wait_for_everyone()

    def settings(self) -> str:
        """The parts of the recipe that the phase depends on, as YAML."""
        read = ("seed", "chat_template", "chat_template_kwargs", "added_tokens", "model_init_kwargs", *SHARED)
        training = {name: value for name, value in self.recipe.training.items() if name in read}
        return to_yaml(
            self.recipe.model_copy(update={"rewards": [], "eval": type(self.recipe.eval)(), "training": training})
        )

    def _arguments(self, given: Mapping[str, Any]) -> TrainingArguments:
        shared = {name: getattr(self.config, name) for name in SHARED}
        shared["learning_rate"] = LEARNING_RATES["adapter" if has_adapter(self.recipe) else "whole model"]
        try:
            args = TrainingArguments(
                output_dir=str(self.config.output_dir),
                remove_unused_columns=False,
                **{**shared, **DEFAULTS, **given},
            )
        except (TypeError, ValueError, ImportError) as error:
            raise ConfigError(
                f"sft.training={dict(given)!r} cannot be used: {' '.join(str(error).split())}. Its keys are the fields "
                "of transformers.TrainingArguments."
            ) from error
        if args.save_strategy != SaveStrategy.NO:
            # Not among the checkpoints of GRPO, which a run is resumed from.
            args.output_dir = str(Path(str(args.output_dir)) / CHECKPOINTS)
        return args


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _leave_as_it_was(trainer: Any, model: Any, *, checkpointing: bool) -> None:
    """The model without what the trainer has put into it: the forward of mixed precision, checkpointing."""
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    if trainer.args.gradient_checkpointing and not checkpointing:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def _put_in_place(partial: Path, folder: Path) -> None:
    """By one rename where it can be; file by file into a run folder that is there already."""
    if not folder.exists():
        partial.rename(folder)
        return
    move_files(partial, folder)
