"""A run that goes on from a checkpoint ends as the run that was never interrupted: weights, log lines, completions."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from peft import LoraConfig

from grupo import GRPOTrainer
from tiny_trainer import make_trainer, weights

LORA = LoraConfig(task_type="CAUSAL_LM", r=2)


def sum_of_ids(completion_ids: list[list[int]], dead: list[bool], **_: Any) -> list[float]:
    return [0.5 if is_dead else sum(ids) % 7 / 3 for ids, is_dead in zip(completion_ids, dead, strict=True)]


def with_noise(completion_ids: list[list[int]], dead: list[bool], **_: Any) -> list[float]:
    """Depends on every random state that a reward function may use."""
    noise = random.random() + float(numpy.random.random()) + float(torch.rand(()))
    return [score + noise * (index % 3) for index, score in enumerate(sum_of_ids(completion_ids, dead))]


def with_extras(completion_ids: list[list[int]], dead: list[bool], log_extra: Any, **_: Any) -> list[float]:
    log_extra("length", [len(ids) for ids in completion_ids])
    return sum_of_ids(completion_ids, dead)


def run(folder: Path, *, resume: Any = None, accept: tuple[str, ...] = (), **settings: Any) -> GRPOTrainer:
    trainer = run_of(folder, **settings)
    trainer.train(resume_from_checkpoint=resume, accept_changes=accept)
    return trainer


def run_of(folder: Path, *, rewards: Any = sum_of_ids, **settings: Any) -> GRPOTrainer:
    """The model itself samples; 8 prompts, 2 per step with G = 4, so 4 steps an epoch; 8 steps."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 8, "shuffle_dataset": True,
        "lr_scheduler_type": "linear", "learning_rate": 2e-2, "weight_decay": 0.1, "optim": "adamw_torch",
        "save_strategy": "steps",
    }  # fmt: skip
    rows = [{"prompt": text, "dead": text == "c", "level": index // 4} for index, text in enumerate("abcdefgh")]
    return make_trainer(
        folder, script=None, dataset=rows, eval_dataset=rows[:2], reward_funcs=rewards, **{**defaults, **settings}
    )


def logged(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what the clock says."""
    return without_clock([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def without_clock(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clock = ("time/", "step_time", "tokens_per_second", "train_runtime", "train_samples_per", "train_steps_per")
    clock = (*clock, "eval_runtime", "eval_samples_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(clock)} for line in lines]


def tables(folder: Path) -> dict[str, Any]:
    return {path.name: pandas.read_parquet(path).to_dict("list") for path in sorted(folder.glob("completions/*"))}


def assert_same_run(parts: GRPOTrainer, whole: GRPOTrainer) -> None:
    expected = weights(whole.model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts.model).items())
    first, second = (Path(trainer.args.output_dir) for trainer in (parts, whole))
    assert logged(first) == logged(second)
    assert (first / "completions.jsonl").read_bytes() == (second / "completions.jsonl").read_bytes()
    assert tables(first) == tables(second)
    assert parts.state.num_input_tokens_seen == whole.state.num_input_tokens_seen > 0
    assert without_clock(parts.state.log_history) == without_clock(whole.state.log_history)
    assert parts.prompt_stream.state_dict() == whole.prompt_stream.state_dict()


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
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
        {"rewards": with_noise, "scoring_dropout": True, "reward_timeout": None,
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
