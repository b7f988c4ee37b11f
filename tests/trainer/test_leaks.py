"""A long run holds no more at its end than at its beginning."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tiny_trainer import make_trainer

STEPS = 200


class Held(TrainerCallback):
    """Bytes of live tensors, and of resident memory, at the beginning of each step."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.resident: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (20, 60, 120, 180):  # as far from a rollout, a log and a checkpoint
            gc.collect()
            self.tensors.append(live_tensor_bytes())
        self.resident.append(resident_bytes())


def live_tensor_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.layout is torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_long_run_does_not_grow(tmp_path: Path) -> None:
    held = Held()
    trainer = make_trainer(
        tmp_path, script=None, callbacks=[held], peft_config=LoraConfig(task_type="CAUSAL_LM", r=2), beta=0.05,
        num_iterations=2, per_device_train_batch_size=8, max_steps=STEPS, learning_rate=1e-3, optim="adamw_torch",
        shuffle_dataset=True, save_strategy="steps", save_steps=20, save_total_limit=1, logging_steps=5,
    )  # fmt: skip
    trainer.train()
    assert held.tensors[0] > 0 and len(held.tensors) == 4 and len(set(held.tensors)) == 1, held.tensors
    growth = numpy.polyfit(range(50, STEPS), held.resident[50:STEPS], 1)[0]
    assert growth < 0.1 * 2**20, f"{growth / 2**20:.3f} MiB a step"
