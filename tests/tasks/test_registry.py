"""All tasks by name: the same seed gives the same items, no item is on both sides, wrong arguments are refused."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from grupo.data.decontamination import find_overlap, normalize_text
from grupo.errors import ConfigError
from grupo.rewards import make_reward
from grupo.tasks.registry import TASKS, describe_tasks, make_task, task_rewards


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_is_a_task_without_an_item_on_both_sides(name: str) -> None:
    tasks = [make_task(name, seed) for seed in (3, 3, 4)]
    assert tasks[0] == tasks[1] and tasks[0].held_out != tasks[2].held_out
    for task in tasks[1:]:
        assert not find_overlap(task.train, task.held_out)
        texts = [normalize_text(row["prompt"][0]["content"]) for row in task.train + task.held_out]
        assert len(set(texts)) == len(texts)
        assert all([message["role"] for message in row["prompt"]] == ["user"] for row in task.train)
    assert task_rewards(name) == tasks[0].rewards
    for reward, arguments in tasks[0].rewards.items():
        make_reward(reward, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("time-table", {}, "Did you mean 'times-tables'"),
        ("times-tables", {"level": 9}, "has the levels 1 to 4"),
        ("short-stories", {"level": 1}, "unexpected keyword argument 'level'"),
        ("countdown", {"level": 5}, "Task 'countdown' has no level 5: it has the levels 1 to 4."),
        ("countdown", {"level": 0}, "has no level 0"),
        ("countdown", {"level": "2"}, "has no level '2'"),
        ("countdown", {"level": True}, "has no level True"),
        ("countdown", {"level": []}, "has no level None"),
        ("countdown", {"level": None}, "has no level None"),
        ("countdown", {"level": 1.5}, "has no level 1.5"),
        ("countdown", {"level": [1, 1]}, "names a level twice"),
        ("sorting", {"train": 0}, "train=0 must be a number of prompts, at least 1"),
        ("sorting", {"held_out": -1}, "held_out=-1 must be a number of prompts, at least 0"),
        ("sorting", {"size": 9}, "unexpected keyword argument 'size'. It takes (level, train, held_out)"),
        ("reasoning-gym:chain_sum", {"settings": "hard"}, "settings='hard' is not a mapping"),
        ("reasoning-gym:chain_sum", {"settings": {"terms": 3}}, "rejects the settings of 'chain_sum'"),
        ("reasoning-gym:chain_sum", {"settings": {"min_terms": 0}}, "rejects the settings of 'chain_sum'"),
        ("reasoning-gym:chain_sum", {"level": 0}, "no level 0: 1 is the easiest"),
        ("reasoning-gym:gsm_symbolic", {"level": 1}, "'gsm_symbolic' of reasoning-gym has no levels"),
        ("reasoning-gym:chain_sums", {}, "Did you mean 'chain_sum'"),
        (
            "reasoning-gym:chain_sum",
            {"settings": {"min_terms": 1, "max_terms": 1, "max_digits": 1}, "train": 11, "held_out": 0},
            "too few different items: 10 more were found where 11 are needed",
        ),
    ],
)
def test_what_a_task_cannot_give_is_refused(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_task(name, **arguments)


def test_without_reasoning_gym_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for name in ("countdown", "reasoning-gym:chain_sum"):
        with pytest.raises(ConfigError, match="pip install reasoning-gym"):
            make_task(name)
    assert "sample: 'Combine the numbers" in "\n".join(describe_tasks())
    assert make_task("times-tables").train and make_task("short-stories").train
