"""Progress of a run on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback

METRICS = {
    "reward": "reward {:.3f}",
    "frac_reward_zero_std": "zero-variance groups {:.0%}",
    "completions/mean_length": "length {:.1f}",
    "completions/clipped_ratio": "truncated {:.0%}",
    "kl": "kl {:.4f}",
    "step_time": "{:.1f} s/step",
}


def print_line(console: Console, text: str) -> None:
    """Prints one line that is not wrapped, whatever the width of the window: people search and copy lines."""
    console.print(text, highlight=False, soft_wrap=True)


def step_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}"),
        console=console,
        disable=not console.is_terminal,
    )


class ProgressLines(TrainerCallback):
    """Prints one line per log and updates a bar; estimates the remaining time after the second step."""

    def __init__(self, console: Console, bar: Progress, metrics: Mapping[str, str] = METRICS) -> None:
        self.console = console
        self.metrics = metrics
        self.bar = bar
        self._task: Any = None
        self._started = 0.0
        self._steps_at_start = 0
        self._printed_eta = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps_at_start = state.global_step
        self._started = time.perf_counter()
        self._task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step, eta="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step - self._steps_at_start
        eta = ""
        if done >= 2:
            left = (state.max_steps - state.global_step) * (time.perf_counter() - self._started) / done
            eta = f"about {format_duration(left)} left"
            if not self._printed_eta and left > 0:
                self._printed_eta = True
                print_line(self.console, f"after 2 steps: {eta}")
        self.bar.update(self._task, completed=state.global_step, eta=eta)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            values = [text.format(logs[name]) for name, text in self.metrics.items() if name in logs]
            print_line(self.console, f"step {state.global_step:>4}/{state.max_steps}  {'  '.join(values)}")


def format_duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min" if whole >= 60 else f"{whole} s"
