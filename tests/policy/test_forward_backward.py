"""Token budgets, out-of-memory, activations in host memory: the gradients stay what they are."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import TrainerCallback

from grupo.errors import TrainingError
from grupo.models.activation_offload import offload_activations
from grupo.models.memory import activation_bytes_per_token, default_token_budget
from tests.models.test_activation_recompute import kept_bytes
from tiny import tiny_model
from tiny_trainer import make_trainer


class _Gradients(TrainerCallback):
    """Of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def one_batch(folder, **settings):
    return make_trainer(
        folder, per_device_train_batch_size=16, gradient_accumulation_steps=1, max_grad_norm=0.0, **settings
    )


def first_gradients(trainer):
    watch = _Gradients()
    trainer.add_callback(watch)
    trainer.train()
    return watch.steps[0]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys() and wanted
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("budget", [1, 30, 64])
def test_a_token_budget_changes_no_gradient(tmp_path, budget):
    wanted = first_gradients(one_batch(tmp_path / "free"))
    trainer = one_batch(tmp_path / "cut", micro_batch_tokens=budget)
    assert trainer.forward_backward.token_budget == budget
    assert_same(first_gradients(trainer), wanted)
    assert json.loads((tmp_path / "cut" / "manifest.json").read_text())["micro_batch_tokens"] == budget


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_in_host_memory_change_no_gradient(tmp_path, checkpointing):
    wanted = first_gradients(one_batch(tmp_path / "device"))
    trainer = one_batch(tmp_path / "host", offload_activations=True, gradient_checkpointing=checkpointing)
    assert_same(first_gradients(trainer), wanted)


def test_activations_leave_and_weights_stay(monkeypatch):
    """Counts what is copied: no weight is, and something is."""
    model = tiny_model()
    copied = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, **more: copied.append(t) or empty_like(t, **more))
    monkeypatch.setattr("grupo.models.activation_offload.SMALLEST_OFFLOADED", 1)
    with offload_activations(model):
        loss = model(input_ids=torch.arange(20)[None]).logits.square().mean()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert copied and not weights & {tensor.untyped_storage().data_ptr() for tensor in copied}
    monkeypatch.undo()
    loss.backward()
    wanted = tiny_model()
    wanted(input_ids=torch.arange(20)[None]).logits.square().mean().backward()
    for parameter, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_one_out_of_memory_halves_the_budget_and_the_step_is_made_again(tmp_path, caplog):
    wanted = first_gradients(one_batch(tmp_path / "free"))
    trainer = one_batch(tmp_path / "full")
    update, logprob_model = trainer.forward_backward, trainer.forward_backward.logprob_model
    scored, score = [], logprob_model.logprobs

    def limited(module, batch, **more):
        scored.append(batch.input_ids.numel())
        if torch.is_grad_enabled() and batch.input_ids.numel() > 60:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return score(module, batch, **more)

    logprob_model.logprobs = limited
    with caplog.at_level(logging.WARNING, logger="grupo"):
        found = first_gradients(trainer)
    assert_same(found, wanted)
    assert update.token_budget is not None and update.token_budget <= 60
    assert f"at most {update.token_budget} (micro_batch_tokens)" in caplog.text
    manifest = json.loads((tmp_path / "full" / "manifest.json").read_text())
    assert manifest["micro_batch_tokens"] == update.token_budget


def test_what_does_not_fit_alone_is_said(tmp_path):
    trainer = one_batch(tmp_path)
    logprob_model, score = trainer.forward_backward.logprob_model, trainer.forward_backward.logprob_model.logprobs

    def none_fits(module, batch, **more):
        if torch.is_grad_enabled():
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return score(module, batch, **more)

    logprob_model.logprobs = none_fits
    with pytest.raises(TrainingError, match="gradient_checkpointing=True"):
        trainer.train()


def test_other_errors_of_the_model_go_through(tmp_path):
    trainer = one_batch(tmp_path)
    score = trainer.forward_backward.logprob_model.logprobs

    def broken(module, batch, **more):
        if torch.is_grad_enabled():
            raise RuntimeError("shapes do not fit")
        return score(module, batch, **more)

    trainer.forward_backward.logprob_model.logprobs = broken
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        trainer.train()


def test_bytes_per_token_are_about_what_is_kept():
    """Within a third, of a model whose layers dominate."""
    model = tiny_model(hidden_size=64, intermediate_size=256, num_hidden_layers=6)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    estimate = activation_bytes_per_token(model, checkpointing=False)
    assert 0.67 * estimate < kept_bytes(model, recomputed=True) / 100 < 1.33 * estimate
    assert activation_bytes_per_token(model, checkpointing=True) < 0.5 * estimate
    assert default_token_budget(model, torch.device("cpu"), checkpointing=False) == (1280 << 20) // estimate
