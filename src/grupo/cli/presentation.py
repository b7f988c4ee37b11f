"""Texts of `grupo train`: header, memory estimate, results, and the model card of the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grupo.cli.held_out_eval import Evaluation, HeldOutResults
from grupo.cli.progress import print_line
from grupo.data.prompts import Rows
from grupo.evals.held_out import FEW_PROMPTS, HeldOutResult
from grupo.evals.statistics import paired_difference
from grupo.models.default_model import HUB_ID
from grupo.models.memory import free_bytes
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import to_yaml
from grupo.runs.model_card import model_card
from grupo.trainer import GRPOTrainer
from grupo.trainer.memory_estimate import format_bytes, memory_estimate
from grupo.utils.messages import pluralize


def print_header(console: Console, recipe: Recipe, trainer: GRPOTrainer, held_out_rows: Rows) -> None:
    share = trainer.policy.trainable_parameters / trainer.policy.total_parameters
    source = recipe.task or recipe.dataset.path  # type: ignore[union-attr]
    name = "SmolLM2-135M-Instruct (the default)" if recipe.model == "default" else recipe.model
    print_line(
        console,
        f"[bold]model[/]    {escape(name)}, {trainer.policy.total_parameters / 1e6:.1f} M parameters, "
        f"{trainer.policy.trainable_parameters / 1e6:.2f} M of them trainable ({share:.2%})",
    )
    print_line(
        console,
        f"[bold]task[/]     {escape(source)}: {pluralize(len(trainer.train_rows), 'training prompt')}, "
        f"{len(held_out_rows)} held out; rewards {', '.join(trainer.rewards.names)}",
    )
    for line in trainer.plan.describe():
        _print_named(console, line)
    trainer.printed_plan = trainer.printed_loss_hint = True
    if trainer.reference is not None:
        print_line(console, f"[bold]KL[/]       against {trainer.reference.description}")
    steps = trainer.plan.total_steps(trainer.config.num_train_epochs, trainer.config.max_steps)
    print_line(
        console,
        f"[bold]run[/]      {pluralize(steps, 'optimizer step')}, "
        f"{pluralize(steps * trainer.plan.completions_per_step, 'completion')}, "
        f"into {escape(str(trainer.run_folder.path))}",
    )


def print_memory(console: Console, trainer: GRPOTrainer, evaluation: Evaluation | None) -> None:
    """The estimated peak memory of the run, next to what is free."""
    free = free_bytes(trainer.accelerator.device)
    rows = [*trainer.train_rows, *(evaluation.prompts if evaluation is not None else ())]
    answers = 0 if evaluation is None else len(evaluation.prompts) * evaluation.samples_per_prompt
    estimate = memory_estimate(
        trainer.model,
        trainer.config,
        prompt_tokens=max(len(row.token_ids) for row in rows),
        eval_rows=min(answers // trainer.config.world_size, trainer.eval_completions_at_once() or answers),
        free=free,
        checkpointing=bool(trainer.args.gradient_checkpointing),
    )
    if estimate is None:
        print_line(
            console, "memory: not known, because the configuration of this model does not give the sizes of its layers"
        )
        return
    for line in estimate.describe():
        _print_named(console, line)
    if free is not None:
        print_line(console, estimate.warning(free) or f"  free next to the loaded model: {format_bytes(free)}")


def _print_named(console: Console, line: str) -> None:
    name, _, text = line.partition(": ")
    print_line(console, f"[bold]{name}[/]: {text}" if text else line)


def warn_without_signal(console: Console, trainer: GRPOTrainer) -> None:
    name = "frac_reward_zero_std"
    shares = [entry[name] for entry in trainer.state.log_history if name in entry]
    if shares and min(shares) == 1.0:
        print_line(
            console,
            "[bold]nothing was learned[/]: in every step, all answers to a prompt got the same reward. See "
            "docs/troubleshooting.md, and read some of the answers in completions.jsonl.",
        )


def print_results(console: Console, results: HeldOutResults, reward_names: Sequence[str]) -> None:
    before, after, is_accuracy = results.before, results.after, results.is_accuracy
    if before is None or after is None:
        return
    console.print(_examples(before, after))
    quantity = f"held-out {results.quantity}"
    print_line(console, f"[bold]{quantity}[/]  before {format_result(before, is_accuracy)}")
    print_line(console, f"{' ' * len(quantity)}  after  {format_result(after, is_accuracy)}")
    print_line(console, f"change    {_format_change(before, after, is_accuracy)}")
    if len(reward_names) > 1:
        for name, old, new in zip(reward_names, before.means, after.means, strict=True):
            print_line(console, f"  {escape(name)}  {_format_mean(old)} before, {_format_mean(new)} after")


def print_next_steps(console: Console, folder: Path, *, interrupted: bool) -> None:
    print_line(console, f"run folder  {escape(str(folder))}")
    if interrupted and any(folder.glob("checkpoint-*")):
        print_line(console, f"to resume   grupo train {escape(shlex.quote(str(folder / 'recipe.yaml')))} --resume")


def run_card(recipe: Recipe, trainer: GRPOTrainer, results: HeldOutResults, log: list[dict[str, Any]]) -> str:
    folder = trainer.run_folder.path
    base = HUB_ID if recipe.model == "default" else recipe.model
    before, after, is_accuracy = results.before, results.after, results.is_accuracy
    measured = {}
    if before is not None and after is not None:
        measured = {
            f"held-out {results.quantity} before": format_result(before, is_accuracy),
            f"held-out {results.quantity} after": format_result(after, is_accuracy),
            "change": _format_change(before, after, is_accuracy),
        }
    source = f"the task {recipe.task}" if recipe.task else recipe.dataset.path  # type: ignore[union-attr]
    supervised = "" if recipe.sft is None else "shown answers in a supervised phase, then "
    kwargs = trainer.config.chat_template_kwargs
    return model_card(
        title=folder.resolve().name,
        folder=str(folder),
        base_model=base,
        is_adapter=hasattr(trainer.model, "peft_config"),
        summary=f"{base}, {supervised}trained for {pluralize(trainer.state.global_step, 'step')} of GRPO on {source}; "
        f"rewards: {', '.join(trainer.rewards.names)}.",
        results=measured,
        recipe=to_yaml(recipe, with_defaults=False),
        log=log,
        example=trainer.train_rows[0].content,
        max_new_tokens=trainer.config.max_completion_length,
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else None,
    )


def format_result(result: HeldOutResult, is_accuracy: bool) -> str:
    interval, prompts = result.interval, len(result.groups)
    samples = pluralize(interval.n, "sample")
    if prompts < FEW_PROMPTS:
        samples += f" of only {pluralize(prompts, 'prompt')}, too few for a reliable interval"
    if is_accuracy:
        return f"{interval.mean:.1%} (95 % interval {interval.low:.1%} to {interval.high:.1%}, {samples})"
    return f"{interval.mean:.2f} (95 % interval {interval.low:.2f} to {interval.high:.2f}, {samples})"


def _format_change(before: HeldOutResult, after: HeldOutResult, is_accuracy: bool) -> str:
    change = paired_difference(before.scores, after.scores)
    unit = (lambda value: f"{value * 100:+.1f} points") if is_accuracy else (lambda value: f"{value:+.2f}")
    return f"{unit(change.mean)}, 95 % interval {unit(change.low)} to {unit(change.high)}, by prompt"


def _format_mean(score: float | None) -> str:
    return "no score" if score is None else f"{score:.2f}"


def _examples(before: HeldOutResult, after: HeldOutResult, count: int = 3) -> Table:
    """The first sample of a few prompts, before and after training."""
    table = Table(title="the same prompts, before and after", show_lines=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, overflow="fold")
    stride = max(len(before.groups) // count, 1)
    for old, new in list(zip(before.groups, after.groups, strict=True))[::stride][:count]:
        content = old["prompt"]
        prompt = content if isinstance(content, str) else str(content[-1]["content"])
        answers = [group["completions"][0] for group in (old, new)]
        table.add_row(escape(prompt), *(escape(f"{one['text']}  (reward {one['reward']:g})") for one in answers))
    return table
