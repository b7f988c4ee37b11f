"""`grupo rewards check`: finds faults of rewards, given by a recipe or by name. Imports no torch."""

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
"""Keys in a run's completions.jsonl that are not columns of the dataset."""


def check(
    sources: Sequence[str],
    *,
    task: str | None = None,
    overrides: Sequence[str] = (),
    completions: str | None = None,
    gold_form: str | None = None,
    timeout: float = 10.0,
) -> RewardReport:
    """Checks the rewards of one recipe on its rows, or rewards given by name on the prompts of a task.

    Args:
        sources: one recipe file, one built-in recipe, or names as `make_reward` takes them.
        completions: file of JSON lines with `prompt` and `completion` or `completions`; other keys are dataset columns,
            needed only if the prompt is not among the rows of the recipe.

    Raises:
        ConfigError, DataError: a name, recipe or file cannot be used.
    """
    rewards, weights, rows = _rewards_and_rows(sources, task, overrides)
    if completions is not None:
        rows = _with_completions(rows, Path(completions))
    return check_rewards(rewards, rows, weights=weights, gold_form=gold_form, timeout=timeout)


def _rewards_and_rows(
    sources: Sequence[str], task: str | None, overrides: Sequence[str]
) -> tuple[list[Any], list[float], list[dict[str, Any]]]:
    """Rewards, weights and dataset rows."""
    if len(sources) == 1 and (sources[0] in built_in_recipes() or sources[0].endswith((".yaml", ".yml"))):
        recipe = load_recipe(sources[0], overrides)
        if task is not None:
            raise ConfigError(
                f"--task {task} is for rewards given by name: {sources[0]} is a recipe and has its own rows."
            )
        rewards, weights = recipe_rewards(recipe)
        train, held_out = recipe_rows(recipe, recipe.training.get("seed", 0))
        return rewards, weights, [*train, *held_out]
    if overrides:
        raise ConfigError("--set changes a recipe, but no recipe was given: name one instead of rewards.")
    made = make_task(task or "times-tables")
    return [make_reward(name) for name in sources], [1.0] * len(sources), [*made.train, *made.held_out]


def _with_completions(rows: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows of the prompts in the file, with the sampled completions as `completions`."""
    if not path.is_file():
        raise DataError(f"--completions {path}: the file does not exist.")
    known = {json.dumps(row["prompt"], sort_keys=True): row for row in rows}
    found: dict[str, dict[str, Any]] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--completions {path} is not in UTF-8 (byte {error.start + 1}). Convert the file first."
        ) from None
    # Not splitlines: a completion may contain a Unicode line separator, which JSON does not escape.
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
                f"--completions {path}, line {number}: expected a JSON object with `prompt` and `completion` (text) "
                "or `completions` (several, or objects with `text`)."
            ) from error
        own = {name: value for name, value in entry.items() if name not in NOT_COLUMNS}
        row = known.get(prompt, {"prompt": entry["prompt"], **own} if own else None)
        if row is None:
            raise DataError(
                f"--completions {path}, line {number}: the prompt is not one of the {len(rows)} prompts of the recipe "
                "or task, and the line has no other columns. Was it sampled with another task, seed or system message?"
            )
        found.setdefault(prompt, {**row, "completions": []})["completions"] += texts
    if not found:
        raise DataError(f"--completions {path} is empty.")
    return list(found.values())


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list of completions")
    return value


def _text(item: Any) -> str:
    """The text of a completion, which may be a string, an object with `text`, or a list of messages."""
    text = item["text"] if isinstance(item, dict) and "text" in item else completion_text(item)
    if not isinstance(text, str):
        raise TypeError("not text")
    return text
