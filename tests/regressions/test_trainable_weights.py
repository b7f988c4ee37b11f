"""Training without trainable weights is refused; checkpointing changes neither gradients nor rollouts.

TRL #6700 / PR #6701 (frozen adapter), #3926, #3031, #3150 (LoRA without gradient), #3683 (cache warnings);
microsoft/LoRA #120 (checkpointing leaves LoRA gradients None).
"""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model

from grupo.errors import ConfigError
from grupo.rollout.engine import GenerationRequest
from grupo.rollout.local.engine import LocalEngine
from grupo.sampling import SamplingSpec
from harness import (
    TOK,
    after_its_checks,
    completions_of,
    logs_of,
    lora,
    make_trainer,
    relative_error,
    snapshot,
    train,
    unchanged,
    varied,
)
from tiny import tiny_model


@pytest.fixture
def saved_adapter(tmp_path):
    torch.manual_seed(0)
    get_peft_model(tiny_model(), lora()).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_frozen_adapter_is_refused_before_the_first_step(tmp_path, saved_adapter):
    model = PeftModel.from_pretrained(tiny_model(), saved_adapter)
    before = snapshot(model)
    with pytest.raises(ConfigError, match=r"None of the model's .* is trainable.*is_trainable=True"):
        make_trainer(tmp_path, varied, model=model)
    assert unchanged(model, before)


def test_a_trainable_adapter_is_trained_and_nothing_else(tmp_path, saved_adapter):
    model = PeftModel.from_pretrained(tiny_model(), saved_adapter, is_trainable=True)
    before = snapshot(model)
    trainer = make_trainer(tmp_path, varied, model=model, beta=0.1, max_steps=3)
    train(trainer)
    after = snapshot(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_a_frozen_model_is_refused_or_gets_an_adapter(tmp_path):
    model = tiny_model().requires_grad_(False)
    with pytest.raises(ConfigError, match=r"Set requires_grad .* or pass a peft_config"):
        make_trainer(tmp_path, varied, model=model)
    trainer = make_trainer(tmp_path, varied, model=model, beta=0.1, peft_config=lora(init_lora_weights=True))
    before = snapshot(trainer.model)
    train(trainer)
    assert not unchanged(trainer.model, before)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_trainable_parameters_outside_the_forward_pass_are_refused(tmp_path, checkpointing):
    """Some parameters have requires_grad, but the loss does not reach them; with checkpointing, backward is silent."""
    model = tiny_model().requires_grad_(False)
    model.unused = torch.nn.Linear(4, 4)
    trainer = make_trainer(tmp_path, varied, model=model, gradient_checkpointing=checkpointing)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"trainable parameters has a gradient|does not require grad"):
        trainer.train()
    assert unchanged(model, before)


def test_a_second_adapter_is_refused(tmp_path, saved_adapter):
    model = PeftModel.from_pretrained(tiny_model(), saved_adapter)
    with pytest.raises(ConfigError, match="has an adapter already"):
        make_trainer(tmp_path, varied, model=model, peft_config=lora())


@pytest.mark.parametrize("layers", [["lm_head"], ["embed_tokens"], ["norm"]])
def test_a_few_trainable_layers_are_enough(tmp_path, layers):
    model = tiny_model().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(layer in name for layer in layers))
    before = snapshot(model)
    watch = train(make_trainer(tmp_path, varied, model=model, gradient_checkpointing=True, max_steps=2))
    after = snapshot(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(watch.gradients[0]) == {name for name, p in model.named_parameters() if p.requires_grad}


# ---- checkpointing ---------------------------------------------------------------------------------------------------

KINDS = {
    "newer name": {"gradient_checkpointing": None, "activation_checkpointing": True},
    "re-entrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not re-entrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
TRAINED = {
    "LoRA": lora(),
    "fresh LoRA": lora(init_lora_weights=True),
    "LoRA with dropout": lora(lora_dropout=0.3),
    "LoRA and a whole layer": lora(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]),
    "everything": None,
}


def step(folder, peft_config, **settings):
    """One step; also the number of forward passes of a layer with gradient."""
    torch.manual_seed(1)
    model, forwards = tiny_model(attention_dropout=0.2), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    trainer = make_trainer(folder, varied, model=model, peft_config=peft_config, beta=0.1, **settings)
    return trainer, train(trainer), sum(forwards)


@pytest.mark.parametrize(
    "trained, kind",
    [
        *((trained, "not re-entrant") for trained in TRAINED),
        *(("LoRA with dropout", kind) for kind in ("newer name", "re-entrant")),
    ],
)
def test_checkpointing_changes_no_gradient_and_no_rollout(tmp_path, trained, kind):
    """Including LoRA, where re-entrant checkpointing sees no input with a gradient (microsoft/LoRA #120)."""
    plain, wanted, forwards = step(tmp_path / "plain", TRAINED[trained])
    trainer, watch, more_forwards = step(tmp_path / "checkpointed", TRAINED[trained], **KINDS[kind])
    assert trainer.model.is_gradient_checkpointing and not plain.model.is_gradient_checkpointing
    # Re-entrant checkpointing makes its first forward pass without gradient and only the second one with.
    assert more_forwards == forwards * (1 if kind == "re-entrant" else 2) and forwards > 0
    parameters = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert watch.gradients[0].keys() == parameters and any(gradient.any() for gradient in watch.gradients[0].values())
    assert relative_error(watch.gradients[0], wanted.gradients[0]) <= 1e-5
    assert [c["text"] for c in completions_of(trainer)] == [c["text"] for c in completions_of(plain)]
    assert logs_of(trainer)[0]["sampling/logprob_gap"] < 1e-5


def test_checkpointing_is_on_unless_it_is_switched_off(tmp_path):
    on = make_trainer(tmp_path / "on", varied, gradient_checkpointing=None)
    off = make_trainer(tmp_path / "off", varied, gradient_checkpointing=False)
    for trainer in (on, off):
        train(trainer)
    assert on.model.is_gradient_checkpointing and not off.model.is_gradient_checkpointing


@pytest.mark.parametrize("peft_config", [None, lora()], ids=["full", "LoRA"])
def test_rollouts_use_the_cache_while_checkpointing_is_on(tmp_path, caplog, peft_config):
    caplog.set_level(logging.WARNING)
    widths = []
    model = tiny_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            tmp_path, varied, model=model, gradient_checkpointing=True, max_steps=3, peft_config=peft_config
        )
        after_its_checks(trainer)
        model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append((kwargs.get("use_cache"), kwargs["input_ids"].shape[1])),
            with_kwargs=True,
        )
        train(trainer)
    cached = [width for use_cache, width in widths if use_cache]
    assert cached.count(5) == 3 and set(cached) == {1, 5}, "prompts of 2 and 3 once per rollout, then token by token"
    about_cache = [record.message for record in caplog.records if "use_cache" in record.message]
    about_cache += [str(warning.message) for warning in caught if "use_cache" in str(warning.message)]
    assert len(about_cache) <= 1


def test_greedy_rollouts_with_and_without_checkpointing(tmp_path):
    """In training mode and after a step, as in a run."""
    trainer = make_trainer(tmp_path, varied, gradient_checkpointing=True, peft_config=lora())
    train(trainer)
    engine = LocalEngine(trainer.model, decode=lambda ids: TOK.decode(ids), stop_token_ids=(1,))
    requests = [GenerationRequest(row.to_prompt(row.row), (0,)) for row in trainer.train_rows]
    with_checkpointing = engine.generate(requests, SamplingSpec(temperature=0, max_new_tokens=16))
    assert trainer.model.is_gradient_checkpointing and trainer.model.training
    trainer.model.gradient_checkpointing_disable()
    assert engine.generate(requests, SamplingSpec(temperature=0, max_new_tokens=16)) == with_checkpointing


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, learning_rate, warned",
    [
        (torch.bfloat16, 1e-6, True),
        (torch.float16, 1e-7, True),
        (torch.bfloat16, 1e-2, False),
        (torch.float32, 1e-6, False),
    ],
)
def test_a_warning_if_updates_underflow(tmp_path, caplog, dtype, learning_rate, warned):
    """With bfloat16 weights and the learning rate of full fine-tuning, hardly any weight changes."""
    model = tiny_model(dtype=dtype)
    trainer = make_trainer(tmp_path, varied, model=model, learning_rate=learning_rate)
    assert ("of the trained weights are kept in" in caplog.text) is warned
    before = snapshot(model)
    train(trainer)
    moved = sum(int((tensor != before[name]).sum()) for name, tensor in snapshot(model).items())
    assert (moved < sum(map(torch.numel, before.values())) / 2) is warned


def test_an_adapter_is_kept_in_float32(tmp_path, caplog):
    make_trainer(tmp_path, varied, model=tiny_model(dtype=torch.bfloat16), learning_rate=1e-6, peft_config=lora())
    assert "rounded away" not in caplog.text
