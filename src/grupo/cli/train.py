"""`grupo train`: evaluate, train, evaluate again, and report what changed."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from transformers import PrinterCallback, ProgressCallback

from grupo.cli.held_out_eval import Evaluation, HeldOutResults, make_evaluation
from grupo.cli.presentation import (
    format_result,
    print_header,
    print_memory,
    print_next_steps,
    print_results,
    run_card,
    warn_without_signal,
)
from grupo.cli.progress import ProgressLines, print_line, step_bar
from grupo.cli.sft import run_sft, sft_phase
from grupo.config import GRPOConfig
from grupo.data.prompts import Rows
from grupo.errors import ConfigError, GrupoError
from grupo.recipes.build import (
    lora_config_of,
    model_path,
    quantization,
    resolve_model,
    silence_other_ranks,
    training_fields,
    with_run_folder,
)
from grupo.recipes.data import recipe_rewards, recipe_rows
from grupo.recipes.reference_answers import drop_unreadable_answers
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import to_yaml
from grupo.runs.checkpoint import UNFINISHED
from grupo.runs.plots import REWARD_CURVE, reward_svg, training_log
from grupo.trainer import GRPOTrainer
from grupo.trainer.sft_trainer import FOLDER, check_phase_matches, sft_folder
from grupo.utils.files import move_files, write_errors_as

INTERRUPTED = 130  # a shell's exit code for a program ended by Ctrl-C; SystemExit has that of SIGTERM, 143


def train(
    recipe: Recipe,
    console: Console,
    *,
    resume: bool = False,
    accept_changes: str = "",
    dry_run: bool = False,
) -> int:
    """Runs a recipe and returns the exit code: 0 if done; 130 or 143 after Ctrl-C or SIGTERM, with a usable model.

    Args:
        resume: continue from the latest intact checkpoint in the run folder, if there is one.
        accept_changes: names of settings that may differ from those of the interrupted run, separated by commas.

    Raises:
        ConfigError, DataError: before anything is written, with what to set instead.
        GrupoError: the run had to stop; the model is saved as it was then.
    """
    timer = PhaseTimer()
    _check_resumption(recipe, resume=resume)
    recipe = resolve_model(with_run_folder(recipe))
    rewards, weights = recipe_rewards(recipe)
    config = GRPOConfig(**_with_weights(training_fields(recipe), weights))
    recipe, console = silence_other_ranks(recipe, config, console)
    rows, held_out_rows = drop_unreadable_answers(*recipe_rows(recipe, config.seed), rewards)
    phase = None if recipe.sft is None else sft_phase(recipe, config, rows)
    finished_phase = sft_folder(phase) if phase is not None and resume else None
    with timer.measure("loading"):
        trainer = _make_trainer(recipe, config, rows, rewards, finished_phase)
    checkpoint = _checkpoint_to_resume(trainer, console, accept_changes) if resume else None
    if checkpoint is not None:
        check_phase_matches(trainer.run_folder.path, wanted=phase is not None, found=finished_phase)
    evaluation = make_evaluation(recipe, trainer, held_out_rows)
    print_header(console, recipe, trainer, held_out_rows)
    if phase is not None and finished_phase is None:
        with timer.measure("sft"):
            run_sft(phase, trainer, console, dry_run=dry_run)
    if dry_run:
        print_memory(console, trainer, evaluation)
        if trainer.is_world_process_zero():
            _remove_if_empty(trainer.run_folder.path)  # the base class has made it
        return 0
    # Without a checkpoint the run starts over, but not its supervised phase, which is done.
    trainer.open_run_folder(checkpoint, keeping=() if finished_phase is None else (FOLDER,))
    run = _Run(recipe, trainer, evaluation, checkpoint, timer, console)
    run.evaluate_and_train()
    run.save_model()
    run.evaluate_again()
    run.write_report()
    return run.finish()


@dataclass
class PhaseTimer:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def total(self) -> float:
        return time.perf_counter() - self.started


@dataclass
class _Run:
    """The stages of a run whose folder is open; a stopped run skips what is left but saves its model and report."""

    recipe: Recipe
    trainer: GRPOTrainer
    evaluation: Evaluation | None
    checkpoint: str | None
    timer: PhaseTimer
    console: Console
    results: HeldOutResults = field(default_factory=HeldOutResults)
    stopped: KeyboardInterrupt | SystemExit | GrupoError | None = None

    def evaluate_and_train(self) -> None:
        try:
            if self.checkpoint is None:
                self._write_recipe()
            if self.evaluation is not None:
                self.results.before = before = self._evaluate_before(self.evaluation)
                print_line(self.console, f"held-out before training: {format_result(before, before.is_accuracy)}")
            with self.timer.measure("training"):
                self._train()
            if self.checkpoint is not None:
                # Not earlier: settings that the checkpoint refuses must not replace those of the run.
                self._write_recipe()
        except ConfigError:
            raise  # these settings do not fit the checkpoint: keep the model in the folder
        except (KeyboardInterrupt, SystemExit, GrupoError) as reason:
            if self.checkpoint is not None and not self.trainer.state.global_step:
                raise  # the checkpoint was not loaded yet: again, keep the model in the folder
            self.stopped = reason
            print_line(self.console, "\nStopping: saving the model as it is now.")

    def save_model(self) -> None:
        """Saves the model in the run folder; each file replaces an earlier one in one rename.

        Raises:
            TrainingError: the folder cannot be written to.
        """
        folder = self.trainer.run_folder.path
        partial = folder / UNFINISHED / "model"
        with self.timer.measure("saving"), write_errors_as(folder):
            self.trainer.save_model(str(partial), _internal_call=True)
            if not self.trainer.args.should_save:
                return
            move_files(partial, folder)
            shutil.rmtree(folder / UNFINISHED)
        self.trainer.run_folder.record_saved_step(self.trainer.state.global_step)

    def evaluate_again(self) -> None:
        if self.evaluation is None or self.stopped is not None:
            return
        try:
            with self.timer.measure("eval_after"):
                self.results.after = self.evaluation.run("after")
        except (KeyboardInterrupt, GrupoError) as reason:
            self.stopped = reason

    def write_report(self) -> None:
        """Writes the card, its plot and the summary; uploads them if the run is to be pushed to the Hub."""
        trainer = self.trainer
        warn_without_signal(self.console, trainer)
        log = training_log(trainer.run_folder.metrics_file)
        plot = reward_svg(log)
        if plot is not None:
            trainer.run_folder.write_text(REWARD_CURVE, plot)
        trainer.run_folder.write_text("README.md", run_card(self.recipe, trainer, self.results, log))
        trainer.run_folder.write_json("summary.json", self._summary())
        if trainer.config.push_to_hub:
            trainer.upload_run()

    def finish(self) -> int:
        """Prints the results and returns the exit code."""
        print_results(self.console, self.results, self.trainer.rewards.names)
        print_next_steps(self.console, self.trainer.run_folder.path, interrupted=self._interrupted)
        if isinstance(self.stopped, GrupoError):
            raise self.stopped
        if isinstance(self.stopped, SystemExit):
            return int(str(self.stopped.code))
        return INTERRUPTED if self._interrupted else 0

    @property
    def _interrupted(self) -> bool:
        return isinstance(self.stopped, (KeyboardInterrupt, SystemExit))

    def _write_recipe(self) -> None:
        self.trainer.run_folder.write_text("recipe.yaml", to_yaml(self.recipe))

    def _evaluate_before(self, evaluation: Evaluation) -> Any:
        baseline = evaluation.load_baseline() if self.checkpoint is not None else None
        if baseline is not None:
            return baseline
        with self.timer.measure("eval_before"):
            return evaluation.run("before")

    def _train(self) -> None:
        with step_bar(self.console) as bar:
            self.trainer.add_callback(ProgressLines(self.console, bar))
            self.trainer.train(resume_from_checkpoint=self.checkpoint)

    def _summary(self) -> dict[str, Any]:
        trainer, results = self.trainer, self.results
        # A resumed run may have switched off the evaluation that it started with.
        saved = trainer.run_folder.read_json("eval_before.json")
        baseline = {name: value for name, value in saved.items() if name not in ("settings", "groups")} or None
        completions = trainer.state.global_step * trainer.plan.completions_per_step // trainer.plan.num_iterations
        return {
            "eval_before": baseline if results.before is None else results.before.as_dict(results.is_accuracy),
            "eval_after": None if results.after is None else results.after.as_dict(results.is_accuracy),
            "steps": trainer.state.global_step,
            "completions": completions,
            "tokens": trainer.state.num_input_tokens_seen,
            "peak_rss_bytes": peak_rss_bytes(),
            "seconds": {**self.timer.seconds, "total": self.timer.total(), **trainer.training_log.seconds},
            "interrupted": self._interrupted,
        }


def _check_resumption(recipe: Recipe, *, resume: bool) -> None:
    """Raises a ConfigError if the recipe resumes by itself, or if --resume does not say which run."""
    if recipe.training.get("resume_from_checkpoint"):
        raise ConfigError(
            "training.resume_from_checkpoint has no effect in a recipe. Remove it and add --resume: the run then "
            "continues from the latest intact checkpoint in its folder."
        )
    if resume and recipe.training.get("output_dir") is None:
        raise ConfigError(
            "--resume needs the run to continue: name its own recipe, for example runs/times-tables/recipe.yaml, "
            "or add --set training.output_dir=FOLDER."
        )


def _with_weights(training: Mapping[str, Any], weights: list[float]) -> dict[str, Any]:
    """The fields of GRPOConfig with the weights of the recipe's rewards.

    Raises:
        ConfigError: `training` has weights too.
    """
    if all(weight == 1.0 for weight in weights):
        return dict(training)
    if training.get("reward_weights") is not None:
        raise ConfigError(
            "The recipe gives weights twice: `weight` under `rewards`, and training.reward_weights. Remove one of them."
        )
    return {**training, "reward_weights": weights}


def _make_trainer(
    recipe: Recipe, config: GRPOConfig, rows: Rows, rewards: Sequence[Any], finished_phase: str | None
) -> GRPOTrainer:
    """Starts from the model and adapter that a finished supervised phase left, if there was one."""
    trainer = GRPOTrainer(
        model=finished_phase or model_path(recipe),
        reward_funcs=list(rewards),
        args=config,
        train_dataset=rows,
        quantization_config=quantization(recipe),
        peft_config=None if finished_phase else lora_config_of(recipe),
    )
    # Our progress lines show the important metrics; all of them are in metrics.jsonl.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def _checkpoint_to_resume(trainer: GRPOTrainer, console: Console, accept_changes: str) -> str | None:
    """The checkpoint for `--resume`; before the first checkpoint of a run None, with a line about it."""
    if trainer.has_checkpoint():
        return trainer.checkpoint_to_resume(True, accept_changes=accept_changes)
    folder = escape(str(trainer.run_folder.path))
    print_line(console, f"--resume: {folder} has no checkpoint, so the run starts from the beginning.")
    return None


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def peak_rss_bytes() -> int:
    """Peak resident memory of this process; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
