"""`grupo rewards check`: faults of the rewards of a recipe, or of rewards named one by one. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grupo.errors import ConfigError, DataError
from grupo.recipes.data import recipe_rewards, recipe_rows
from grupo.recipes.yaml_io import built_in_recipes, load_recipe
from grupo.rewards.answers.extraction import completion_text
from grupo.rewards.checker.check import check_rewards
from grupo.rewards.checker.report import RewardReport
from grupo.rewards.registry import make_reward
from grupo.tasks.registry import make_task

NOT_COLUMNS = {"prompt", "completion", "completions", "step", "row", "prompt_id", "replaced"}
"""What a line of a run's completions.jsonl has beside the columns of the dataset."""


def check(
    sources: Sequence[str],
    *,
    task: str | None = None,
    overrides: Sequence[str] = (),
    completions: str | None = None,
    gold_form: str | None = None,
    timeout: float = 10.0,
) -> RewardReport:
    """Checks the rewards of one recipe on its rows, or named rewards on the prompts of a task.

    Args:
        sources: one recipe file, one built-in recipe, or names as `make_reward` takes them.
        completions: file of JSON lines with `prompt` and `completion` or `completions`; other keys are dataset columns,
            needed only where the rows of the recipe do not have the prompt.

    Raises:
        ConfigError, DataError: a name, a recipe or a file that cannot be used.
    """
    rewards, weights, rows = _subject(sources, task, overrides)
    if completions is not None:
        rows = _with_completions(rows, Path(completions))
    return check_rewards(rewards, rows, weights=weights, gold_form=gold_form, timeout=timeout)


def _subject(
    sources: Sequence[str], task: str | None, overrides: Sequence[str]
) -> tuple[list[Any], list[float], list[dict[str, Any]]]:
    """Rewards, weights and dataset rows."""
    if len(sources) == 1 and (sources[0] in built_in_recipes() or sources[0].endswith((".yaml", ".yml"))):
        recipe = load_recipe(sources[0], overrides)
        if task is not None:
            raise ConfigError(
                f"--task {task} is for rewards given by name: {sources[0]} is a recipe, with its own rows."
            )
        rewards, weights = recipe_rewards(recipe)
        train, held_out = recipe_rows(recipe, recipe.training.get("seed", 0))
        return rewards, weights, [*train, *held_out]
    if overrides:
        raise ConfigError("--set changes a recipe, and none is given: name one instead of rewards.")
    made = make_task(task or "times-tables")
    return [make_reward(name) for name in sources], [1.0] * len(sources), [*made.train, *made.held_out]


def _with_completions(rows: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows that the sampled completions of a file belong to, with these as `completions`."""
    if not path.is_file():
        raise DataError(f"--completions {path}: there is no such file.")
    known = {json.dumps(row["prompt"], sort_keys=True): row for row in rows}
    found: dict[str, dict[str, Any]] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--completions {path} is not in UTF-8 (byte {error.start + 1}). Convert the file first."
        ) from None
    # Not splitlines: a completion may hold a line separator of Unicode, which JSON leaves as it is.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = json.dumps(entry["prompt"], sort_keys=True)
            several = entry["completions"] if "completions" in entry else [entry["completion"]]
            texts = [_text(item) for item in _list(several)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"--completions {path}, line {number}: it needs a JSON object with `prompt` and `completion` (a text) "
                "or `completions` (several, or objects with `text`)."
            ) from error
        own = {name: value for name, value in entry.items() if name not in NOT_COLUMNS}
        row = known.get(prompt, {"prompt": entry["prompt"], **own} if own else None)
        if row is None:
            raise DataError(
                f"--completions {path}, line {number}: its prompt is none of the {len(rows)} prompts of the recipe or "
                "task, and the line has no other columns. Was it made with another task, seed or system message?"
            )
        found.setdefault(prompt, {**row, "completions": []})["completions"] += texts
    if not found:
        raise DataError(f"--completions {path} is empty.")
    return list(found.values())


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list of completions")
    return value


def _text(item: Any) -> str:
    """A completion as a line of a file has it: a text, an object with `text`, or a list of messages."""
    text = item["text"] if isinstance(item, dict) and "text" in item else completion_text(item)
    if not isinstance(text, str):
        raise TypeError("no text")
    return text
