"""Every family that is trained: the fast paths of scoring and decoding against plain forwards of the model's own.

Tiny random models (`families.py`) of two layers. Plain: one row at a time, all logits, no cache, the attention that the
model came with. G = 4 completions for each of two prompts.
"""

from __future__ import annotations

import copy

import pytest
import torch

from families import FAMILIES, WINDOW, family_model
from grupo.policy.batching import collate
from grupo.policy.logprob_model import LogprobModel
from grupo.rollout.engine import GenerationRequest
from grupo.rollout.local.engine import LocalEngine
from grupo.sampling import SamplingSpec
from grupo.types import Prompt, TrainingSample
from harness import (
    TOK,
    fed_in,
    gradient_of,
    ids_of,
    make_trainer,
    recorded_batches,
    recorded_losses,
    relative_error,
    token_logprobs,
    train,
)

CPU = torch.device("cpu")
# Of gradients, relative. The norms and rotary angles of the models compute in float32, also in float64.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
# Of log-probs, in nats.
GAP = {torch.float32: 1e-4, torch.float64: 1e-6}
LINEAR_ATTENTION_GAP = 1e-5
"""Its state is float32 in float64 too, and is summed up in chunks or token by token."""
ROWS = [{"prompt": "ab"}, {"prompt": "a prompt that is longer than the windows"}]


def gap(name, dtype):
    return max(GAP[dtype], LINEAR_ATTENTION_GAP) if name == "Qwen3.5" else GAP[dtype]


every_family = pytest.mark.parametrize("name", FAMILIES)


def varied(completions, **columns):
    return [float((7 * index) % 5) for index in range(len(completions))]


WAYS = {
    "float32": (torch.float32, {}),
    "float32 with checkpointing": (torch.float32, {"gradient_checkpointing": True}),
    "float64": (torch.float64, {}),
}


@pytest.mark.parametrize("dtype, settings", WAYS.values(), ids=WAYS)
@every_family
def test_one_step_of_training(tmp_path, monkeypatch, name, dtype, settings):
    """Sampled, rewarded, scored and differentiated; everything computed again by plain forwards of a copy."""
    batches, losses = recorded_batches(monkeypatch), recorded_losses(monkeypatch)
    model = family_model(name, dtype=dtype)
    plain = copy.deepcopy(model)
    trainer = make_trainer(
        tmp_path, varied, ROWS, model=model, loss_type="grpo", scale_rewards="none", beta=0.1, max_completion_length=20,
        temperature=0.9, **settings,
    )  # fmt: skip
    watch = train(trainer)
    assert trainer.forward_backward.logprob_model.use_prompt_sharing is FAMILIES[name].shares_prompts

    (inputs,) = losses
    (batch,) = [batch for batch in batches if batch.reference_logprobs is not None]
    assert (batch.layout is not None) == FAMILIES[name].shares_prompts
    rows = fed_in(batch)
    assert {len(prompt) for prompt, _ in rows} == {len(ids_of(row["prompt"])) for row in ROWS} and len(rows) == 8
    assert max(len(prompt) for prompt, _ in rows) > WINDOW and max(len(completion) for _, completion in rows) > WINDOW
    total = 0.0
    for row, (prompt, completion) in enumerate(rows):
        wanted = token_logprobs(plain, prompt, completion, 0.9)
        for found in (inputs.policy_logprobs, inputs.reference_logprobs, batch.behavior_logprobs):
            torch.testing.assert_close(
                found[row, : len(completion)].detach(), wanted.detach(), rtol=0, atol=gap(name, dtype)
            )
        ratio = torch.exp(wanted - wanted.detach())
        # The gradient of the KL term is zero where policy and reference are one.
        total = total - float(batch.advantages[row]) * ratio.mean() / len(rows)
    wanted_gradient = gradient_of(total, plain)
    assert relative_error(watch.gradients[0], wanted_gradient) < TOLERANCE[dtype]
    assert all(gradient.any() for gradient in wanted_gradient.values()), "nothing of the model is left out"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_family
def test_cached_decoding(name, dtype):
    """Log-probs of the engine, scored ones, and those of plain forwards, of prompts on both sides of the windows."""
    model = family_model(name, dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(number, number, tuple(torch.randint(3, 128, (length,), generator=generator).tolist()), "")
        for number, length in enumerate((4, 2 * WINDOW, 9))
    ]
    requests = [GenerationRequest(prompt, tuple(range(6 * prompt.id, 6 * prompt.id + 6))) for prompt in prompts]
    engine = LocalEngine(model, decode=TOK.decode, stop_token_ids=(1, 90, 91))
    sampling = SamplingSpec(temperature=0.8, max_new_tokens=2 * WINDOW)
    groups = engine.generate(requests, sampling)
    lengths = {len(completion.token_ids) for group in groups for completion in group}
    assert len(lengths) > 3 and max(lengths) > WINDOW, "rows leave one after the other"

    samples = [
        TrainingSample(prompt.token_ids, completion.token_ids, 1.0, True, True, completion.behavior_logprobs)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]
    logprob_model = LogprobModel(model, temperature=0.8)
    logprob_model.prepare(model, CPU)
    with torch.no_grad(), logprob_model.attention():
        batch = collate(samples, pad_token_id=2, device=CPU, dtype=dtype, packed=bool(logprob_model.use_prompt_sharing))
        scored = logprob_model.logprobs(model, batch).logprobs
    for row, sample in enumerate(samples):
        with torch.no_grad():
            wanted = token_logprobs(model, sample.prompt_ids, sample.completion_ids, 0.8)
        sampled = torch.tensor(sample.behavior_logprobs, dtype=dtype)
        torch.testing.assert_close(sampled, wanted, rtol=0, atol=gap(name, dtype))
        torch.testing.assert_close(scored[row, : len(sampled)], wanted, rtol=0, atol=gap(name, dtype))


@every_family
def test_greedy_tokens_are_those_of_transformers(name):
    model = family_model(name, dtype=torch.float64, seed=2).eval()
    prompts = [tuple(range(3, 3 + length)) for length in (2 * WINDOW, 5)]
    engine = LocalEngine(model, decode=TOK.decode, stop_token_ids=(1,))
    requests = [GenerationRequest(Prompt(place, place, ids, ""), (0,)) for place, ids in enumerate(prompts)]
    groups = engine.generate(requests, SamplingSpec(temperature=0, max_new_tokens=2 * WINDOW))
    for ids, (completion,) in zip(prompts, groups, strict=True):
        wanted = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=2 * WINDOW, eos_token_id=1, pad_token_id=2
        )
        assert list(completion.token_ids) == wanted[0, len(ids) :].tolist()
