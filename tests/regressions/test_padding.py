"""The log-probs of a completion depend neither on its neighbours nor on padding.

TRL PR #2708 (attention mask missing), #6800 (position ids); unslothai/unsloth #1954; modelscope/ms-swift #7066.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness import (
    completions_of,
    fed_in,
    given,
    lora,
    make_trainer,
    recorded_batches,
    recorded_losses,
    token_logprobs,
    train,
)
from tiny import tiny_model, tiny_tokenizer

SHORT, LONG = "abc", "a prompt of sixty tokens, " + "x" * 34
SCRIPT = {SHORT: ["wxyz</s>", "w</s>", "</s>", "wxyzwxyz"], LONG: ["p</s>", "qq</s>", "rrrr</s>", "ssssssss"]}
REWARDS = [0.0, 1.0, 2.0, 5.0, 4.0, 0.0, 1.0, 2.0]


def logprobs_of_each(folder, monkeypatch, rows, *, packed, **settings):
    """(prompt and completion ids) -> their policy, old and reference log-probs in the first loss, unpadded."""
    with monkeypatch.context() as patch:
        batches, losses = recorded_batches(patch), recorded_losses(patch)
        trainer = make_trainer(
            folder,
            lambda completions, **columns: REWARDS[: len(completions)],
            rows,
            script=SCRIPT,
            beta=0.1,
            num_iterations=2,
            **settings,
        )
        if not packed:
            trainer.forward_backward.logprob_model.use_prompt_sharing = False
        train(trainer)
    assert all((batch.layout is not None) == packed for batch in batches if batch.reference_logprobs is not None)
    found = {}
    in_losses = [batch for batch in batches if batch.reference_logprobs is not None]
    for batch, inputs in zip(in_losses, losses, strict=True):
        for row, (prompt, completion) in enumerate(fed_in(batch)):
            tensors = (inputs.policy_logprobs, inputs.old_logprobs, inputs.reference_logprobs)
            assert all(tensor[row, len(completion) :].abs().sum() == 0 for tensor in tensors), "0 on padding"
            key = (tuple(prompt), tuple(completion))
            found.setdefault(key, [tensor[row, : len(completion)].detach() for tensor in tensors])
    return found


ROWS = [{"prompt": SHORT}, {"prompt": LONG}]
VARIANTS = {
    "pairs": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "padded to 64": {"pad_to_multiple_of": 64},
    "pad is eos": {"tokenizer": tiny_tokenizer(pad="</s>")},
    "no pad": {"tokenizer": tiny_tokenizer(pad=None)},
}


both_paths = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


@both_paths
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_policy_old_and_reference_equal_an_unpadded_forward(tmp_path, monkeypatch, settings, packed):
    found = logprobs_of_each(tmp_path, monkeypatch, ROWS, learning_rate=0.0, max_steps=2, packed=packed, **settings)
    assert_unpadded(found, tiny_model())


def assert_unpadded(found, model):
    assert len(found) == 8
    for (prompt, completion), tensors in found.items():
        with torch.no_grad():
            wanted = token_logprobs(model, prompt, completion)
        for tensor in tensors:
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5)


@both_paths
def test_alone_or_with_a_long_completion(tmp_path, monkeypatch, packed):
    alone = logprobs_of_each(tmp_path / "alone", monkeypatch, ROWS[:1], per_device_train_batch_size=4, packed=packed)
    beside = logprobs_of_each(tmp_path / "beside", monkeypatch, ROWS, packed=packed)
    common = alone.keys() & beside.keys()
    assert len(common) == 4
    for key in common:
        for one, other in zip(alone[key], beside[key], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


ARCHITECTURES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "attn_pdrop": 0.2, "resid_pdrop": 0.2},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
}


@both_paths
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_learned_positions_and_biases(tmp_path, monkeypatch, architecture, packed):
    """Architectures that are not in tests/models/test_families.py."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture, vocab_size=128, bos_token_id=0, eos_token_id=1, pad_token_id=2, **ARCHITECTURES[architecture]
    )
    model = AutoModelForCausalLM.from_config(config)
    found = logprobs_of_each(tmp_path, monkeypatch, ROWS, packed=packed, model=model, learning_rate=0.0, max_steps=1)
    assert_unpadded(found, model.eval())


def test_behavior_and_policy_log_probs_agree(tmp_path, monkeypatch):
    """The engine pads prompts on the left, the trainer sequences on the right; prompts have 3 and 60 tokens."""
    batches, losses = recorded_batches(monkeypatch), recorded_losses(monkeypatch)
    trainer = make_trainer(tmp_path, given(REWARDS), ROWS, peft_config=lora(r=2), temperature=0.7)
    train(trainer)
    (batch,), (inputs,) = ([one for one in calls if one.advantages.any()] for calls in (batches, losses))
    assert int(batch.prompt_lengths.min()) == 3 and int(batch.prompt_lengths.max()) == 60
    torch.testing.assert_close(inputs.policy_logprobs.detach(), batch.behavior_logprobs, rtol=0, atol=1e-5)
    assert trainer.state.log_history[0]["sampling/logprob_gap"] < 1e-5


def test_neighbours_do_not_change_what_is_sampled(tmp_path):
    """A prompt of 3 tokens, together with one of 3 and with one of 60."""
    texts = []
    for name, second in (("short", "xyz"), ("long", LONG)):
        trainer = make_trainer(tmp_path / name, given(REWARDS), [{"prompt": SHORT}, {"prompt": second}])
        train(trainer)
        texts.append([completion["text"] for completion in completions_of(trainer) if completion["prompt"] == SHORT])
    assert len(texts[0]) == 4 and texts[0] == texts[1]
