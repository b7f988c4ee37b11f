"""`grupo train`: evaluate, train, evaluate again, and say what changed."""

from __future__ import annotations

import logging
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback

from grupo.cli.held_out_eval import Evaluation, evaluation
from grupo.cli.progress import ProgressLines, say, step_bar
from grupo.cli.sft import FOLDER, Phase, check_phase, prime, primed_folder
from grupo.config import GRPOConfig
from grupo.data.prompts import Rows
from grupo.errors import ConfigError, GrupoError
from grupo.evals.held_out import FEW_PROMPTS, HeldOutResult
from grupo.evals.statistics import paired_difference
from grupo.models.default_model import HUB_ID
from grupo.models.memory import free_bytes
from grupo.recipes.build import (
    as_one_run,
    default_folder,
    fresh_adapter,
    quantization,
    start_model,
    training_fields,
    with_start,
)
from grupo.recipes.data import recipe_rewards, recipe_rows
from grupo.recipes.reference_answers import usable_rows
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import to_yaml
from grupo.runs.checkpoint import UNFINISHED
from grupo.runs.model_card import model_card
from grupo.runs.plots import REWARD_CURVE, reward_svg, training_log
from grupo.trainer import GRPOTrainer
from grupo.trainer.memory_estimate import format_bytes, memory_estimate
from grupo.utils.files import move_files, write_errors_as
from grupo.utils.messages import pluralize

logger = logging.getLogger("grupo")

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C; SystemExit brings that of SIGTERM, 143


@dataclass
class PhaseTimer:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def total(self) -> float:
        return time.perf_counter() - self.started


def train(
    recipe: Recipe,
    console: Console,
    *,
    resume: bool = False,
    accept_changes: str = "",
    dry_run: bool = False,
) -> int:
    """Runs a recipe and returns the exit code: 0 done; 130 and 143 ended by Ctrl-C or SIGTERM, with a usable adapter.

    Args:
        resume: go on from the newest whole checkpoint in the run folder, where there is one.
        accept_changes: names of settings that may be others than those of the interrupted run, separated by commas.

    Raises:
        ConfigError, DataError: before anything is written, with what to set instead.
        GrupoError: the run had to stop; the model is saved as it was then.
    """
    clock = PhaseTimer()
    if recipe.training.get("resume_from_checkpoint"):
        raise ConfigError(
            "training.resume_from_checkpoint has no effect in a recipe. Take it out, and add --resume: the run goes on "
            "from the newest whole checkpoint in its folder."
        )
    recipe = with_start(with_run_folder(recipe, resume=resume))
    rewards, weights = recipe_rewards(recipe)
    config = GRPOConfig(**_with_weights(training_fields(recipe), weights))
    recipe, console = as_one_run(recipe, config, console)
    rows, held_out_rows = usable_rows(*recipe_rows(recipe, config.seed), rewards)
    phase = None if recipe.sft is None else Phase(recipe, config, rows)
    primed = primed_folder(phase) if phase is not None and resume else None
    trainer: GRPOTrainer = clock.measure("loading", lambda: _trainer(recipe, config, rows, rewards, primed))
    folder = trainer.run_folder.path
    checkpoint = _checkpoint(trainer, console, accept_changes) if resume else None
    if checkpoint is not None:
        check_phase(recipe, folder, primed=primed)
    held_out = evaluation(recipe, trainer, held_out_rows)
    _introduce(console, recipe, trainer, held_out_rows)
    if phase is not None and primed is None:
        clock.measure("sft", lambda: prime(phase, trainer, console, dry_run=dry_run))
    if dry_run:
        _tell_memory(console, trainer, held_out)
        if trainer.is_world_process_zero():
            _remove_if_empty(folder)  # the base class has made it
        return 0
    # Without a checkpoint the run begins anew, and not its supervised phase, which is done.
    trainer.open_run_folder(checkpoint, keeping=() if primed is None else (FOLDER,))
    before = after = None
    stopped: KeyboardInterrupt | SystemExit | GrupoError | None = None
    try:
        if checkpoint is None:
            trainer.run_folder.write_text("recipe.yaml", to_yaml(recipe))
        if held_out is not None:
            before = held_out.earlier() if checkpoint is not None else None
            if before is None:
                before = clock.measure("eval_before", lambda: held_out.run("before"))
            say(console, f"held-out before training: {_shown(before, before.is_accuracy)}")
        clock.measure("training", lambda: _run_training(trainer, console, checkpoint))
        if checkpoint is not None:
            # Not before: settings that the checkpoint refuses must not replace those it was made with.
            trainer.run_folder.write_text("recipe.yaml", to_yaml(recipe))
    except ConfigError:
        raise  # a checkpoint that these settings do not fit: the model in the folder is the better one
    except (KeyboardInterrupt, SystemExit, GrupoError) as reason:
        if checkpoint is not None and not trainer.state.global_step:
            raise  # the checkpoint was not loaded yet: again, the model in the folder is the better one
        stopped = reason
        say(console, "\nThe run stops here: saving the model as it is now.")
    clock.measure("saving", lambda: _save_model(trainer))
    if held_out is not None and stopped is None:
        try:
            after = clock.measure("eval_after", lambda: held_out.run("after"))
        except (KeyboardInterrupt, GrupoError) as reason:
            stopped = reason
    _warn_without_signal(console, trainer)
    interrupted = isinstance(stopped, (KeyboardInterrupt, SystemExit))
    # A weighted reward whose answers all score 0 at the start looks like an accuracy until the second evaluation.
    is_accuracy = all(result.is_accuracy for result in (before, after) if result is not None)
    log = training_log(trainer.run_folder.metrics_file)
    drawing = reward_svg(log)
    if drawing is not None:
        trainer.run_folder.write_text(REWARD_CURVE, drawing)
    trainer.run_folder.write_text("README.md", _card(recipe, trainer, before, after, log, is_accuracy=is_accuracy))
    _write_summary(trainer, clock, before, after, is_accuracy=is_accuracy, interrupted=interrupted)
    if trainer.config.push_to_hub:
        trainer.upload_run()
    if before is not None and after is not None:
        _report(console, before, after, trainer.rewards.names, is_accuracy=is_accuracy)
    say(console, f"run folder  {escape(str(folder))}")
    if interrupted and any(folder.glob("checkpoint-*")):
        say(console, f"to go on    grupo train {escape(shlex.quote(str(folder / 'recipe.yaml')))} --resume")
    if isinstance(stopped, GrupoError):
        raise stopped
    if isinstance(stopped, SystemExit):
        return int(str(stopped.code))
    return INTERRUPTED if interrupted else 0


def _save_model(trainer: GRPOTrainer) -> None:
    """The model in the run folder, file by file in place of an earlier one: none is ever cut short.

    Raises:
        TrainingError: it cannot be written.
    """
    folder = trainer.run_folder.path
    partial = folder / UNFINISHED / "model"
    with write_errors_as(folder):
        trainer.save_model(str(partial), _internal_call=True)
        if not trainer.args.should_save:
            return
        move_files(partial, folder)
        shutil.rmtree(folder / UNFINISHED)
    trainer.run_folder.record_saved_step(trainer.state.global_step)


def _checkpoint(trainer: GRPOTrainer, console: Console, accept_changes: str) -> str | None:
    """What `--resume` goes on from; None, and a line that says so, before the first checkpoint of a run."""
    if trainer.has_checkpoint():
        return trainer.checkpoint_to_resume(True, accept_changes=accept_changes)
    say(
        console,
        f"--resume: {escape(str(trainer.run_folder.path))} has no checkpoint, so the run starts from the beginning.",
    )
    return None


def with_run_folder(recipe: Recipe, *, resume: bool) -> Recipe:
    """The recipe with a fresh run folder, unless it names one; every step is shown unless it says otherwise.

    Raises:
        ConfigError: a run is to be resumed, and the recipe does not say which.
    """
    folder = recipe.training.get("output_dir")
    if resume and folder is None:
        raise ConfigError(
            "--resume needs the run to continue: name its own recipe, for example runs/times-tables/recipe.yaml, "
            "or add --set training.output_dir=FOLDER."
        )
    if folder is None:
        folder = default_folder(recipe)
    return recipe.model_copy(update={"training": {"logging_steps": 1, **recipe.training, "output_dir": folder}})


def _with_weights(training: Mapping[str, Any], weights: list[float]) -> dict[str, Any]:
    """The fields of GRPOConfig with the weights of the recipe's rewards, which are stated in one place only."""
    if all(weight == 1.0 for weight in weights):
        return dict(training)
    if training.get("reward_weights") is not None:
        raise ConfigError(
            "The recipe gives weights twice: `weight` under `rewards`, and training.reward_weights. Take one out."
        )
    return {**training, "reward_weights": weights}


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _trainer(recipe: Recipe, config: GRPOConfig, rows: Rows, rewards: Sequence[Any], primed: str | None) -> GRPOTrainer:
    """Starts from the model that the supervised phase has left, where there was one, with its adapter."""
    trainer = GRPOTrainer(
        model=primed or start_model(recipe),
        reward_funcs=list(rewards),
        args=config,
        train_dataset=rows,
        quantization_config=quantization(recipe),
        peft_config=None if primed else fresh_adapter(recipe),
    )
    # Our own progress display shows what matters; the dictionaries are in metrics.jsonl.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def _run_training(trainer: GRPOTrainer, console: Console, checkpoint: str | None) -> None:
    with step_bar(console) as bar:
        trainer.add_callback(ProgressLines(console, bar))
        trainer.train(resume_from_checkpoint=checkpoint)


def _introduce(console: Console, recipe: Recipe, trainer: GRPOTrainer, held_out_rows: Rows) -> None:
    share = trainer.policy.trainable_parameters / trainer.policy.total_parameters
    source = recipe.task or recipe.dataset.path  # type: ignore[union-attr]
    name = "SmolLM2-135M-Instruct (the default)" if recipe.model == "default" else recipe.model
    say(console, f"[bold]model[/]    {escape(name)}, {trainer.policy.total_parameters / 1e6:.1f} M parameters, "
                 f"{trainer.policy.trainable_parameters / 1e6:.2f} M of them trainable ({share:.2%})")  # fmt: skip
    say(console, f"[bold]task[/]     {escape(source)}: {pluralize(len(trainer.train_rows), 'training prompt')}, "
                 f"{len(held_out_rows)} held out; rewards {', '.join(trainer.rewards.names)}")  # fmt: skip
    for line in trainer.plan.describe():
        _say_line(console, line)
    trainer.printed_plan = trainer.printed_loss_hint = True
    if trainer.reference is not None:
        say(console, f"[bold]KL[/]       against {trainer.reference.description}")
    steps = trainer.plan.total_steps(trainer.config.num_train_epochs, trainer.config.max_steps)
    say(console, f"[bold]run[/]      {pluralize(steps, 'optimizer step')}, "
                 f"{pluralize(steps * trainer.plan.completions_per_step, 'completion')}, "
                 f"into {escape(str(trainer.run_folder.path))}")  # fmt: skip


def _say_line(console: Console, line: str) -> None:
    name, _, text = line.partition(": ")
    say(console, f"[bold]{name}[/]: {text}" if text else line)


def _tell_memory(console: Console, trainer: GRPOTrainer, held_out: Evaluation | None) -> None:
    free = free_bytes(trainer.accelerator.device)
    rows = [*trainer.train_rows, *(held_out.prompts if held_out is not None else ())]
    answers = 0 if held_out is None else len(held_out.prompts) * held_out.samples_per_prompt
    estimate = memory_estimate(
        trainer.model,
        trainer.config,
        prompt_tokens=max(len(row.token_ids) for row in rows),
        eval_rows=min(answers // trainer.config.world_size, trainer.eval_completions_at_once() or answers),
        free=free,
        checkpointing=bool(trainer.args.gradient_checkpointing),
    )
    if estimate is None:
        say(console, "memory: not known, because the configuration of this model does not give the sizes of its layers")
        return
    for line in estimate.describe():
        _say_line(console, line)
    if free is not None:
        say(console, estimate.warning(free) or f"  free next to the loaded model: {format_bytes(free)}")


def _write_summary(
    trainer: GRPOTrainer,
    clock: PhaseTimer,
    before: HeldOutResult | None,
    after: HeldOutResult | None,
    *,
    is_accuracy: bool,
    interrupted: bool,
) -> None:
    # A resumed run may have the evaluation switched off that it began with.
    made = trainer.run_folder.read_json("eval_before.json")
    earlier = {name: value for name, value in made.items() if name not in ("settings", "groups")} or None
    summary: dict[str, Any] = {
        "eval_before": earlier if before is None else before.as_dict(is_accuracy),
        "eval_after": None if after is None else after.as_dict(is_accuracy),
        "steps": trainer.state.global_step,
        "completions": trainer.state.global_step * trainer.plan.completions_per_step // trainer.plan.num_iterations,
        "tokens": trainer.state.num_input_tokens_seen,
        "peak_rss_bytes": peak_rss_bytes(),
        "seconds": {**clock.seconds, "total": clock.total(), **trainer.training_log.seconds},
        "interrupted": interrupted,
    }
    trainer.run_folder.write_json("summary.json", summary)


def _card(
    recipe: Recipe,
    trainer: GRPOTrainer,
    before: HeldOutResult | None,
    after: HeldOutResult | None,
    log: list[dict[str, Any]],
    *,
    is_accuracy: bool,
) -> str:
    folder = trainer.run_folder.path
    base = HUB_ID if recipe.model == "default" else recipe.model
    what = "accuracy" if is_accuracy else "mean reward"
    results = {}
    if before is not None and after is not None:
        results = {
            f"held-out {what} before": _shown(before, is_accuracy),
            f"held-out {what} after": _shown(after, is_accuracy),
            "change": _change(before, after, is_accuracy=is_accuracy),
        }
    source = f"the task {recipe.task}" if recipe.task else recipe.dataset.path  # type: ignore[union-attr]
    kwargs = trainer.config.chat_template_kwargs
    return model_card(
        title=folder.resolve().name,
        folder=str(folder),
        base_model=base,
        is_adapter=hasattr(trainer.model, "peft_config"),
        summary=f"{base}, {_primed(recipe)}trained for {pluralize(trainer.state.global_step, 'step')} of GRPO on "
        f"{source}; rewards: {', '.join(trainer.rewards.names)}.",
        results=results,
        recipe=to_yaml(recipe, with_defaults=False),
        log=log,
        example=trainer.train_rows[0].content,
        max_new_tokens=trainer.config.max_completion_length,
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else None,
    )


def _primed(recipe: Recipe) -> str:
    return "shown answers in a supervised phase, then " if recipe.sft is not None else ""


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _report(
    console: Console, before: HeldOutResult, after: HeldOutResult, rewards: Sequence[str], *, is_accuracy: bool
) -> None:
    console.print(_examples(before, after))
    what = "held-out accuracy" if is_accuracy else "held-out mean reward"
    say(console, f"[bold]{what}[/]  before {_shown(before, is_accuracy)}")
    say(console, f"{' ' * len(what)}  after  {_shown(after, is_accuracy)}")
    say(console, f"change    {_change(before, after, is_accuracy=is_accuracy)}")
    if len(rewards) > 1:
        for name, old, new in zip(rewards, before.means, after.means, strict=True):
            say(console, f"  {escape(name)}  {_mean(old)} before, {_mean(new)} after")


def _mean(score: float | None) -> str:
    return "no score" if score is None else f"{score:.2f}"


def _change(before: HeldOutResult, after: HeldOutResult, *, is_accuracy: bool) -> str:
    change = paired_difference(before.scores, after.scores)
    unit = (lambda value: f"{value * 100:+.1f} points") if is_accuracy else (lambda value: f"{value:+.2f}")
    return f"{unit(change.mean)}, 95 % interval {unit(change.low)} to {unit(change.high)}, by prompt"


def _warn_without_signal(console: Console, trainer: GRPOTrainer) -> None:
    name = "frac_reward_zero_std"
    shares = [entry[name] for entry in trainer.state.log_history if name in entry]
    if shares and min(shares) == 1.0:
        say(console, "[bold]nothing was learned[/]: in no step did the answers to a prompt get different rewards. See "
                     "docs/troubleshooting.md, and read single answers in completions.jsonl.")  # fmt: skip


def _examples(before: HeldOutResult, after: HeldOutResult, count: int = 3) -> Table:
    """The first sample of a few prompts, before and after."""
    table = Table(title="the same prompts, before and after", show_lines=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, overflow="fold")
    stride = max(len(before.groups) // count, 1)
    for old, new in list(zip(before.groups, after.groups, strict=True))[::stride][:count]:
        content = old["prompt"]
        prompt = content if isinstance(content, str) else str(content[-1]["content"])
        table.add_row(escape(prompt), *(escape(_with_reward(group)) for group in (old, new)))
    return table


def _with_reward(group: dict[str, Any]) -> str:
    answer = group["completions"][0]
    return f"{answer['text']}  (reward {answer['reward']:g})"


def _shown(result: HeldOutResult, is_accuracy: bool) -> str:
    interval, prompts = result.interval, len(result.groups)
    samples = pluralize(interval.n, "sample")
    if prompts < FEW_PROMPTS:
        samples += f" of only {pluralize(prompts, 'prompt')}, too few for the interval to mean much"
    if is_accuracy:
        return f"{interval.mean:.1%} (95 % interval {interval.low:.1%} to {interval.high:.1%}, {samples})"
    return f"{interval.mean:.2f} (95 % interval {interval.low:.2f} to {interval.high:.2f}, {samples})"
