"""Completions as a table, printed and in one parquet file per log: `log_completions=True`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grupo.types import Group
from grupo.utils.files import write_errors_as

logger = logging.getLogger("grupo")

PENDING = "grupo_completions.parquet"


class CompletionTable:
    """Collects completions between two logs in TRL's columns: step, prompt, completion, one per reward, those of
    `log_extra`, and advantage.

    Args:
        rows_to_print: maximum number of printed rows; None prints all. The file always has all of them.
        unique_prompts: show one row per prompt.
    """

    def __init__(
        self, folder: Path, reward_names: Sequence[str], *, rows_to_print: int | None, unique_prompts: bool, rank: int
    ) -> None:
        self.folder = folder / "completions"
        self.reward_names = tuple(reward_names)
        self.rows_to_print = rows_to_print
        self.unique_prompts = unique_prompts
        self.rank = rank
        self._rows: list[dict[str, Any]] = []
        self._warned: set[str] = set()

    def add(self, groups: Sequence[Group], step: int, extras: Mapping[str, Sequence[Any]]) -> None:
        """Adds the completions of a rollout; `extras` has one value per completion, group after group."""
        position = 0
        for group in groups:
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
                row: dict[str, Any] = {
                    "step": step,
                    "prompt": _prompt_text(group.prompt.content),
                    "completion": rollout.completion.text,
                    "advantage": advantage,
                }
                for name, score in zip(self.reward_names, rollout.scores, strict=True):
                    row[name if name not in row else f"reward/{name}"] = score
                for name, values in extras.items():
                    row[name if name not in row else f"extra/{name}"] = values[position]
                # Last, as in TRL's table.
                row["advantage"] = row.pop("advantage")
                self._rows.append(row)
                position += 1

    def show(self, step: int) -> None:
        """Prints and writes what was added since the last call, on rank 0."""
        rows, self._rows = self._rows, []
        if self.unique_prompts:
            rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
        if not rows or self.rank != 0:
            return
        with write_errors_as(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(rows, self.folder / f"completions_{step:05d}.parquet")
        _print_table(rows[: self.rows_to_print], step)

    def save(self, folder: Path) -> None:
        """Saves rows that were not shown yet in a checkpoint."""
        if self._rows and self.rank == 0:
            self._write(self._rows, folder / PENDING)

    def load(self, folder: Path) -> None:
        """Restores the rows that `save` left in a checkpoint."""
        import pyarrow.parquet as pq

        path = folder / PENDING
        self._rows = pq.read_table(path).to_pylist() if path.is_file() else []

    def _write(self, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
        """Writes a column as text if its values have no common type, which parquet needs."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [_to_python(row.get(name)) for row in rows]
            kinds = {type(value) for value in values if value is not None}
            try:
                if len(kinds) > 1 and not kinds <= {int, float}:
                    raise TypeError("pyarrow would convert some mixtures to one type: a date and 1 to two dates")
                columns[name] = pa.array(values)
                pq.write_table(pa.table({name: columns[name]}), pa.BufferOutputStream())
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                columns[name] = pa.array([None if value is None else _encodable(value) for value in values])
                if name not in self._warned:
                    self._warned.add(name)
                    logger.warning(
                        "The values of %r, from log_extra, have no common type for a table column: they are written as "
                        "text.",
                        name,
                    )
        pq.write_table(pa.table(columns), path)


def _to_python(value: Any) -> Any:
    """A numpy or zero-dimensional torch number as a Python number."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _encodable(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _print_table(rows: Sequence[Mapping[str, Any]], step: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"step {step}", show_lines=True)
    # Columns of `log_extra` may be missing in rows of rollouts that did not log them (TRL issue #7310).
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        values = [row.get(name, "") for name in columns]
        table.add_row(*(Text(f"{value:.2f}" if isinstance(value, float) else str(value)) for value in values))
    Console().print(table)


def _prompt_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(f"{message['role']}: {message['content']}" for message in content)
