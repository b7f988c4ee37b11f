"""D2: a completion is compared with those of its own prompt, whatever its position.

R1-V #67, XU-YIJIE/grpo-flat #2, THUDM/slime #1414 and #2230, AReaL #1419. The standard deviation is Bessel's, and 1e-4
is added to it.
"""

from __future__ import annotations

import math

import pytest
import torch

from grupo.algo.advantages import compute_advantages
from harness import advantages_of, completions_of, logs_of, make_trainer, train

EPSILON = 1e-4
REWARDS = {"p": [5.0, 5.0, 5.0, 5.0], "q": [0.0, 3.0, 3.0, 6.0]}
WANTED_Q = {
    "group": [-3 / (math.sqrt(6) + EPSILON), 0, 0, 3 / (math.sqrt(6) + EPSILON)],  # 1.22469
    "none": [-3, 0, 0, 3],
}

LAYOUTS = {
    "grouped": "ppppqqqq",
    "interleaved": "pqpqpqpq",
    "mixed": "qppqqppq",
    "one of q missing": "ppppqqq",
    "one of p missing": "qpqppqq",
}


def by_layout(layout, **settings):
    """Advantages per prompt when rows come in this order."""
    places = {"p": iter(REWARDS["p"]), "q": iter(REWARDS["q"])}
    scores = torch.tensor([[next(places[name])] for name in layout])
    advantages = compute_advantages(scores, [ord(name) for name in layout], **settings).advantages
    return {name: [float(a) for a, owner in zip(advantages, layout, strict=True) if owner == name] for name in "pq"}


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_advantages_follow_the_prompt_in_any_layout(layout, scale):
    found = by_layout(layout, scale=scale)
    assert found["p"] == [0.0] * layout.count("p")
    if layout.count("q") == 4:
        assert found["q"] == pytest.approx(WANTED_Q[scale], abs=1e-12)
    else:  # [0, 3, 3]: statistics of the three that are there
        spread = math.sqrt(3) + EPSILON if scale == "group" else 1.0
        assert found["q"] == pytest.approx([-2 / spread, 1 / spread, 1 / spread], abs=1e-12)


def test_the_standard_deviation_is_bessels():
    found = compute_advantages(torch.tensor([[0.0], [1.0], [1.0], [0.0]]), [0] * 4).advantages
    assert found.tolist() == pytest.approx([-0.86588, 0.86588, 0.86588, -0.86588], abs=5e-6)
    wide = compute_advantages(torch.tensor([[0.0], [3.0], [3.0], [6.0]]), [0] * 4).advantages
    assert wide.tolist() == pytest.approx([-1.22469, 0, 0, 1.22469], abs=5e-6)


def rewarding(prompts, completions, **columns):
    """By prompt and by the letter that the completion starts with, not by position."""
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


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("settings", SPLITS.values(), ids=SPLITS)
def test_advantages_follow_the_prompt_in_a_run(tmp_path, settings, scale):
    prompts = 3 if settings.get("per_device_train_batch_size") == 3 else 2
    rows = [{"prompt": name} for name in "pqp"[:prompts]]
    trainer = make_trainer(tmp_path, rewarding, rows, script=SCRIPT, scale_rewards=scale, **settings)
    train(trainer)
    for completion in completions_of(trainer):
        wanted = 0.0 if completion["prompt"] == "p" else WANTED_Q[scale]["abcd".index(completion["text"][0])]
        assert completion["advantage"] == pytest.approx(wanted, abs=1e-12)
    assert logs_of(trainer)[0]["frac_reward_zero_std"] == pytest.approx((prompts - 1) / prompts)


def test_the_spread_of_the_batch_is_that_of_the_whole_rollout(tmp_path):
    """Also where a micro-batch, or a whole step, holds a part of it only."""
    everything = torch.tensor(REWARDS["p"] + REWARDS["q"])
    wanted = torch.tensor([0, 0, 0, 0, -3, 0, 0, 3]) / (everything.double().std() + EPSILON)
    for name, settings in SPLITS.items():
        if "and a half" not in name:
            folder = tmp_path / name.replace(" ", "-")
            trainer = make_trainer(folder, rewarding, ROWS, script=SCRIPT, scale_rewards="batch", **settings)
            train(trainer)
            torch.testing.assert_close(advantages_of(trainer), wanted)


def test_two_draws_of_one_row_are_two_groups(tmp_path):
    """The same text twice in one rollout: two prompts, two baselines."""
    rewards = [0.0, 1.0, 0.0, 1.0, 10.0, 10.0, 10.0, 14.0]
    trainer = make_trainer(
        tmp_path,
        lambda completions, **columns: rewards,
        [{"prompt": "p"}, {"prompt": "p"}],
        script=SCRIPT,
        scale_rewards="none",
    )
    train(trainer)
    assert advantages_of(trainer).tolist() == [-0.5, 0.5, -0.5, 0.5, -1, -1, -1, 3]
