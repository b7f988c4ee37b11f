"""Runs that are resumed, and what has to be equal afterwards."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pandas
import torch

from grupo import GRPOTrainer
from tiny_trainer import make_trainer, weights

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


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
    assert parts.window.stream.state_dict() == whole.window.stream.state_dict()
