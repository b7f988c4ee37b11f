"""A run that goes on from a checkpoint ends as the run that was never interrupted: weights, log lines, completions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from resumed_runs import EVALUATED, assert_same_run, run, with_extras, with_noise

LORA = LoraConfig(task_type="CAUSAL_LM", r=2)


RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "in the first epoch": (3, {}),
    "at the end of an epoch": (4, {}),
    "in the second epoch": (5, {}),
    "at the end of the run": (8, {}),
    "between two windows": (4, {"num_iterations": 2}),
    "inside a window": (3, {"num_iterations": 2}),
    "inside a group": (
        3, {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "steps_per_generation": 4}
    ),
    "with its controllers": (
        3,
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "use_adaptive_entropy": True,
         "entropy_coef": 0.01, "entropy_target": 4.8},
    ),
    "an adapter and its reference": (
        3, {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False), "beta": 0.1}
    ),
    "random rewards, dropout": (
        3,
        {"rewards": with_noise, "logprob_dropout": True, "reward_timeout": None,
         "peft_config": LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.3)},
    ),
    "between two logs": (
        5, {"logging_steps": 3, "log_completions": True, "num_completions_to_print": 1, "rewards": with_extras}
    ),
    "with evaluations": (4, {**EVALUATED, "eval_on_start": True, "logging_steps": 2}),
    "logs and evaluations of epochs": (4, {"eval_strategy": "epoch", "logging_strategy": "epoch"}),
    "saved with the epochs": (4, {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_steps": 3}),
    "the best kept": (
        5, {**EVALUATED, "eval_steps": 1, "load_best_model_at_end": True, "save_steps": 1, "save_total_limit": 8}
    ),
    "every signal": (
        3,
        {"num_iterations": 2, "beta": 0.1, "curriculum_column": "level", "num_generations_trained": 2,
         "dynamic_sampling": True, "curriculum_window": 2, "curriculum_threshold": 0.2,
         "curriculum_success_reward": 1.0, "peft_config": LORA},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(tmp_path: Path, name: str) -> None:
    saved_at, settings = RESUMED[name]
    settings = {"save_steps": saved_at, **settings}
    whole = run(tmp_path / "whole", **settings)
    # Taken back to its checkpoint: all that came later is there, and must not be there twice.
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    parts = run(tmp_path / "parts", resume=str(tmp_path / "parts" / f"checkpoint-{saved_at}"), **settings)
    assert_same_run(parts, whole)
    assert parts.state.global_step == whole.state.global_step == 8
