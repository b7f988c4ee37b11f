"""Training progress on the model card: a table of a few steps, and a plot of the reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REWARD_CURVE = "reward.svg"
COLUMNS = {
    "reward": ("reward", "{:.3f}"),
    "frac_reward_zero_std": ("zero-variance groups", "{:.0%}"),
    "completions/mean_length": ("tokens", "{:.1f}"),
    "completions/clipped_ratio": ("truncated", "{:.0%}"),
    "entropy": ("entropy", "{:.3f}"),
}
WIDTH, HEIGHT, MARGIN = 640, 240, 48
"""Size of the plot in pixels."""


def training_log(metrics_file: Path) -> list[dict[str, Any]]:
    """Training lines of `metrics.jsonl` with a finite `reward`; empty if there is no file."""
    if not metrics_file.is_file():
        return []
    lines = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line for line in lines if "loss" in line and isinstance(line.get("reward"), int | float)]


def metrics_table(log: list[dict[str, Any]], rows: int = 8) -> list[str]:
    """A Markdown table of up to `rows` logged steps, the first and the last included."""
    count = min(rows, len(log))
    chosen = [log[i * (len(log) - 1) // max(count - 1, 1)] for i in range(count)]
    columns = [name for name in COLUMNS if any(name in line for line in chosen)]
    header = ["step", *(COLUMNS[name][0] for name in columns)]
    cells = [[str(line["step"]), *(_cell(line, name) for name in columns)] for line in chosen]
    return [f"| {' | '.join(row)} |" for row in (header, ["---:"] * len(header), *cells)]


def _cell(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    return COLUMNS[name][1].format(value) if isinstance(value, int | float) else ""


def reward_svg(log: list[dict[str, Any]]) -> str | None:
    """SVG of the mean reward by step, as points and their moving average; None for fewer than two points."""
    if len(log) < 2:
        return None
    steps, rewards = [line["step"] for line in log], [float(line["reward"]) for line in log]
    low, high = min(rewards), max(rewards)
    middle = (low + high) / 2
    span = (high - low) or 1.0
    first, last = steps[0], steps[-1]

    def place(step: float, reward: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / ((last - first) or 1)
        y = HEIGHT / 2 - (HEIGHT - 2 * MARGIN) * (reward - middle) / span
        return round(x, 1), round(y, 1)

    window = max(len(log) // 10, 1)
    means = [sum(rewards[max(i - window + 1, 0) : i + 1]) / min(window, i + 1) for i in range(len(log))]
    points = "".join(
        '<circle cx="{}" cy="{}" r="2"/>'.format(*place(*pair)) for pair in zip(steps, rewards, strict=True)
    )
    line = " ".join("{},{}".format(*place(*pair)) for pair in zip(steps, means, strict=True))
    labels = [
        _label(MARGIN - 6, place(first, high)[1], "end", f"{high:.3g}"),
        _label(MARGIN - 6, place(first, low)[1], "end", f"{low:.3g}"),
        _label(MARGIN, HEIGHT - 16, "start", f"step {first}"),
        _label(WIDTH - MARGIN, HEIGHT - 16, "end", f"step {last}"),
        _label(WIDTH / 2, 22, "middle", f"mean reward, and its average over {window} logged steps"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        f'<g fill="#9aa5b1">{points}</g>\n'
        f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>\n'
        f"{''.join(labels)}\n</svg>\n"
    )


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
