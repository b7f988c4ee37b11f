"""Rows and rewards of a recipe: from a built-in task, a local file, or a dataset on the Hub."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grupo.data.decontamination import decontaminate
from grupo.data.prompts import select_rows
from grupo.errors import DataError
from grupo.rewards.answers.ground_truth import final_answer
from grupo.rewards.registry import make_reward
from grupo.tasks.registry import make_task, task_rewards
from grupo.utils.hub import is_unreachable
from grupo.utils.messages import pluralize

if TYPE_CHECKING:
    from grupo.recipes.schema import DatasetSpec, Recipe

LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT_SUFFIXES = (".json", ".jsonl", ".csv")


def recipe_rows(recipe: Recipe, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out rows.

    Raises:
        DataError: the data cannot be found or lacks the column with the question.
    """
    if recipe.dataset is None:
        task = make_task(recipe.task or "", seed, **recipe.task_arguments)
        return task.train, task.held_out
    spec = recipe.dataset
    rows = dataset_rows(spec)
    if spec.held_out >= len(rows):
        raise DataError(
            f"dataset.held_out={spec.held_out} leaves nothing to train on: {spec.path} has "
            f"{pluralize(len(rows), 'row')}."
        )
    held_out = sorted(random.Random(f"held out, seed {seed}").sample(range(len(rows)), spec.held_out))
    kept = sorted(set(range(len(rows))).difference(held_out))
    train = select_rows(rows, kept)
    return train, decontaminate(train, select_rows(rows, held_out))


def dataset_rows(spec: DatasetSpec) -> list[dict[str, Any]]:
    """All rows of a dataset, with the question as `prompt`; conversations in `messages` stay as they are.

    Raises:
        DataError: the data cannot be found or lacks the column with the question.
    """
    loaded = _load(spec)
    if "prompt" == spec.prompt not in loaded.column_names and "messages" in loaded.column_names:
        return [dict(row) for row in loaded]
    _check_columns(loaded.column_names, spec)
    return [_as_prompt(row, spec) for row in loaded]


def recipe_rewards(recipe: Recipe) -> tuple[list[Any], list[float]]:
    """Reward functions and weights; those of the task if the recipe names none."""
    specs = [(spec.name, spec.arguments, spec.weight) for spec in recipe.rewards]
    if not specs:
        rewards = task_rewards(recipe.task or "", **recipe.task_arguments)
        specs = [(name, arguments, 1.0) for name, arguments in rewards.items()]
    return [make_reward(name, **arguments) for name, arguments, _ in specs], [weight for *_, weight in specs]


def _load(spec: DatasetSpec) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    path = Path(spec.path)
    if path.suffix in LOADERS and not path.is_file():
        raise DataError(f"dataset.path={spec.path!r} is not a file.")
    if path.suffix in TEXT_SUFFIXES:
        _check_utf8(path)
    is_split_less = (path / "state.json").exists()
    if is_split_less and spec.split != "train":
        raise DataError(
            f"dataset.split={spec.split!r}: {spec.path} is one saved dataset without splits. Leave dataset.split out."
        )
    if spec.name is not None and (path.suffix in LOADERS or path.exists()):
        raise DataError(
            f"dataset.name={spec.name!r} has no effect: {spec.path} is local, and only datasets on the Hub have "
            "configurations. Leave dataset.name out."
        )
    if is_unreachable(spec.path) and not _is_cached(spec.path):
        raise DataError(
            f"dataset.path={spec.path!r} is not a local file or folder, and the Hub cannot be reached. Connect to the "
            "network, or give the path of a local file."
        )
    try:
        if path.suffix in LOADERS:
            return datasets.load_dataset(LOADERS[path.suffix], data_files=str(path), split=spec.split)
        if is_split_less:
            return datasets.load_from_disk(str(path))
        if (path / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(path / spec.split))
        return datasets.load_dataset(spec.path, spec.name, split=spec.split)
    except (DatasetsError, OSError, ValueError, StopIteration) as error:  # StopIteration: an empty file
        reason = str(error.__cause__ or error).strip().partition("\n")[0] or "it is empty"
        raise DataError(f"dataset.path={spec.path!r} cannot be read: {reason}") from error


def _is_cached(name: str) -> bool:
    """Whether an earlier run has cached the dataset, which can then be used without the Hub."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def _check_utf8(path: Path) -> None:
    """
    Raises:
        DataError: the file is not in UTF-8. The JSON reader would fail only when rows are used, without the line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"dataset.path={str(path)!r}: line {number} is not in UTF-8 (byte {error.start + 1} of it is "
                    f"0x{line[error.start]:02x}). Convert the file first, for example by "
                    f"iconv -f latin1 -t utf-8 {path.name}."
                ) from None


def _check_columns(names: list[str], spec: DatasetSpec) -> None:
    if spec.prompt not in names:
        raise DataError(
            f"dataset.prompt={spec.prompt!r} is not a column of {spec.path}; its columns are {', '.join(names)}. Set "
            "dataset.prompt to the column with the question."
        )
    for name in spec.rename:
        if name not in names or name == spec.prompt:
            raise DataError(
                f"dataset.rename names {name!r}, which is not a column besides the question; those are "
                f"{', '.join(other for other in names if other != spec.prompt) or 'none'}."
            )
    if spec.gold is not None and (spec.gold not in names or spec.gold == spec.prompt):
        raise DataError(
            f"dataset.gold={spec.gold!r} is not a column of {spec.path} besides the question; its columns are "
            f"{', '.join(names)}. Set dataset.gold to the column with the answers."
        )
    renamed = ["prompt", *(spec.rename.get(name, name) for name in names if name != spec.prompt)]
    if spec.gold is not None and spec.rename.get(spec.gold, spec.gold) != "answer":
        renamed.append("answer")
    for name in renamed:
        if renamed.count(name) > 1:
            raise DataError(
                f"Two columns of {spec.path} would be called {name!r}; the question becomes 'prompt'. Rename one of "
                f"them, for example dataset.rename={{{name}: other_{name}}}."
            )


def _as_prompt(row: dict[str, Any], spec: DatasetSpec) -> dict[str, Any]:
    columns = {spec.rename.get(name, name): value for name, value in row.items() if name != spec.prompt}
    if spec.gold is not None:
        columns["answer"] = final_answer(row[spec.gold])
    question = row[spec.prompt]
    if isinstance(question, str) and (spec.chat or spec.system):
        question = [{"role": "user", "content": question}]
    if spec.system and isinstance(question, list):
        question = [{"role": "system", "content": spec.system}, *question]
    return {**columns, "prompt": question}
