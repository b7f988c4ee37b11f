"""The rows that a recipe names: a built-in task, a local file, or a dataset on the Hub."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grupo.data.tasks import make_task
from grupo.errors import DataError

if TYPE_CHECKING:
    from grupo.recipe import DatasetSpec, Recipe

LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def recipe_rows(recipe: Recipe, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out rows.

    Raises:
        DataError: the data cannot be found or lacks the column with the question.
    """
    if recipe.dataset is None:
        task = make_task(recipe.task or "", seed)
        return task.train, task.held_out
    rows = [_as_prompt(row, recipe.dataset) for row in _load(recipe.dataset)]
    if recipe.dataset.held_out >= len(rows):
        raise DataError(
            f"dataset.held_out={recipe.dataset.held_out} leaves nothing to train on: {recipe.dataset.path} has {len(rows)} rows."
        )
    chosen = set(random.Random(f"held out, seed {seed}").sample(range(len(rows)), recipe.dataset.held_out))
    return (
        [row for index, row in enumerate(rows) if index not in chosen],
        [row for index, row in enumerate(rows) if index in chosen],
    )


def _load(spec: DatasetSpec) -> Any:
    import datasets

    path = Path(spec.path)
    if path.suffix in LOADERS:
        if not path.is_file():
            raise DataError(f"dataset.path={spec.path!r} is no file.")
        return datasets.load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
    if path.is_dir() and (path / "state.json").exists():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(spec.path, spec.name, split=spec.split)


def _as_prompt(row: dict[str, Any], spec: DatasetSpec) -> dict[str, Any]:
    if spec.prompt not in row:
        raise DataError(
            f"dataset.prompt={spec.prompt!r} is no column of {spec.path}; its columns are {', '.join(sorted(row))}. Set "
            "dataset.prompt to the column with the question."
        )
    columns = {spec.rename.get(name, name): value for name, value in row.items() if name != spec.prompt}
    question = row[spec.prompt]
    if isinstance(question, str) and (spec.chat or spec.system):
        question = [{"role": "user", "content": question}]
    if spec.system and not isinstance(question, str):
        question = [{"role": "system", "content": spec.system}, *question]
    return {**columns, "prompt": question}
