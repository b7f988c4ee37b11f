"""The in-process engine: tokens, stops, log-probs and distributions. V vocabulary."""

from __future__ import annotations

import pytest
import torch

from grupo.errors import DataError
from grupo.rollout.engine import GenerationRequest, completion_seed
from grupo.rollout.local.engine import LocalEngine
from grupo.rollout.local.token_sampling import sample_tokens, truncated_log_probs
from grupo.rollout.scripted import ScriptedEngine
from grupo.sampling import SamplingSpec
from grupo.types import FinishReason, Prompt
from tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def prompt(ids, number=0):
    return Prompt(id=number, row=number, token_ids=tuple(ids), content="")


def engine(model=None, stops=(1,)):
    return LocalEngine(model or tiny_model(), decode=decode, stop_token_ids=stops)


PROMPTS = [prompt([7, 8, 9], 0), prompt(range(10, 40), 1), prompt([50], 2)]


def requests(count=3):
    return [
        GenerationRequest(p, tuple(completion_seed(0, "test", p.id, place) for place in range(count))) for p in PROMPTS
    ]


def test_greedy_tokens_equal_transformers_generate():
    model = tiny_model()
    results = engine(model).generate(requests(1), SamplingSpec(temperature=0, max_new_tokens=20))
    for p, (completion,) in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([p.token_ids])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)[
            0, ids.shape[1] :
        ]
        assert list(completion.token_ids) == wanted.tolist()


def test_greedy_tokens_equal_generate_with_repetition_penalty():
    model = tiny_model()
    spec = SamplingSpec(temperature=0, repetition_penalty=1.5, max_new_tokens=20)
    results = engine(model).generate(requests(1), spec)
    for p, (completion,) in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([p.token_ids])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, repetition_penalty=1.5, max_new_tokens=20
        )[0, ids.shape[1] :]
        assert list(completion.token_ids) == wanted.tolist()


def test_a_completion_depends_on_its_seed_alone():
    """Not on the other requests, on the number of completions, or on the order."""
    spec = SamplingSpec(max_new_tokens=15)
    together = engine().generate(requests(4), spec)
    alone = engine().generate([GenerationRequest(PROMPTS[1], (completion_seed(0, "test", 1, 2),))], spec)
    assert alone[0][0].token_ids == together[1][2].token_ids
    assert len({c.token_ids for c in together[1]}) > 1, "seeds differ within a group"


def test_cache_is_used_and_checkpointing_does_not_matter():
    model = tiny_model()
    widths = []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    spec = SamplingSpec(temperature=0, max_new_tokens=10)
    one = engine(model)
    plain = one.generate(requests(1), spec)
    widths.clear()
    assert one.generate(requests(1), spec) == plain
    assert widths == [sum(len(p.token_ids) for p in PROMPTS), *[1] * 9], "prompts without padding, then one token each"
    model.gradient_checkpointing_enable()
    model.train()
    assert engine(model).generate(requests(1), spec) == plain
    assert model.training and model.model.layers[0].training


def test_dropout_is_off_in_rollouts():
    model = tiny_model(attention_dropout=0.9)
    model.train()
    spec = SamplingSpec(max_new_tokens=8)
    assert engine(model).generate(requests(), spec) == engine(model).generate(requests(), spec)


def test_every_stop_token_ends_a_completion():
    model = tiny_model()
    free = engine(model, stops=()).generate(requests(1), SamplingSpec(max_new_tokens=12))
    third = free[0][0].token_ids[2]
    stopped = engine(model, stops=(1, third)).generate(requests(1), SamplingSpec(max_new_tokens=12))[0][0]
    end = free[0][0].token_ids.index(third) + 1
    assert stopped.token_ids == free[0][0].token_ids[:end]
    assert stopped.finish_reason is FinishReason.STOP and not stopped.is_truncated
    by_spec = engine(model, stops=()).generate(requests(1), SamplingSpec(max_new_tokens=12, stop_token_ids=(third,)))
    assert by_spec[0][0] == stopped


def test_the_cap_truncates():
    results = engine(stops=()).generate(requests(2), SamplingSpec(max_new_tokens=5))
    assert all(len(c.token_ids) == 5 and c.is_truncated for group in results for c in group)


def test_the_models_generation_config_changes_nothing():
    """Defaults of the model must not turn sampling into near-greedy decoding (TRL issue #5783)."""
    model = tiny_model()
    plain = engine(model).generate(requests(), SamplingSpec(max_new_tokens=10))
    model.generation_config.update(top_k=1, temperature=0.01, do_sample=False, repetition_penalty=5.0)
    assert engine(model).generate(requests(), SamplingSpec(max_new_tokens=10)) == plain


def test_sampled_tokens_follow_the_exact_distribution():
    """Chi-square of 20,000 draws from one distribution over 128 tokens; 99.99 % quantile of 127 degrees is 195."""
    logits = torch.randn(1, 128, generator=torch.Generator().manual_seed(0)) * 1.5
    count = 20_000
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spec = SamplingSpec(temperature=0.8)
    drawn = sample_tokens(logits.expand(count, -1), spec, uniforms).token_ids
    expected = torch.softmax(logits[0].double() / 0.8, -1) * count
    observed = torch.bincount(drawn, minlength=128).double()
    common = expected >= 5
    pooled = [(observed[common], expected[common]), (observed[~common].sum(), expected[~common].sum())]
    statistic = sum(float(((o - e) ** 2 / e).sum()) for o, e in pooled)
    assert statistic < 195


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(top_k=5),
        SamplingSpec(top_p=0.7),
        SamplingSpec(min_p=0.2),
        SamplingSpec(temperature=0.6, top_k=10, top_p=0.9, min_p=0.05),
        SamplingSpec(repetition_penalty=1.7),
        SamplingSpec(temperature=1.4, repetition_penalty=0.7, top_p=0.5),
    ],
    ids=str,
)
def test_truncation_equals_transformers_processors(spec):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)) * 2
    seen_ids = torch.tensor([[1, 2, 3]] * 4)
    seen = torch.zeros(4, 64, dtype=torch.bool).scatter(1, seen_ids, True)
    steps = LogitsProcessorList()
    if spec.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(spec.repetition_penalty))
    steps.append(TemperatureLogitsWarper(spec.temperature))
    if spec.top_k:
        steps.append(TopKLogitsWarper(spec.top_k))
    if spec.top_p < 1:
        steps.append(TopPLogitsWarper(spec.top_p))
    if spec.min_p:
        steps.append(MinPLogitsWarper(spec.min_p))
    wanted = torch.log_softmax(steps(seen_ids, logits.clone()), -1)
    torch.testing.assert_close(truncated_log_probs(logits, spec, seen), wanted)


def test_both_logprobs_are_what_they_say():
    """Of the full tempered softmax, and of the distribution that was drawn from (TRL issue #6789)."""
    model = tiny_model()
    spec = SamplingSpec(temperature=0.7, top_k=4, max_new_tokens=6)
    completion = engine(model).generate(requests(1), spec)[1][0]
    ids = torch.tensor([[*PROMPTS[1].token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(PROMPTS[1].token_ids) - 1 : -1].double() / 0.7
    tokens = torch.tensor(completion.token_ids)[:, None]
    full = torch.log_softmax(logits, -1)
    kept = logits.masked_fill(logits < logits.topk(4).values[:, -1:], -torch.inf)
    torch.testing.assert_close(
        torch.tensor(completion.behavior_logprobs).double(), full.gather(1, tokens)[:, 0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        torch.tensor(completion.sampled_logprobs).double(),
        torch.log_softmax(kept, -1).gather(1, tokens)[:, 0],
        rtol=0,
        atol=1e-5,
    )
    torch.testing.assert_close(
        torch.tensor(completion.entropies).double(), -(full.exp() * full).sum(-1), rtol=0, atol=1e-5
    )


def test_nothing_asked_nothing_done():
    assert engine().generate([], SamplingSpec()) == []
    assert engine().generate([GenerationRequest(PROMPTS[0], ())], SamplingSpec()) == [[]]


def test_scripted_engine_cuts_where_a_sampler_would_have_stopped():
    scripts = {0: [9, 10, 1, 2, 2], 1: [9, 10, 11, 12, 13, 14], 2: [1]}
    scripted = ScriptedEngine(lambda p, place: scripts[p.id], decode=decode, stop_token_ids=[1])
    results = scripted.generate(requests(1), SamplingSpec(max_new_tokens=4))
    assert [c.token_ids for (c,) in results] == [(9, 10, 1), (9, 10, 11, 12), (1,)]
    assert [c.is_truncated for (c,) in results] == [False, True, False]
    empty = ScriptedEngine(lambda p, place: [], decode=decode, stop_token_ids=[1])
    with pytest.raises(DataError, match="no tokens"):
        empty.generate(requests(1), SamplingSpec())


def test_scripted_engine_replays_a_list_in_order():
    scripted = ScriptedEngine([[9, 1], [10, 1], [11, 1], [12, 1]], decode=decode, stop_token_ids=[1])
    two_each = [GenerationRequest(p, (0, 0)) for p in PROMPTS[:2]]
    results = scripted.generate(two_each, SamplingSpec())
    assert [c.token_ids[0] for group in results for c in group] == [9, 10, 11, 12]
    with pytest.raises(DataError, match="used up"):
        scripted.generate(two_each, SamplingSpec())
