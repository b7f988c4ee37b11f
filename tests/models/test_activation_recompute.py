"""Activations that backward computes again: the same gradients to the last bit, from less memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from families import FAMILIES, family_model
from grupo.models.activation_recompute import _RecomputeTable, recompute_cheap_activations
from grupo.policy.batching import collate
from grupo.policy.logprob_model import LogprobModel
from grupo.types import TrainingSample
from tiny import tiny_model

CPU = torch.device("cpu")
UNEVEN = [(9, (5, 12, 7)), (4, (6, 6))]


def samples():
    generator = torch.Generator().manual_seed(0)

    def ids(length):
        return tuple(torch.randint(3, 128, (length,), generator=generator).tolist())

    return [
        TrainingSample(prompt, ids(length), 1.0, True, True, None)
        for prompt_length, lengths in UNEVEN
        for prompt in [ids(prompt_length)]
        for length in lengths
    ]


def gradients(model, *, recomputed, autocast=False):
    """Of the entropies and log-probs of the samples, and the bytes of activations that were kept for them."""
    logprob_model = LogprobModel(model)
    logprob_model.prepare(model, CPU)
    model.zero_grad()
    model.train()
    batch = collate(samples(), pad_token_id=2, device=CPU, packed=bool(logprob_model.use_prompt_sharing))
    context = recompute_cheap_activations(logprob_model.decoder) if recomputed else contextlib.nullcontext()
    with logprob_model.attention(), context:
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            scores = logprob_model.logprobs(model, batch, with_entropy=True)
        (scores.logprobs.sum() + scores.entropy.square().sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def lora(model, **settings):
    torch.manual_seed(0)
    config = LoraConfig(r=3, init_lora_weights=False, **{"target_modules": "all-linear", **settings})
    return get_peft_model(model, config)


MODELS = {
    **{name: lambda name=name: family_model(name) for name in FAMILIES},
    "LoRA": lambda: lora(tiny_model(attention_bias=True, mlp_bias=True)),
    "LoRA with dropout": lambda: lora(tiny_model(), lora_dropout=0.3),
    "LoRA on one layer": lambda: lora(tiny_model(), target_modules=["up_proj", "q_proj"], layers_to_transform=[1]),
    "GELU": lambda: lora(tiny_model(hidden_act="gelu_pytorch_tanh")),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_gradients_are_the_same_to_the_last_bit(make, autocast):
    wanted = gradients(make(), recomputed=False, autocast=autocast)
    found = gradients(make(), recomputed=True, autocast=autocast)
    assert wanted and found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def kept_bytes(model, *, recomputed):
    """Of storages that backward of one plain forward holds on to, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}
    pack = _RecomputeTable.pack

    def look(recipes, tensor):
        packed = pack(recipes, tensor) if recomputed else tensor
        # What stands for a tensor that is recomputed holds on to nothing that is not kept anyway.
        if isinstance(packed, torch.Tensor) and packed.untyped_storage().data_ptr() not in weights:
            kept[packed.untyped_storage().data_ptr()] = packed.untyped_storage()
        return packed

    with mock.patch.object(_RecomputeTable, "pack", look), recompute_cheap_activations(model.get_decoder()):
        output = model.get_decoder()(input_ids=torch.arange(100)[None], use_cache=False).last_hidden_state
    total = sum(storage.nbytes() for storage in kept.values())
    del output
    return total


def test_less_is_kept():
    model = lora(tiny_model(intermediate_size=128)).base_model.model
    assert 0 < kept_bytes(model, recomputed=True) < 0.7 * kept_bytes(model, recomputed=False)


class _Sum(LlamaMLP):
    """Has the layers of a gated one, and adds where that one multiplies."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def test_a_model_that_puts_the_same_layers_together_otherwise():
    def make():
        model = tiny_model()
        for layer in model.model.layers:
            layer.mlp.__class__ = _Sum
        return model

    wanted, found = gradients(make(), recomputed=False), gradients(make(), recomputed=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_input_that_was_overwritten_is_an_error():
    class Norm(nn.RMSNorm):
        pass

    decoder = nn.Sequential(nn.Linear(4, 4), Norm(4), nn.Linear(4, 4))
    with recompute_cheap_activations(decoder):
        hidden = decoder[0](torch.ones(2, 4))
        result = decoder[2](decoder[1](hidden))
        with torch.no_grad():
            hidden.mul_(2)
        with pytest.raises(RuntimeError, match="modified in place"):
            result.sum().backward()


def test_nothing_is_held_after_it():
    model = tiny_model()
    kept = []
    handle = model.model.layers[0].mlp.gate_proj.register_forward_hook(
        lambda module, inputs, output: kept.append(weakref.ref(output.untyped_storage()))
    )
    with recompute_cheap_activations(model.model):
        model(input_ids=torch.arange(9)[None], use_cache=False).logits.sum().backward()
    handle.remove()
    gc.collect()
    assert kept and all(reference() is None for reference in kept)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
