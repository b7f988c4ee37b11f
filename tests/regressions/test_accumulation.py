"""Gradient accumulation: splitting a step into micro-batches changes neither its gradient nor its logged loss.

TRL #3021, #5619, PR #6024, PR #3231; modelscope/ms-swift #10117; NousResearch/torchtitan PR #69.

References are plain forward passes of single completions and sums written out here.
"""

from __future__ import annotations

import pytest
import torch

from harness import (
    TOK,
    advantages_of,
    given,
    gradient_of,
    ids_of,
    logs_of,
    make_trainer,
    relative_error,
    token_logprobs,
    train,
)
from tiny import tiny_model

LENGTHS = [2, 3, 5, 8, 2, 3, 5, 8]
REWARDS = [0.0, 3.0, 3.0, 6.0, 1.0, 0.0, 0.0, 5.0]
PROMPTS = ["ab", "a longer one"]
ROWS = [{"prompt": prompt} for prompt in PROMPTS]
# All but the last end in the stop token; the longest reaches the cap of 8 without one.
TEXTS = ["a</s>", "bc</s>", "defg</s>", "hijklmno", "p</s>", "qr</s>", "stuv</s>", "wxyzabcd"]
SCRIPT = {PROMPTS[0]: TEXTS[:4], PROMPTS[1]: TEXTS[4:]}

CUTS = {
    "one of 8": {},
    "eight of 1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "two rollouts in a step": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
}


def group_advantages(rewards, size=4):
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, size)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten().tolist()


def rows_of(model, texts, prompts):
    """(T,) ratio of each completion: 1, with the gradient of the policy."""
    logprobs = [
        token_logprobs(model, TOK(prompt)["input_ids"], ids_of(text))
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    return [torch.exp(lp - lp.detach()) for lp in logprobs]


AGGREGATIONS = {
    "grpo": lambda terms, cap: sum(term.mean() for term in terms) / len(terms),
    "dapo": lambda terms, cap: sum(term.sum() for term in terms) / sum(len(term) for term in terms),
    "dr_grpo": lambda terms, cap: sum(term.sum() for term in terms) / (len(terms) * cap),
    "luspo": lambda terms, cap: sum(term.sum() for term in terms) / len(terms),
}


def by_hand(loss_type, texts, prompts, advantages, cap=8):
    """Gradient and loss of one step."""
    model = tiny_model()
    terms = [-advantage * ratio for advantage, ratio in zip(advantages, rows_of(model, texts, prompts), strict=True)]
    loss = AGGREGATIONS[loss_type](terms, cap)
    return gradient_of(loss, model), float(loss)


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_cutting_a_step_changes_nothing(tmp_path, loss_type):
    advantages = group_advantages(REWARDS)
    gradient, loss = by_hand(loss_type, TEXTS, [prompt for prompt in PROMPTS for _ in range(4)], advantages)
    for name, settings in CUTS.items():
        calls = iter(range(0, 8, settings.get("steps_per_generation", 2) * 4))

        def reward(completions, calls=calls, **columns):
            start = next(calls)
            return REWARDS[start : start + len(completions)]

        trainer = make_trainer(
            tmp_path / name.replace(" ", "-"), reward, ROWS, script=SCRIPT, loss_type=loss_type, **settings
        )
        watch = train(trainer)
        assert relative_error(watch.gradients[0], gradient) <= 1e-5, name
        assert logs_of(trainer)[0]["loss"] == pytest.approx(loss, abs=1e-6), name
        assert advantages_of(trainer).tolist() == pytest.approx(advantages)


def test_the_losses_by_mere_counting(tmp_path):
    """At ratio 1 a loss is minus the advantage times a number of tokens, which needs no model."""
    advantages = group_advantages(REWARDS)
    weighted = sum(length * advantage for length, advantage in zip(LENGTHS, advantages, strict=True))
    ended = [text if text.endswith("</s>") else text[:7] + "</s>" for text in TEXTS]
    for loss_type, wanted in (
        ("dapo", -weighted / sum(LENGTHS)),
        ("dr_grpo", -weighted / (8 * 20)),
        ("grpo", -sum(advantages) / 8),
        ("luspo", -weighted / 8),
    ):
        trainer = make_trainer(
            tmp_path / loss_type,
            given(REWARDS),
            ROWS,
            script={PROMPTS[0]: ended[:4], PROMPTS[1]: ended[4:]},
            loss_type=loss_type,
            max_completion_length=20,
        )
        train(trainer)
        assert logs_of(trainer)[0]["loss"] == pytest.approx(wanted, abs=1e-6), loss_type


@pytest.mark.parametrize(
    "loss_type, micro, accumulation, window", [("dapo", 2, 2, 8), ("grpo", 1, 4, 16), ("dr_grpo", 4, 1, 4)]
)
def test_a_rollout_of_several_steps_gives_each_its_own_denominator(tmp_path, loss_type, micro, accumulation, window):
    """The tokens of a step count, not a share of the rollout's tokens (modelscope/ms-swift #10117)."""
    rows = [{"prompt": PROMPTS[index % 2]} for index in range(4)]
    texts, rewards = [*TEXTS, *TEXTS], [*REWARDS, *REWARDS[::-1]]
    advantages = group_advantages(rewards)
    prompts = [row["prompt"] for row in rows for _ in range(4)]
    size = micro * accumulation
    calls = iter(range(0, 16, micro * window))

    def reward(completions, **columns):
        start = next(calls)
        return rewards[start : start + len(completions)]

    trainer = make_trainer(
        tmp_path,
        reward,
        rows,
        script=SCRIPT,
        loss_type=loss_type,
        per_device_train_batch_size=micro,
        learning_rate=0.0,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=window,
        max_steps=16 // size,
    )
    watch = train(trainer)
    assert len(watch.gradients) == 16 // size
    for step, (gradient, line) in enumerate(zip(watch.gradients, logs_of(trainer), strict=True)):
        part = slice(step * size, (step + 1) * size)
        wanted, loss = by_hand(loss_type, texts[part], prompts[part], advantages[part])
        assert relative_error(gradient, wanted) <= 1e-5
        assert line["loss"] == pytest.approx(loss, abs=1e-6)


def test_zero_variance_groups_stay_in_the_denominator(tmp_path):
    """Their completions are not computed, but their tokens count."""
    rewards = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 5.0]
    advantages = group_advantages(rewards)
    gradient, loss = by_hand("dapo", TEXTS, [prompt for prompt in PROMPTS for _ in range(4)], advantages)
    trainer = make_trainer(tmp_path, given(rewards), ROWS, script=SCRIPT, loss_type="dapo")
    watch = train(trainer)
    assert relative_error(watch.gradients[0], gradient) <= 1e-5
    assert logs_of(trainer)[0]["loss"] == pytest.approx(loss, abs=1e-6)
    assert logs_of(trainer)[0]["effective_tokens"] == 18
