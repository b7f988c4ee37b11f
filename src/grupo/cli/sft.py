"""`grupo sft`, and the supervised phase of `grupo train`: demonstrations of the wanted format before GRPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from transformers import set_seed

from grupo.cli.progress import ProgressLines, print_line, step_bar
from grupo.config import GRPOConfig
from grupo.data.prompts import PromptTokenizer
from grupo.errors import ConfigError
from grupo.recipes.build import (
    has_adapter,
    lora_config_of,
    model_path,
    quantization,
    resolve_model,
    silence_other_ranks,
    training_fields,
    with_run_folder,
)
from grupo.recipes.data import dataset_rows, recipe_rows
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import to_yaml
from grupo.runs.folder import RunFolder, check_writable
from grupo.trainer import GRPOTrainer
from grupo.trainer.setup import as_mapping, load_policy_and_tokenizer
from grupo.trainer.sft_trainer import FOLDER, SHARED, SftPhase

METRICS = {"loss": "loss {:.3f}", "grad_norm": "gradient norm {:.3f}"}
READ_SETTINGS = ("seed", "chat_template", "chat_template_kwargs", "added_tokens", "model_init_kwargs", *SHARED)
"""Fields of `training` that affect the supervised phase."""


def sft(recipe: Recipe, console: Console, *, dry_run: bool = False) -> int:
    """Runs only the supervised phase of a recipe and saves its model in the run folder. Returns the exit code.

    Raises:
        ConfigError, DataError: before anything is written, with what to set instead.
    """
    if recipe.sft is None:
        raise ConfigError(
            "The recipe has no `sft`, which defines the demonstrations. For example --set "
            "sft.answer='<think>{question}</think><answer>{answer}</answer>'."
        )
    recipe = resolve_model(with_run_folder(recipe, "-sft"))
    config = GRPOConfig(**training_fields(recipe))
    recipe, console = silence_other_ranks(recipe, config, console)
    folder = Path(recipe.training["output_dir"])
    check_writable(folder)
    phase = sft_phase(recipe, config, recipe_rows(recipe, config.seed)[0])
    print_line(console, f"[bold]sft[/]      {phase.describe()}")
    set_seed(config.seed)
    model, tokenizer = load_policy_and_tokenizer(
        model_path(recipe), config, quantization_config=quantization(recipe), peft_config=lora_config_of(recipe)
    )
    shown = phase.demonstrations(PromptTokenizer(tokenizer, as_mapping(config.chat_template_kwargs)))
    if not dry_run:
        RunFolder(folder, rank=config.process_index).open(resumed=False)
        with step_bar(console) as bar:
            phase.run(model, tokenizer, shown, folder, [ProgressLines(console, bar, METRICS)])
        print_line(console, f"run folder  {escape(str(folder))}")
    return 0


def sft_phase(recipe: Recipe, config: GRPOConfig, rows: Any) -> SftPhase:
    """The supervised phase that the recipe asks for; `rows` are shown if it names no dataset of its own."""
    spec = recipe.sft
    assert spec is not None
    training = {name: value for name, value in recipe.training.items() if name in READ_SETTINGS}
    return SftPhase(
        config,
        rows if spec.dataset is None else dataset_rows(spec.dataset),
        answer=spec.answer,
        num_rows=spec.rows,
        training=spec.training,
        trains_adapter=has_adapter(recipe),
        settings=to_yaml(recipe.model_copy(update={"rewards": [], "eval": type(recipe.eval)(), "training": training})),
    )


def run_sft(phase: SftPhase, trainer: GRPOTrainer, console: Console, *, dry_run: bool) -> None:
    """Runs the supervised phase on the model of `trainer`; the result is also its reference policy."""
    shown = phase.demonstrations(trainer.policy.prompt_tokenizer)
    print_line(console, f"[bold]sft[/]      {phase.describe()}")
    if dry_run:
        return
    folder = trainer.run_folder.path
    # The trainer opens its folder later, with a manifest of the model as it is then.
    RunFolder(folder, rank=trainer.config.process_index).open(resumed=False)
    with step_bar(console) as bar:
        callbacks = [ProgressLines(console, bar, METRICS)]
        phase.run(trainer.model, trainer.tokenizer, shown, folder / FOLDER, callbacks)
    trainer.take_reference()
