"""`docs/rewards.md` is true: its examples run, and its table has every reward and its range."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grupo.recipes.schema import Recipe
from grupo.rewards import REWARDS, make_reward, reward_name

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "token_length": {"target": 3},
    "soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 2},
    "cosine_scaled": {"max_len": 10},
    "llm_judge": {"base_url": "http://localhost:8000/v1", "model": "judge", "rubric": "politeness"},
    "reward_model": {"model": "someone/model"},
}
RANGES = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    examples = blocks("python")
    assert len(examples) == 6
    for example in examples:
        exec(example, names)


def test_the_recipes_name_rewards_that_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipes = [Recipe.model_validate(yaml.safe_load(text)) for text in blocks("yaml")]
    rewards = [make_reward(spec.name, **spec.arguments) for recipe in recipes for spec in recipe.rewards or []]
    assert [reward_name(reward) for reward in rewards] == [
        *("gsm8k_correctness", "gsm8k_soft_format", "proximity", "tone", "language_consistency", "readability"),
    ]


def test_the_table_has_every_reward() -> None:
    assert sorted(RANGES) == sorted(REWARDS)


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "rubric"])
def test_the_table_states_the_ranges(name: str) -> None:
    lowest, highest = make_reward(name, **ARGUMENTS.get(name, {})).value_range
    assert RANGES[name] == f"{lowest:g} to {highest:g}"
