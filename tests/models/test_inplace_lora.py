"""LoRA that adds where the base layer's output stands: PEFT's own numbers, and layers left as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grupo.models.inplace_lora import inplace_lora, is_plain_lora
from tiny import tiny_model

IDS = torch.arange(10, 34).reshape(2, 12)


def adapted(**settings):
    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, **{"target_modules": "all-linear", **settings})
    return get_peft_model(tiny_model(attention_bias=True), config)


def run(model, ids):
    model.train()
    model.zero_grad()
    torch.manual_seed(0)
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


ADAPTERS = {
    "LoRA": {},
    "dropout": {"lora_dropout": 0.4},
    "rsLoRA": {"use_rslora": True},
    "DoRA, left to PEFT": {"use_dora": True},
    "with bias, left to PEFT": {"lora_bias": True, "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
def test_the_numbers_are_those_of_peft(settings, rows):
    model = adapted(**settings)
    wanted, wanted_gradients = run(model, IDS[:rows])
    variants = [copy.copy(m.lora_variant) for m in model.modules() if hasattr(m, "lora_variant")]
    with inplace_lora(model):
        found, gradients = run(model, IDS[:rows])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted_gradients.keys() and wanted_gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-4, atol=1e-4)
    assert [m.lora_variant for m in model.modules() if hasattr(m, "lora_variant")] == variants


def test_two_adapters_at_once():
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "other"])
    wanted, _ = run(model, IDS[:1])
    with inplace_lora(model):
        found, _ = run(model, IDS[:1])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_switched_off_adapter_and_an_error_inside():
    model = adapted()
    with model.disable_adapter():
        wanted = model(input_ids=IDS).logits
        with inplace_lora(model):
            torch.testing.assert_close(model(input_ids=IDS).logits, wanted)
    with pytest.raises(ZeroDivisionError), inplace_lora(model):
        assert 1 / 0
    assert any(is_plain_lora(module) for module in model.modules())


def test_bfloat16_base_with_a_float32_adapter():
    model = adapted().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    wanted, _ = run(model, IDS[:1])
    with inplace_lora(model):
        found, _ = run(model, IDS[:1])
    assert torch.equal(found, wanted)
