"""A run that is saved and resumed in a new process is the same run.

modelscope/ms-swift PR #9935 (seeds reset after the checkpoint had restored them), NVIDIA-NeMo/RL PR #3599 (prompts
skipped across save and restore), unsloth-zoo PR #832 (sampling state not restored), transformers #17032 (random state
not loaded after a save at the end of an epoch). In the middle of a rollout window the window is restored, not sampled
again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness import logs_of, make_trainer

ROWS = [{"prompt": letter * count, "number": count} for count, letter in enumerate("abcdefgh", start=1)]
# 2 prompts per step, 4 steps per epoch. Step of the checkpoint, and settings.
CASES = {"in the middle of a rollout window": (3, {"num_iterations": 2}), "at the end of an epoch": (4, {})}


def train(folder: Path, name: str) -> None:
    """Six steps, or those after the checkpoint if there is one."""
    saved_at, settings = CASES[name]
    asked = []

    def remembers(prompts, completions, number, **columns):
        asked.extend([prompts, completions, number])
        return [len(text) % 5 * 0.5 + n for text, n in zip(completions, number, strict=True)]

    trainer = make_trainer(
        folder, remembers, ROWS, max_steps=6, save_strategy="steps", save_steps=saved_at, shuffle_dataset=True,
        lr_scheduler_type="linear", **settings,
    )  # fmt: skip
    checkpoint = folder / f"checkpoint-{saved_at}"
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint.is_dir() else None)
    trainer.save_model(str(folder / "model"))
    (folder / "seen.json").write_text(
        json.dumps(
            {
                "asked": asked,
                "tokens": trainer.state.num_input_tokens_seen,
                "rates": [line["learning_rate"] for line in logs_of(trainer)],
                "losses": [line["loss"] for line in logs_of(trainer)],
            }
        )
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Each case as a whole, and the part after its checkpoint in a new process."""
    target = tmp_path_factory.mktemp("resumed")
    for name, (saved_at, _) in CASES.items():
        train(target / "whole" / name, name)
        (target / "parts" / name).mkdir(parents=True)
        checkpoint = target / "whole" / name / f"checkpoint-{saved_at}"
        checkpoint.rename(target / "parts" / name / checkpoint.name)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *(path for path in sys.path if path)])}
    subprocess.run(
        [sys.executable, "-m", "tests.regressions.test_resume", str(target / "parts")], check=True, env=environment
    )
    return target


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(folder, name):
    whole, parts = (json.loads((folder / run / name / "seen.json").read_text()) for run in ("whole", "parts"))
    assert parts["asked"], "rewards were asked for in both parts"
    assert whole["asked"][-len(parts["asked"]) :] == parts["asked"], "the same prompts, none skipped or doubled"
    first, second = (load_file(folder / run / name / "model" / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(first[key], second[key]) for key in first), "not one bit differs"
    assert [whole[key] for key in ("tokens", "rates", "losses")] == [
        parts[key] for key in ("tokens", "rates", "losses")
    ]


if __name__ == "__main__":
    for case in CASES:
        train(Path(sys.argv[1]) / case, case)
