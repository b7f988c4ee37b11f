"""E5: the log-probs of a row do not depend on its neighbours or on padding.

TRL PR #2708 (attention mask missing), #6800 (position ids); unsloth #1954; ms-swift #7066.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from harness import (
    completions_of,
    fed_in,
    make_trainer,
    recorded_batches,
    recorded_losses,
    token_logprobs,
    train,
)
from tiny import tiny_model, tiny_tokenizer

SHORT, LONG = "abc", "a prompt of sixty tokens, " + "x" * 34
SCRIPT = {
    SHORT: ["wxyz</s>", "w</s>", "</s>", "wxyzwxyz"],
    LONG: ["p</s>", "qq</s>", "rrrr</s>", "ssssssss"],
}
REWARDS = [0.0, 1.0, 2.0, 5.0, 4.0, 0.0, 1.0, 2.0]


def scored_rows(folder, monkeypatch, rows, *, packed, **settings):
    """(prompt and completion ids) -> the rows of the first loss that they were in, unpadded."""
    with monkeypatch.context() as patch:
        batches, losses = recorded_batches(patch), recorded_losses(patch)
        model = settings.pop("model", None) or tiny_model()
        trainer = make_trainer(
            folder,
            lambda completions, **columns: REWARDS[: len(completions)],
            rows,
            model=model,
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
    return found, trainer


VARIANTS = {
    "together": {"rows": [{"prompt": SHORT}, {"prompt": LONG}], "per_device_train_batch_size": 8},
    "pairs": {
        "rows": [{"prompt": SHORT}, {"prompt": LONG}],
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "padded to 64": {"rows": [{"prompt": SHORT}, {"prompt": LONG}], "pad_to_multiple_of": 64},
    "pad is eos": {"rows": [{"prompt": SHORT}, {"prompt": LONG}], "tokenizer": tiny_tokenizer(pad="</s>")},
    "no pad": {"rows": [{"prompt": SHORT}, {"prompt": LONG}], "tokenizer": tiny_tokenizer(pad=None)},
}


both_paths = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


@both_paths
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_policy_old_and_reference_equal_an_unpadded_forward(tmp_path, monkeypatch, settings, packed):
    found, _ = scored_rows(tmp_path, monkeypatch, learning_rate=0.0, max_steps=2, packed=packed, **settings)
    model = tiny_model()
    assert len(found) == 8
    for (prompt, completion), scored in found.items():
        with torch.no_grad():
            wanted = token_logprobs(model, prompt, completion)
        for tensor in scored:
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5)


@both_paths
def test_alone_or_beside_a_long_one(tmp_path, monkeypatch, packed):
    rows = [{"prompt": SHORT}, {"prompt": LONG}]
    alone, _ = scored_rows(tmp_path / "alone", monkeypatch, rows[:1], per_device_train_batch_size=4, packed=packed)
    beside, _ = scored_rows(tmp_path / "beside", monkeypatch, rows, packed=packed)
    common = alone.keys() & beside.keys()
    assert len(common) == 4
    for key in common:
        for one, other in zip(alone[key], beside[key], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@both_paths
@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma3", "gpt_neox"])
def test_other_architectures_and_positions(tmp_path, monkeypatch, architecture, packed):
    """Learned positions, norms on queries, sliding windows, biases, tied heads."""
    model = other_model(architecture)
    found, _ = scored_rows(
        tmp_path, monkeypatch, [{"prompt": SHORT}, {"prompt": LONG}], packed=packed, model=model, learning_rate=0.0,
        max_steps=1,
    )  # fmt: skip
    model.eval()
    assert len(found) == 8
    for (prompt, completion), scored in found.items():
        with torch.no_grad():
            wanted = token_logprobs(model, prompt, completion)
        for tensor in scored:
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5)


def other_model(architecture):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "sliding_window": 16,
    }
    if architecture == "gpt_neox":
        del settings["sliding_window"]  # it has no windows, and keeps the setting all the same
    if architecture == "gpt2":
        settings = {
            "vocab_size": 128,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "resid_pdrop": 0.2,
            "embd_pdrop": 0.2,
            "attn_pdrop": 0.2,
        }
    name = "gemma3_text" if architecture == "gemma3" else architecture
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings))


def test_sampled_and_scored_log_probs_agree(tmp_path, monkeypatch):
    """Left padding in the prefill, right padding in scoring: the same numbers, short prompts beside long ones."""
    batches, losses = recorded_batches(monkeypatch), recorded_losses(monkeypatch)
    model = tiny_model()
    peft_config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    trainer = make_trainer(
        tmp_path,
        lambda completions, **columns: REWARDS,
        [{"prompt": SHORT}, {"prompt": LONG}],
        model=model,
        peft_config=peft_config,
        temperature=0.7,
    )
    train(trainer)
    (batch,), (inputs,) = ([one for one in calls if one.advantages.any()] for calls in (batches, losses))
    assert int(batch.prompt_lengths.min()) == 3 and int(batch.prompt_lengths.max()) == 60
    torch.testing.assert_close(inputs.policy_logprobs.detach(), batch.behavior_logprobs, rtol=0, atol=1e-5)
    assert trainer.state.log_history[0]["sampling/logprob_gap"] < 1e-5


def test_neighbours_do_not_change_what_is_sampled(tmp_path):
    """The prompt of 3 tokens, drawn first, beside one of 3 and beside one of 60."""
    texts = []
    for name, second in (("short", "xyz"), ("long", LONG)):
        trainer = make_trainer(
            tmp_path / name, lambda completions, **columns: REWARDS, [{"prompt": SHORT}, {"prompt": second}]
        )
        train(trainer)
        texts.append([completion["text"] for completion in completions_of(trainer) if completion["prompt"] == SHORT])
    assert len(texts[0]) == 4 and texts[0] == texts[1]
