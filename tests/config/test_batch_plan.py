"""The batch arithmetic: what fits is planned, what does not is refused with settings that fit."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.config.batch_plan import StepPlan
from grupo.errors import ConfigError


def plan_of(
    batch: int = 8,
    accumulation: int = 1,
    group: int = 8,
    *,
    steps_per_generation: int | None = None,
    generation_batch_size: int | None = None,
    passes: int = 1,
    prompts: int | None = None,
    processes: int = 1,
) -> StepPlan:
    config: Any = SimpleNamespace(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_generations=group,
        steps_per_generation=steps_per_generation,
        generation_batch_size=generation_batch_size,
        num_iterations=passes,
    )
    return StepPlan.from_config(config, num_prompts=prompts, world_size=processes)


def test_defaults_are_one_group_per_step() -> None:
    plan = plan_of(prompts=100)
    assert (plan.completions_per_step, plan.completions_per_rollout, plan.prompts_per_rollout) == (8, 8, 1)
    assert (plan.steps_per_rollout, plan.rollouts_per_step, plan.steps_per_generation) == (1, 1, 1)
    assert (plan.rollouts_per_epoch, plan.steps_per_epoch, plan.dropped_prompts_per_epoch) == (100, 100, 0)
    assert plan.original_accumulation is None


def test_group_that_does_not_fit_is_refused_with_settings_that_fit() -> None:
    with pytest.raises(ConfigError, match=r"\b5\b.*num_generations=6") as refusal:
        plan_of(batch=5, group=6)
    assert suggestions(str(refusal.value)) == [
        ("per_device_train_batch_size", 6),
        ("gradient_accumulation_steps", 6),
        ("num_generations", 5),
    ]
    for accumulation, batch, group in ((1, 6, 6), (6, 5, 6), (1, 5, 5)):
        assert plan_of(batch, accumulation, group).completions_per_rollout % group == 0


def test_one_completion_per_forward_fills_a_group_by_accumulation() -> None:
    plan = plan_of(batch=1, accumulation=6, group=6, prompts=7)
    assert plan.original_accumulation is None
    assert (plan.completions_per_step, plan.prompts_per_rollout, plan.steps_per_epoch) == (6, 1, 7)


def test_accumulation_is_raised_to_fill_one_group_and_says_so() -> None:
    plan = plan_of(batch=1, group=8, prompts=3)
    assert (plan.original_accumulation, plan.gradient_accumulation_steps, plan.steps_per_generation) == (1, 8, 8)
    assert (plan.completions_per_step, plan.steps_per_epoch) == (8, 3)
    raised = [line for line in plan.describe() if "raised from 1 to 8" in line]
    assert len(raised) == 1 and "8 completions" in raised[0]


def test_accumulation_is_raised_over_processes() -> None:
    plan = plan_of(batch=1, accumulation=2, group=8, processes=2)
    assert (plan.original_accumulation, plan.gradient_accumulation_steps, plan.completions_per_step) == (2, 4, 8)


def test_a_set_rollout_size_is_not_overruled_by_a_raise() -> None:
    plan = plan_of(batch=1, group=8, steps_per_generation=8)
    assert plan.original_accumulation is None
    # One completion per step: every step holds an eighth of a group.
    assert (plan.completions_per_step, plan.steps_per_rollout) == (1, 8)
    with pytest.raises(ConfigError, match="steps_per_generation=8"):
        plan_of(batch=1, group=8, steps_per_generation=1)
    assert plan_of(batch=1, group=8, generation_batch_size=8).steps_per_generation == 8


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        plan_of(batch=1, group=1)


def test_a_dataset_smaller_than_a_rollout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 prompts.*needs 4"):
        plan_of(batch=8, accumulation=4, group=8, prompts=3)
    with pytest.raises(ConfigError, match="0 prompts"):
        plan_of(prompts=0)


def test_a_dataset_smaller_than_a_step_of_several_rollouts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 prompts.*2 rollouts.*needs 4"):
        plan_of(batch=4, accumulation=4, group=4, steps_per_generation=2, prompts=3)


def test_what_an_epoch_has_left_over_is_stated() -> None:
    plan = plan_of(batch=8, accumulation=2, group=8, prompts=5)
    assert (plan.steps_per_epoch, plan.dropped_prompts_per_epoch) == (2, 1)
    assert "1 of 5 prompts" in plan.describe()[-1]
    assert "dropped" not in " ".join(plan_of(batch=8, accumulation=2, group=8, prompts=4).describe())


def test_a_rollout_for_several_steps() -> None:
    plan = plan_of(batch=4, accumulation=2, group=4, steps_per_generation=8, prompts=20)
    assert (plan.completions_per_rollout, plan.prompts_per_rollout) == (32, 8)
    assert (plan.steps_per_rollout, plan.rollouts_per_step) == (4, 1)
    assert (plan.rollouts_per_epoch, plan.steps_per_epoch, plan.dropped_prompts_per_epoch) == (2, 8, 4)


def test_a_step_of_several_rollouts() -> None:
    plan = plan_of(batch=4, accumulation=6, group=4, steps_per_generation=2, prompts=20)
    assert (plan.prompts_per_rollout, plan.rollouts_per_step, plan.steps_per_rollout) == (2, 3, 1)
    # Three steps take 18 prompts; a tenth rollout would fill no step.
    assert (plan.rollouts_per_epoch, plan.steps_per_epoch, plan.dropped_prompts_per_epoch) == (9, 3, 2)
    assert "3 rollouts per optimizer step" in " ".join(plan.describe())


def test_several_passes_over_a_rollout() -> None:
    plan = plan_of(batch=4, accumulation=2, group=4, steps_per_generation=2, passes=3, prompts=10)
    assert (plan.steps_per_rollout, plan.rollouts_per_epoch, plan.steps_per_epoch) == (3, 5, 15)
    # Two passes over half a step's worth: both passes make one step.
    assert plan_of(batch=4, accumulation=2, group=4, steps_per_generation=1, passes=2).steps_per_rollout == 1
    with pytest.raises(ConfigError, match="num_iterations=2"):
        plan_of(batch=4, accumulation=4, group=4, steps_per_generation=1, passes=2)


def test_rollout_and_step_must_fit_into_each_other() -> None:
    with pytest.raises(ConfigError, match=r"3 micro-batches.*gradient_accumulation_steps=2"):
        plan_of(batch=4, accumulation=2, group=4, steps_per_generation=3)


def test_generation_batch_size() -> None:
    plan = plan_of(batch=4, accumulation=1, group=8, generation_batch_size=32, processes=2)
    assert (plan.steps_per_generation, plan.completions_per_rollout, plan.steps_per_rollout) == (4, 32, 4)
    with pytest.raises(ConfigError, match="generation_batch_size=12"):
        plan_of(batch=8, group=4, generation_batch_size=12)
    with pytest.raises(ConfigError, match="generation_batch_size=4 "):
        plan_of(batch=8, group=4, generation_batch_size=4)
    with pytest.raises(ConfigError, match="set one of them"):
        plan_of(steps_per_generation=2, generation_batch_size=16)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (0.5, 5), (0.25, 3), (2.5, 25)])
def test_total_steps_by_epochs(epochs: float, steps: int) -> None:
    assert plan_of(prompts=10).total_steps(epochs, -1) == steps


def test_total_steps_by_number() -> None:
    assert plan_of(prompts=10).total_steps(3.0, 4) == 4
    assert plan_of().total_steps(3.0, 4) == 4
    with pytest.raises(ConfigError, match="max_steps"):
        plan_of().total_steps(3.0, -1)


@pytest.mark.parametrize("epochs", [0.1, 0.7, 1, 2.5, 3])
@pytest.mark.parametrize("max_steps", [-1, 17])
def test_total_steps_are_those_of_transformers(epochs: float, max_steps: int) -> None:
    from transformers import Trainer

    plan = plan_of(prompts=10)
    trainer: Any = SimpleNamespace(
        get_total_train_batch_size=lambda args: 8, get_sp_size=lambda: 1, num_examples=lambda loader: len(loader)
    )
    args = SimpleNamespace(max_steps=max_steps, num_train_epochs=epochs, gradient_accumulation_steps=1)
    assert plan.steps_per_epoch is not None
    steps = Trainer.set_initial_training_values(trainer, args, range(plan.steps_per_epoch))[-1]  # type: ignore[arg-type]
    assert plan.total_steps(epochs, max_steps) == steps


def suggestions(message: str) -> list[tuple[str, int]]:
    names = "per_device_train_batch_size|gradient_accumulation_steps|num_generations|steps_per_generation"
    _, fits, listed = message.partition("fits: ")
    found = re.findall(rf"({names}|generation_batch_size)=(\d+)", listed) if fits else []
    return [(name, int(value)) for name, value in found]


small = st.integers(1, 12)


@settings(max_examples=400, deadline=None)
@given(small, small, st.integers(2, 12), st.none() | small, st.integers(1, 3), st.integers(1, 3), st.integers(1, 60))
def test_a_plan_adds_up_or_the_advice_fits(
    batch: int, accumulation: int, group: int, window: int | None, passes: int, processes: int, prompts: int
) -> None:
    wanted = {
        "batch": batch,
        "accumulation": accumulation,
        "group": group,
        "steps_per_generation": window,
        "passes": passes,
        "processes": processes,
        "prompts": prompts,
    }
    try:
        plan = plan_of(**wanted)  # type: ignore[arg-type]
    except ConfigError as refusal:
        fits = fits_by_the_rules(batch, accumulation, group, window, passes, processes) and prompts >= prompts_needed(
            batch, accumulation, group, window, passes, processes
        )
        assert not fits
        keyword = {
            "per_device_train_batch_size": "batch",
            "gradient_accumulation_steps": "accumulation",
            "num_generations": "group",
            "steps_per_generation": "steps_per_generation",
        }
        offered = suggestions(str(refusal))
        for name, value in offered:
            plan_of(**{**wanted, keyword[name]: value})  # type: ignore[arg-type]
        together = re.search(r"fit together: per_device_train_batch_size=(\d+)", str(refusal))
        if together is not None:
            plan_of(**{**wanted, "batch": int(together[1]), "accumulation": 1, "steps_per_generation": None})  # type: ignore[arg-type]
        elif not offered:
            needed = re.search(r"the dataset needs at least (\d+) prompt", str(refusal))
            assert needed is not None and prompts < int(needed[1])
        return
    assert fits_by_the_rules(batch, accumulation, group, window, passes, processes)
    assert plan.steps_per_epoch is not None and plan.rollouts_per_epoch is not None
    assert plan.steps_per_epoch >= 1
    # Every completion of a rollout is used in every pass, and nothing else is.
    assert plan.steps_per_epoch * plan.completions_per_step == (
        plan.rollouts_per_epoch * plan.completions_per_rollout * plan.num_iterations
    )
    assert plan.steps_per_rollout * plan.completions_per_step == (
        plan.rollouts_per_step * plan.completions_per_rollout * plan.num_iterations
    )
    assert plan.prompts_per_rollout * plan.num_generations == plan.completions_per_rollout
    assert plan.rollouts_per_epoch * plan.prompts_per_rollout + (plan.dropped_prompts_per_epoch or 0) == prompts
    assert (plan.dropped_prompts_per_epoch or 0) < plan.prompts_per_rollout * plan.rollouts_per_step
    assert plan.original_accumulation is None or plan.completions_per_step == group


def raised(batch: int, accumulation: int, group: int, window: int | None, processes: int) -> int:
    completions = batch * accumulation * processes
    is_part_of_one_group = window is None and completions < group and group % completions == 0
    return group // (batch * processes) if is_part_of_one_group else accumulation


def fits_by_the_rules(
    batch: int, accumulation: int, group: int, window: int | None, passes: int, processes: int
) -> bool:
    accumulation = raised(batch, accumulation, group, window, processes)
    window = accumulation if window is None else window
    whole_groups = batch * processes * window % group == 0
    whole_steps = window * passes % accumulation == 0 or (passes == 1 and accumulation % window == 0)
    return whole_groups and whole_steps


def prompts_needed(batch: int, accumulation: int, group: int, window: int | None, passes: int, processes: int) -> int:
    accumulation = raised(batch, accumulation, group, window, processes)
    window = accumulation if window is None else window
    forwards = max(window, accumulation) if passes == 1 else window
    return math.ceil(batch * processes * forwards / group)


def test_imports_no_torch() -> None:
    modules = "grupo.config.batch_plan, grupo.config.field_support, grupo.sampling"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
