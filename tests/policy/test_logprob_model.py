"""Log-probs of completions against an unpadded forward pass, on tiny models of several kinds."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grupo.policy.batching import collate, micro_batches
from grupo.policy.logprob_model import LogprobModel, disable_dropout
from grupo.types import TrainingSample
from tiny import tiny_model

CPU = torch.device("cpu")


def sample(prompt, completion, advantage=1.0, **more):
    return TrainingSample(tuple(prompt), tuple(completion), advantage, True, True, None, **more)


def random_samples(count=6, seed=0, longest=20):
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(6, 100, (length,), generator=generator).tolist()

    return [sample(ids(1, longest), ids(1, longest)) for _ in range(count)]


def by_hand(model, item, temperature=1.0):
    """(T,) log-probs from one plain forward of one row, without padding, mask or chunks."""
    ids = torch.tensor([[*item.prompt_ids, *item.completion_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0] / temperature
    log_p = torch.log_softmax(logits.double(), -1)
    start = len(item.prompt_ids)
    return torch.stack([log_p[start + t - 1, token] for t, token in enumerate(item.completion_ids)])


def scores(model, items, **settings):
    batch = collate(items, pad_token_id=2, device=CPU)
    return LogprobModel(model, **settings).logprobs(model, batch).logprobs


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_equals_an_unpadded_forward(tied, temperature):
    model, items = tiny_model(tied=tied), random_samples()
    result = scores(model, items, temperature=temperature)
    for row, item in enumerate(items):
        torch.testing.assert_close(
            result[row, : len(item.completion_ids)].double(), by_hand(model, item, temperature), rtol=0, atol=1e-5
        )
        assert torch.equal(
            result[row, len(item.completion_ids) :], torch.zeros_like(result[row, len(item.completion_ids) :])
        )


def test_neighbours_and_padding_do_not_matter():
    """A prompt of 3 tokens and a completion of 5, alone and with a prompt of 60 (huggingface/trl PR #2708, #6800)."""
    model = tiny_model()
    short, long = sample([7, 8, 9], [10, 11, 12, 13, 1]), sample(range(6, 66), [20, 21])
    alone = scores(model, [short])[0]
    beside = scores(model, [long, short])[1]
    torch.testing.assert_close(alone, beside[:5], rtol=0, atol=1e-6)


def test_pad_token_may_be_a_token_of_the_text():
    """With pad = eos, the same id ends a turn in the prompt, is attended to, and is the stop token."""
    model = tiny_model()
    item = sample([7, 1, 8, 1, 9], [10, 11, 1])
    batch = collate([item, sample(range(6, 40), range(6, 30))], pad_token_id=1, device=CPU)
    result = LogprobModel(model).logprobs(model, batch).logprobs[0, :3]
    torch.testing.assert_close(result.double(), by_hand(model, item), rtol=0, atol=1e-5)


def test_collate_masks_by_length_not_by_token():
    batch = collate(
        [sample([5], [7, 1, 1]), dataclasses.replace(sample([5, 6], [8]), has_loss=False)], pad_token_id=1, device=CPU
    )
    assert batch.completion_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.loss_mask.tolist() == [[True, True, True], [False, False, False]]
    assert batch.input_ids.tolist() == [[5, 7, 1, 1], [5, 6, 8, 1]]
    assert batch.lengths.tolist() == [4, 3] and batch.prompt_lengths.tolist() == [1, 2]


def test_micro_batches_hold_every_sample_once():
    items = random_samples(7)
    parts = list(micro_batches(items, 3))
    assert [len(part) for part in parts] == [3, 3, 1]
    assert sorted(id(item) for part in parts for item in part) == sorted(id(item) for item in items)


def test_softcap_is_noticed_and_computed_exactly():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, final_logit_softcapping=0.05,
            pad_token_id=2, attn_implementation="eager",
        )
    )  # fmt: skip
    items = random_samples(3)
    logprob_model = LogprobModel(model)
    result = logprob_model.logprobs(model, collate(items, pad_token_id=2, device=CPU)).logprobs
    assert logprob_model.reads_hidden_states is False
    for row, item in enumerate(items):
        torch.testing.assert_close(
            result[row, : len(item.completion_ids)].double(), by_hand(model, item), rtol=0, atol=1e-5
        )


def test_forward_wrapped_by_someone_else_is_noticed():
    model = tiny_model()
    inner = model.forward

    def louder(*args, **kwargs):
        output = inner(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = louder
    items = random_samples(3)
    logprob_model = LogprobModel(model)
    result = logprob_model.logprobs(model, collate(items, pad_token_id=2, device=CPU)).logprobs
    assert logprob_model.reads_hidden_states is False
    torch.testing.assert_close(
        result[0, : len(items[0].completion_ids)].double(), by_hand(model, items[0]), rtol=0, atol=1e-5
    )


def test_adapter_on_the_head_is_trained():
    """Reading the base weight of a head with an adapter would train nothing there (huggingface/trl #4612)."""
    model = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head", "q_proj"]))
    items = random_samples(3)
    logprob_model = LogprobModel(model)
    result = logprob_model.logprobs(model, collate(items, pad_token_id=2, device=CPU)).logprobs
    result.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "lm_head" in name and "lora_B" in name}
    assert gradients and all(g is not None and g.abs().sum() > 0 for g in gradients.values())


def test_dropout_is_off_while_training_stays_on():
    model = get_peft_model(
        tiny_model(attention_dropout=0.5),
        LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.5, init_lora_weights=False),
    )
    model.train()
    items = random_samples(2)
    noisy = [scores(model, items) for _ in range(2)]
    assert not torch.equal(*noisy)
    with disable_dropout(model):
        assert model.training
        quiet = [scores(model, items) for _ in range(2)]
    assert torch.equal(*quiet)
    model.eval()
    torch.testing.assert_close(quiet[0], scores(model, items))
    model.train()
    assert not torch.equal(scores(model, items), quiet[0]), "the rates come back afterwards"


def test_reference_policy_is_the_start_and_leaves_the_policy_alone():
    from grupo.policy.reference import ReferencePolicy

    model = tiny_model()
    items = random_samples(2)
    start, before = scores(model, items), copy.deepcopy(model.state_dict())
    reference = ReferencePolicy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    moved = scores(model, items)
    with reference.active():
        assert torch.equal(scores(model, items), start)
    assert torch.equal(scores(model, items), moved)
    reference.soft_update(0.25)
    with reference.active():
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), before[name] + 0.025)
