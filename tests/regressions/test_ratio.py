"""Before any update the ratio is 1 and the KL is 0, with any dropout; the temperature is in every log-prob.

TRL PR #3234 (option to disable dropout), #3500 (huge KL at step one), Reef PR #536; TRL PR #3029, #4159 (temperature).
"""

from __future__ import annotations

import math

import pytest
import torch

from grupo.errors import ConfigError
from harness import (
    completions_of,
    fed_in,
    given,
    gradient_of,
    ids_of,
    logs_of,
    lora,
    make_trainer,
    recorded_batches,
    recorded_losses,
    relative_error,
    token_logprobs,
    train,
    varied,
)
from tiny import tiny_model

DROPOUTS = {
    "attention dropout": ({"attention_dropout": 0.3}, None),
    "LoRA dropout": ({}, lora(lora_dropout=0.3)),
    "both": ({"attention_dropout": 0.3}, lora(lora_dropout=0.5)),
    "eager attention": ({"attention_dropout": 0.3, "attn_implementation": "eager"}, None),
}
SETTINGS = {
    "checkpointing": {"gradient_checkpointing": True},
    "re-entrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "several micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "num_iterations": {"num_iterations": 2},
}


@pytest.mark.parametrize(
    "dropout, settings", [*((name, "") for name in DROPOUTS), *(("both", name) for name in SETTINGS)]
)
def test_no_kl_and_no_clipping_in_the_first_step(tmp_path, monkeypatch, dropout, settings):
    config, peft_config = DROPOUTS[dropout]
    losses = recorded_losses(monkeypatch)
    trainer = make_trainer(
        tmp_path, varied, model=tiny_model(**config), peft_config=peft_config, beta=0.1, **SETTINGS.get(settings, {})
    )
    train(trainer)
    (line,) = logs_of(trainer)
    assert abs(line["kl"]) <= 1e-6 and line["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert line["clip_ratio/region_mean"] == line["clip_ratio/low_mean"] == line["clip_ratio/high_mean"] == 0
    assert line["sampling/logprob_gap"] < 1e-5, "no dropout in the rollout either"
    for inputs in losses:
        torch.testing.assert_close(inputs.policy_logprobs.detach(), inputs.reference_logprobs, rtol=0, atol=1e-6)
        if inputs.old_logprobs is not None:
            torch.testing.assert_close(inputs.policy_logprobs.detach(), inputs.old_logprobs, rtol=0, atol=1e-6)
    assert trainer.model.training, "training mode stays on, for checkpointing"


def test_scoring_dropout(tmp_path, monkeypatch):
    losses = recorded_losses(monkeypatch)
    trainer = make_trainer(tmp_path, varied, model=tiny_model(attention_dropout=0.3), beta=0.1, logprob_dropout=True)
    train(trainer)
    assert logs_of(trainer)[0]["kl"] > 1e-4
    for inputs in losses:
        assert (inputs.policy_logprobs - inputs.behavior_logprobs).abs().max() > 1e-3
        # Without gradient there is no dropout: the reference, here the policy, agrees with the engine.
        torch.testing.assert_close(inputs.reference_logprobs, inputs.behavior_logprobs, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="contradict"):
        make_trainer(tmp_path / "both", varied, logprob_dropout=True, disable_dropout=True)


def test_the_rates_are_still_there_afterwards(tmp_path):
    model = tiny_model(attention_dropout=0.3)
    train(make_trainer(tmp_path, varied, model=model))
    assert {layer.self_attn.attention_dropout for layer in model.model.layers} == {0.3}


def test_the_second_pass_sees_the_update(tmp_path):
    """A ratio that is always 1 would be a tautology."""
    trainer = make_trainer(
        tmp_path, varied, num_iterations=2, learning_rate=0.05, max_steps=3, beta=0.1, max_completion_length=8
    )
    train(trainer)
    first, second, third = logs_of(trainer)
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-6) and abs(second["ratio/mean"] - 1) > 1e-3
    assert second["clip_ratio/region_mean"] > 0 and second["kl"] > 1e-4
    assert third["ratio/mean"] == pytest.approx(1, abs=1e-6), "a new rollout"


PRECISIONS = {
    "float32": ({}, torch.float32, None, 1e-5),
    "bfloat16 autocast, LoRA": ({"bf16": True}, torch.float32, lora(), 0.02),
    "bfloat16 weights": ({}, torch.bfloat16, None, 0.02),
    "bfloat16 weights, LoRA": ({}, torch.bfloat16, lora(), 0.02),
    "float64": ({}, torch.float64, None, 1e-6),
}


@pytest.mark.parametrize("settings, dtype, peft_config, gap", PRECISIONS.values(), ids=PRECISIONS)
def test_every_precision_computes_log_probs_from_hidden_states(tmp_path, settings, dtype, peft_config, gap):
    """Ratio 1, KL 0, and no full logits, in every precision of weights and arithmetic."""
    model = tiny_model(dtype=dtype)
    trainer = make_trainer(
        tmp_path, varied, model=model, peft_config=peft_config, beta=0.1, num_iterations=2, max_steps=2, **settings
    )
    train(trainer)
    first, second = logs_of(trainer)
    assert trainer.forward_backward.logprob_model.reads_hidden_states is True
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-6) and abs(first["kl"]) <= 1e-6
    assert first["sampling/logprob_gap"] < gap and abs(second["ratio/mean"] - 1) > 1e-4


def test_training_again_samples_again(tmp_path):
    """A second call of train() starts a new run, without rollouts, logs or counters of the first one."""
    calls = []

    def reward(completions, **columns):
        calls.append(completions)
        return varied(completions)

    trainer = make_trainer(tmp_path, reward, num_iterations=2, learning_rate=0.1, logging_steps=2, optim="sgd")
    train(trainer)
    train(trainer)
    assert len(calls) == 2 and calls[0] != calls[1], "the policy has moved"
    assert [line["ratio/mean"] for line in logs_of(trainer)] == pytest.approx([1], abs=1e-6)
    assert logs_of(trainer)[0]["sampling/logprob_gap"] < 1e-5


# ---- temperature -----------------------------------------------------------------------------------------------------

SETTINGS_OF_TEMPERATURE = {
    "field": {"temperature": 0.5},
    "generation_kwargs": {"generation_kwargs": {"temperature": 0.5}},
    "above 1": {"temperature": 1.7},
}


@pytest.mark.parametrize("settings", SETTINGS_OF_TEMPERATURE.values(), ids=SETTINGS_OF_TEMPERATURE)
def test_the_temperature_is_in_every_log_prob_and_in_the_gradient(tmp_path, monkeypatch, settings):
    temperature = settings.get("temperature", 0.5)
    batches, losses = recorded_batches(monkeypatch), recorded_losses(monkeypatch)
    trainer = make_trainer(
        tmp_path, varied, loss_type="grpo", beta=0.1, num_iterations=2, max_steps=1, scale_rewards="none", **settings
    )
    watch = train(trainer)
    model = tiny_model()
    (inputs,) = losses
    batch = next(batch for batch in batches if batch.reference_logprobs is not None)
    total = 0.0
    assert len(fed_in(batch)) == 8
    for row, (prompt, completion) in enumerate(fed_in(batch)):
        assert completion == batch.completion_ids[row][batch.completion_mask[row]].tolist()
        wanted = token_logprobs(model, prompt, completion, temperature)
        for tensor in (inputs.policy_logprobs, inputs.old_logprobs, inputs.reference_logprobs, batch.behavior_logprobs):
            torch.testing.assert_close(tensor[row, : len(completion)].detach(), wanted.detach(), rtol=0, atol=1e-5)
        ratio = torch.exp(wanted - wanted.detach())
        # The gradient of the KL term is zero where policy and reference are one.
        total = total - float(batch.advantages[row]) * ratio.mean() / 8
    assert batch.advantages.abs().sum() > 0
    assert relative_error(watch.gradients[0], gradient_of(total, model)) <= 1e-5
    assert logs_of(trainer)[0]["sampling/logprob_gap"] < 1e-5


def test_one_token_by_hand(tmp_path, monkeypatch):
    """log softmax(logits / 0.5) of the first token after "ab", written out."""
    losses = recorded_losses(monkeypatch)
    script = {"ab": ["x</s>", "y</s>", "z</s>", "w</s>"]}
    trainer = make_trainer(
        tmp_path,
        given([1.0, 0, 0, 0]),
        [{"prompt": "ab"}],
        script=script,
        temperature=0.5,
        per_device_train_batch_size=4,
    )
    train(trainer)
    with torch.no_grad():
        logits = tiny_model()(input_ids=torch.tensor([ids_of("ab")])).logits[0, -1].double().tolist()
    normalizer = math.log(sum(math.exp(logit / 0.5) for logit in logits))
    wanted = sorted(logits[ids_of(letter)[0]] / 0.5 - normalizer for letter in "xyzw")
    assert sorted(losses[0].policy_logprobs[:, 0].tolist()) == pytest.approx(wanted, abs=1e-5)


def test_truncated_sampling_does_not_change_policy_log_probs(tmp_path, monkeypatch):
    losses, batches = recorded_losses(monkeypatch), recorded_batches(monkeypatch)
    trainer = make_trainer(tmp_path, varied, top_k=3, top_p=0.9, temperature=0.8)
    train(trainer)
    batch, inputs = batches[0], losses[0]
    torch.testing.assert_close(inputs.policy_logprobs.detach(), batch.behavior_logprobs, rtol=0, atol=1e-5)
    assert logs_of(trainer)[0]["ratio/mean"] == 1


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_cannot_train_is_refused(tmp_path, temperature):
    for settings in ({"temperature": temperature}, {"generation_kwargs": {"temperature": temperature}}):
        with pytest.raises(ConfigError, match="temperature"):
            make_trainer(tmp_path, varied, **settings)


# ---- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "peft_config", [None, lora(init_lora_weights=True), lora()], ids=["full", "new adapter", "trained adapter"]
)
def test_the_reference_is_the_policy_at_the_start_however_long_it_trains(tmp_path, monkeypatch, peft_config):
    """The base model with a new adapter, the adapter itself where a trained one was passed (TRL #3194)."""
    losses, batches = recorded_losses(monkeypatch), recorded_batches(monkeypatch)
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, varied, peft_config=peft_config, beta=0.1, learning_rate=0.05, max_steps=3)
    start = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    train(trainer)
    line = logs_of(trainer)[-1]
    assert line["kl"] > 1e-5 and trainer.state.global_step == 3
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(start[name])
    last, inputs = [batch for batch in batches if batch.reference_logprobs is not None][-1], losses[-1]
    prompt, completion = fed_in(last)[0]
    trainer.model.eval()
    with torch.no_grad():
        wanted = token_logprobs(trainer.model, prompt, completion)
    torch.testing.assert_close(inputs.reference_logprobs[0, : len(completion)], wanted, rtol=0, atol=1e-5)
    assert len(completions_of(trainer)) == 24
