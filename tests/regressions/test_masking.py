"""Masked truncated completions, and zero-variance groups.

TRL PR #3248 (division by zero), #6369 / PR #6439 (diluted loss), #3476 (lengths from the zeroed mask), unsloth-zoo PR
#1262 (NaN in the KL metric); NVIDIA-NeMo/RL PR #4161 (rounding residue as a signal), DeepAnalyze #116, autonomous-dev
#415, TRL PR #3502.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grupo.errors import TrainingError
from harness import (
    SCRIPT,
    advantages_of,
    all_finite,
    given,
    gradient_of,
    ids_of,
    logs_of,
    make_trainer,
    never_stopping,
    relative_error,
    snapshot,
    token_logprobs,
    train,
    unchanged,
)
from tiny import tiny_model


def finite(trainer):
    return all(math.isfinite(value) for line in trainer.state.log_history for value in line.values())


@pytest.mark.parametrize("loss_type, beta", [("grpo", 0.1), ("luspo", 0.0), ("dapo", 0.1), ("dr_grpo", 0.0)])
def test_a_step_of_truncated_completions_changes_nothing(tmp_path, loss_type, beta):
    model = never_stopping(tiny_model())
    trainer = make_trainer(
        tmp_path,
        given([float(index) for index in range(8)]),
        model=model,
        loss_type=loss_type,
        beta=beta,
        mask_truncated_completions=True,
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    before = snapshot(model)
    watch = train(trainer)
    assert unchanged(model, before) and finite(trainer)
    for gradients in watch.gradients:
        assert gradients.keys() == before.keys() and all(gradient.abs().max() == 0 for gradient in gradients.values())
    for line in logs_of(trainer):
        assert line["loss"] == 0 and line["grad_norm"] == 0 and line["effective_tokens"] == 0
        assert line["completions/mean_length"] == line["completions/max_length"] == 8
        assert line["completions/clipped_ratio"] == 1 and line["reward"] == 3.5
        assert line["frac_reward_zero_std"] == 0, "rewards differ, masked or not"


@pytest.mark.parametrize(
    "entropy", [{"entropy_coef": 0.1}, {"use_adaptive_entropy": True}, {"top_entropy_quantile": 0.2}], ids=str
)
def test_everything_truncated_with_entropy_options(tmp_path, entropy):
    model = never_stopping(tiny_model())
    trainer = make_trainer(
        tmp_path, given([float(index) for index in range(8)]), model=model, mask_truncated_completions=True, **entropy
    )
    before = snapshot(model)
    train(trainer)
    assert unchanged(model, before) and finite(trainer)


FOUR, TWELVE = "xyz</s>", "abcdefghijkl"


@pytest.mark.parametrize(
    "loss_type, beta, wanted",
    [("dapo", 0.0, -1), ("dapo", 0.1, -1), ("grpo", 0.0, -1), ("luspo", 0.0, -4), ("dr_grpo", 0.0, -4 / 12)],
)
def test_a_masked_completion_is_in_no_denominator(tmp_path, loss_type, beta, wanted):
    """4 tokens of advantage 1 and a truncated completion of 12 tokens: the loss is -1, not -4/16 (TRL #6369)."""
    trainer = make_trainer(
        tmp_path,
        given([2.0, 0.0]),
        [{"prompt": "ab"}],
        script={"ab": [FOUR, TWELVE]},
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=12,
        scale_rewards="none",
        mask_truncated_completions=True,
        loss_type=loss_type,
        beta=beta,
    )
    watch = train(trainer)
    (line,) = logs_of(trainer)
    assert advantages_of(trainer).tolist() == [1, -1]
    assert line["loss"] == pytest.approx(wanted, abs=1e-6) and finite(trainer)
    assert (line["completions/min_length"], line["completions/mean_length"], line["completions/max_length"]) == (
        4,
        8,
        12,
    )
    assert line["completions/mean_terminated_length"] == line["completions/max_terminated_length"] == 4
    assert line["completions/clipped_ratio"] == 0.5 and line["effective_tokens"] == 4
    if beta:
        assert abs(line["kl"]) < 1e-6
    else:
        model = tiny_model()
        logprobs = token_logprobs(model, ids_of("ab"), ids_of(FOUR))
        policy = torch.exp(logprobs - logprobs.detach()).mean() * wanted
        assert relative_error(watch.gradients[0], gradient_of(policy, model)) <= 1e-5


OPTIONS = {
    "plain": {},
    "kl": {"beta": 0.1},
    "entropy bonus": {"entropy_coef": 0.5},
    "top entropy": {"top_entropy_quantile": 0.5},
    "batch scale": {"scale_rewards": "batch"},
}


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_the_tokens_of_a_masked_completion_have_no_effect(tmp_path, settings):
    """Neither on the gradient nor on any threshold or denominator; only its reward and its length count."""
    watches = []
    for name, cut in (("one", TWELVE), ("other", "zzzzzzzzzzzz")):
        trainer = make_trainer(
            tmp_path / name,
            given([2.0, 0.0, 1.0, 1.5]),
            [{"prompt": "ab"}],
            script={"ab": [FOUR, cut, "pq</s>", "rs</s>"]},
            per_device_train_batch_size=4,
            max_completion_length=12,
            mask_truncated_completions=True,
            **settings,
        )
        watches.append(train(trainer))
    one, other = (watch.gradients[0] for watch in watches)
    assert relative_error(one, other) <= 1e-6


def test_without_masking_a_truncated_completion_counts(tmp_path):
    trainer = make_trainer(
        tmp_path,
        given([2.0, 0.0]),
        [{"prompt": "ab"}],
        script={"ab": [FOUR, TWELVE]},
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=12,
        scale_rewards="none",
        loss_type="dapo",
    )
    train(trainer)
    assert logs_of(trainer)[0]["loss"] == pytest.approx((12 - 4) / 16, abs=1e-6)


def test_masking_one_micro_batch_of_several(tmp_path):
    """Some micro-batches have no token in the loss."""
    script = {"ab": [FOUR, TWELVE, TWELVE, TWELVE], "cde": [TWELVE, TWELVE, "x</s>", TWELVE]}
    rewards = [4.0, 0, 0, 0, 0, 0, 8.0, 0]
    for micro in (8, 1):
        trainer = make_trainer(
            tmp_path / str(micro),
            given(rewards),
            script=script,
            max_completion_length=12,
            mask_truncated_completions=True,
            scale_rewards="none",
            loss_type="dapo",
            beta=0.1,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=8 // micro,
        )
        train(trainer)
        assert logs_of(trainer)[0]["loss"] == pytest.approx(-(4 * 3 + 2 * 6) / 6, abs=1e-5)
        assert all_finite(trainer.model) and finite(trainer)


# ---- zero-variance groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type, kind", [("dapo", list), ("grpo", np.float32), ("vespo", torch.tensor)])
def test_equal_rewards_move_no_weight(tmp_path, loss_type, kind):
    def reward(completions, **columns):
        scores = [0.7] * 7 + [0.1] * 7
        return [np.float32(score) for score in scores] if kind is np.float32 else kind(scores)

    trainer = make_trainer(tmp_path, reward, num_generations=7, per_device_train_batch_size=14, loss_type=loss_type)
    before = snapshot(trainer.model)
    watch = train(trainer)
    (line,) = logs_of(trainer)
    assert unchanged(trainer.model, before) and finite(trainer)
    assert watch.gradients[0].keys() == before.keys(), "gradients are zero, not missing"
    assert line["frac_reward_zero_std"] == 1 and line["reward_within_group_std"] == 0
    assert line["reward"] == pytest.approx(0.4) and line["loss"] == 0 and line["entropy"] > 4


def test_equal_sums_of_unequal_rewards_are_no_signal(tmp_path):
    """0.7 - 0.7 leaves a residue that is large compared with the sum."""
    a, b = [0.7, 0.1 + 0.2, 1 / 3, 0.9] * 2, [-0.7, -0.3, -1 / 3, -(0.3 * 3)] * 2
    trainer = make_trainer(tmp_path, [given(a), given(b)])
    before = snapshot(trainer.model)
    train(trainer)
    assert unchanged(trainer.model, before)


def test_one_zero_variance_group_of_two(tmp_path):
    trainer = make_trainer(tmp_path, given([0.9] * 4 + [0.0, 1.0, 1.0, 0.0]))
    before = snapshot(trainer.model)
    train(trainer)
    (line,) = logs_of(trainer)
    assert advantages_of(trainer)[:4].tolist() == [0] * 4 and line["frac_reward_zero_std"] == 0.5
    assert advantages_of(trainer)[4:].tolist() == pytest.approx([-0.86588, 0.86588, 0.86588, -0.86588], abs=5e-6)
    assert not unchanged(trainer.model, before)


def test_kl_on_dead_groups(tmp_path):
    """With equal rewards the KL still pulls towards the reference, unless it is switched off (TRL #5640)."""
    for keep in (True, False):
        trainer = make_trainer(tmp_path / str(keep), given([0.5] * 8), beta=0.5, kl_on_dead_groups=keep, optim="sgd")
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        before = snapshot(trainer.model)
        train(trainer)
        assert unchanged(trainer.model, before) is not keep
        assert ("kl" in logs_of(trainer)[0]) is keep


def test_a_group_of_one_in_evaluation_has_no_nan(tmp_path):
    trainer = make_trainer(tmp_path, given([0.5] * 3), eval_rows=[{"prompt": "ab"}] * 3, num_generations_eval=1)
    metrics = trainer.evaluate()
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["eval_reward"] == 0.5
    assert "eval_reward_within_group_std" not in metrics


def test_warnings_about_rollouts_without_signal_appear_once(tmp_path, caplog):
    """A flat reward looks like slow learning for hours (TRL #5697, #3452)."""
    settings = {"max_steps": 8, "reward_timeout": None}
    train(make_trainer(tmp_path / "dead", given([0.0] * 8), script=SCRIPT, **settings))
    assert caplog.text.count("In 5 consecutive rollouts the completions of each prompt all had the same reward") == 1
    assert "truncated" not in caplog.text
    caplog.clear()
    model = never_stopping(tiny_model())
    train(make_trainer(tmp_path / "cut", given([0.0, 1.0] * 4), model=model, **settings))
    assert caplog.text.count("more than 90% of the completions were truncated at max_completion_length=8") == 1
    assert "the same reward" not in caplog.text
    caplog.clear()
    scores = iter([[0.0] * 8] * 4 + [[0.0, 1.0] * 4] + [[0.0] * 8] * 3)
    train(make_trainer(tmp_path / "live", lambda completions, **columns: next(scores), script=SCRIPT, **settings))
    assert "consecutive rollouts" not in caplog.text


@pytest.mark.parametrize(
    "value, settings", [(math.nan, {}), (math.inf, {"top_p": 0.9}), (math.nan, {"top_k": 3, "repetition_penalty": 1.2})]
)
def test_logits_that_are_not_finite_stop_the_run(tmp_path, settings, value):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = value
    with pytest.raises(TrainingError, match="logits are NaN or infinite, so no token can be sampled"):
        make_trainer(tmp_path, given([0.0] * 8), model=model, **settings).train()
