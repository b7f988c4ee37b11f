"""A completion is compared with those of its own prompt, wherever it is in the batch.

R1-V #67, XU-YIJIE/grpo-flat #2, THUDM/slime #1414 and #2230, AReaL #1419. The pure function is covered in
tests/algo/test_advantages.py. The standard deviation has Bessel's correction, and 1e-4 is added to it.
"""

from __future__ import annotations

import math

import pytest
import torch

from harness import advantages_of, completions_of, given, logs_of, make_trainer, train

EPSILON = 1e-4
REWARDS = {"p": [5.0, 5.0, 5.0, 5.0], "q": [0.0, 3.0, 3.0, 6.0]}
WANTED_Q = [-3 / (math.sqrt(6) + EPSILON), 0, 0, 3 / (math.sqrt(6) + EPSILON)]  # 1.22469


def rewarding(prompts, completions, **columns):
    """Rewards by prompt and first letter of the completion, not by position."""
    return [REWARDS[prompt]["abcd".index(text[0])] for prompt, text in zip(prompts, completions, strict=True)]


SCRIPT = {name: ["a</s>", "bb</s>", "ccc</s>", "dddd</s>"] for name in "pq"}
ROWS = [{"prompt": "p"}, {"prompt": "q"}]

SPLITS = {
    "one micro-batch": {},
    "eight micro-batches": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "micro-batches across groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "a step of half a group": {"per_device_train_batch_size": 2, "steps_per_generation": 4, "max_steps": 4},
    "a group over one and a half steps": {
        "per_device_train_batch_size": 3,
        "num_generations": 4,
        "steps_per_generation": 4,
        "max_steps": 4,
    },
}


@pytest.mark.parametrize("settings", SPLITS.values(), ids=SPLITS)
def test_advantages_follow_the_prompt_in_a_run(tmp_path, settings):
    prompts = 3 if settings.get("per_device_train_batch_size") == 3 else 2
    rows = [{"prompt": name} for name in "pqp"[:prompts]]
    trainer = make_trainer(tmp_path, rewarding, rows, script=SCRIPT, **settings)
    train(trainer)
    for completion in completions_of(trainer):
        wanted = 0.0 if completion["prompt"] == "p" else WANTED_Q["abcd".index(completion["text"][0])]
        assert completion["advantage"] == pytest.approx(wanted, abs=1e-12)
    assert logs_of(trainer)[0]["frac_reward_zero_std"] == pytest.approx((prompts - 1) / prompts)


def test_the_spread_of_the_batch_is_that_of_the_whole_rollout(tmp_path):
    """Also if a micro-batch, or a whole step, contains only a part of it."""
    everything = torch.tensor(REWARDS["p"] + REWARDS["q"])
    wanted = torch.tensor([0, 0, 0, 0, -3, 0, 0, 3]) / (everything.double().std() + EPSILON)
    for name, settings in SPLITS.items():
        if "and a half" not in name:
            folder = tmp_path / name.replace(" ", "-")
            trainer = make_trainer(folder, rewarding, ROWS, script=SCRIPT, scale_rewards="batch", **settings)
            train(trainer)
            torch.testing.assert_close(advantages_of(trainer), wanted)


def test_two_draws_of_one_row_are_two_groups(tmp_path):
    """The same text twice in one rollout is two prompts with two baselines."""
    rewards = [0.0, 1.0, 0.0, 1.0, 10.0, 10.0, 10.0, 14.0]
    trainer = make_trainer(
        tmp_path, given(rewards), [{"prompt": "p"}, {"prompt": "p"}], script=SCRIPT, scale_rewards="none"
    )
    train(trainer)
    assert advantages_of(trainer).tolist() == [-0.5, 0.5, -0.5, 0.5, -1, -1, -1, 3]
