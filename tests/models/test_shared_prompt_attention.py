"""Completions that share their prompt in a packed row: the log-probs and gradients of rows of their own.

Everything is compared with the same `LogprobModel` on padded rows, which is itself compared with plain forwards
elsewhere. Gradients are those of a random sum over log-probs and entropies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralAttention

from families import FAMILIES, family_model
from grupo.models import shared_prompt_attention as attention
from grupo.models.shared_prompt_attention import LAYOUT_KEYWORD, packed_attention
from grupo.policy.batching import collate, micro_batches
from grupo.policy.logprob_model import LogprobModel
from grupo.types import TrainingSample
from harness import recorded_batches, relative_error
from tiny import with_exact_norms
from tiny_trainer import Spy, distance, gradients, make_trainer, run

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
"""Relative. Norms, rotary angles and the softmax of stock models compute in float32, also in float64."""
EXACT = 1e-10
"""Relative, in float64 with norms that compute in float64, too."""

# ---- samples ---------------------------------------------------------------------------------------------------------

groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 25), min_size=1, max_size=6)), min_size=1, max_size=3
)
"""Of each group: length of the prompt, and of each completion."""
seeds = st.integers(0, 10_000)


def samples_of(shape: Sequence[tuple[int, Sequence[int]]], seed: int) -> list[TrainingSample]:
    """Completions of all groups, shuffled, as ranks and passes deal them."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 128, (length,), generator=generator).tolist())

    samples = []
    for prompt_length, lengths in shape:
        prompt = ids(prompt_length)
        samples += [TrainingSample(prompt, ids(length), 1.0, True, True, None) for length in lengths]
    return [samples[place] for place in torch.randperm(len(samples), generator=generator)]


# ---- both ways -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How the samples are cut into micro-batches."""

    rows: int = 64
    budget: int | None = None
    multiple: int | None = None


cuts = st.builds(
    Cut,
    rows=st.integers(1, 18),
    budget=st.none() | st.integers(10, 300),
    multiple=st.none() | st.sampled_from([8, 64]),
)


def scored(model, samples, *, packed, cut=None, seed=0):
    """Log-probs of each sample, in order, and the gradients of a random sum over log-probs and entropies."""
    cut = cut or Cut()
    generator = torch.Generator().manual_seed(seed)
    coefficients = {id(s): torch.randn(2, len(s.completion_ids), generator=generator) for s in samples}
    logprob_model = LogprobModel(model, use_prompt_sharing=packed)
    logprob_model.prepare(model, CPU)
    assert logprob_model.use_prompt_sharing is packed
    model.zero_grad()
    found = {}
    with logprob_model.attention():
        for rows in micro_batches(samples, cut.rows, token_budget=cut.budget, packed=packed):
            batch = collate(rows, pad_token_id=2, device=CPU, pad_to_multiple_of=cut.multiple, packed=packed)
            assert (batch.layout is not None) == packed and batch.input_ids.shape[1] % (cut.multiple or 1) == 0
            scores = logprob_model.logprobs(model, batch, with_entropy=True)
            loss = torch.zeros(())
            for row, sample in enumerate(rows):
                length = len(sample.completion_ids)
                found[id(sample)] = scores.logprobs[row, :length].detach()
                for values, weights in zip((scores.logprobs, scores.entropy), coefficients[id(sample)], strict=True):
                    assert not values[row, length:].any()
                    loss = loss + (values[row, :length] * weights).sum()
            loss.backward()
    left = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in left.values())
    return torch.cat([found[id(sample)] for sample in samples]), {name: grad.clone() for name, grad in left.items()}


def errors(model, samples, cut=None, *, seed=0):
    """Largest relative difference of the log-probs, and of the gradients, between packed and padded rows."""
    logprobs, gradient = scored(model, samples, packed=True, cut=cut, seed=seed)
    wanted_logprobs, wanted_gradient = scored(model, samples, packed=False, seed=seed)
    return (
        float((logprobs - wanted_logprobs).abs().max() / wanted_logprobs.abs().max()),
        relative_error(gradient, wanted_gradient),
    )


@functools.lru_cache
def model_of(family="Llama", *, lora=False, dtype=torch.float32, exact=False, **config):
    """The same one for all examples; an adapter is not zero, or half of its gradients would be."""
    model = family_model(family, dtype=dtype, **config)
    if exact:
        model = with_exact_norms(model)
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear", init_lora_weights=False),
            autocast_adapter_dtype=False,
        )
    return model


@contextlib.contextmanager
def checkpointing(model, use_reentrant: bool | None):
    """None: without."""
    model.train()
    if use_reentrant is None:
        yield
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


# ---- equality --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(groups, cuts, seeds, st.booleans(), st.booleans(), st.sampled_from([None, True, False]))
def test_packed_rows_in_float32(shape, cut, seed, lora, tied, use_reentrant):
    model = model_of(lora=lora, tie_word_embeddings=tied)
    with checkpointing(model, use_reentrant):
        assert max(errors(model, samples_of(shape, seed), cut, seed=seed)) < TOLERANCE[torch.float32]


@settings(max_examples=40, deadline=None)
@given(groups, cuts, seeds, st.booleans(), st.booleans(), st.sampled_from([None, True, False]))
def test_packed_rows_in_float64_with_exact_norms(shape, cut, seed, lora, tied, use_reentrant):
    model = model_of(lora=lora, tie_word_embeddings=tied, dtype=torch.float64, exact=True)
    with checkpointing(model, use_reentrant):
        assert max(errors(model, samples_of(shape, seed), cut, seed=seed)) < EXACT


@settings(max_examples=15, deadline=None)
@given(groups, cuts, seeds, st.booleans())
def test_sliding_windows_in_float64_with_exact_norms(shape, cut, seed, lora):
    model = model_of("Mistral", lora=lora, dtype=torch.float64, exact=True)
    assert max(errors(model, samples_of(shape, seed), cut, seed=seed)) < EXACT


SPECIAL = ("Mistral", "Gemma 2", "Gemma 3", "gpt-oss")
"""Windows; softcap; windows in some layers only; sinks."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", SPECIAL)
def test_windows_softcaps_and_sinks(family, dtype):
    @settings(max_examples=12, deadline=None)
    @given(groups, cuts, seeds, st.sampled_from([None, True, False]))
    def equal(shape, cut, seed, use_reentrant):
        if use_reentrant and not FAMILIES[family].takes_reentrant_checkpointing:
            use_reentrant = False
        model = model_of(family, dtype=dtype)
        with checkpointing(model, use_reentrant):
            assert max(errors(model, samples_of(shape, seed), cut, seed=seed)) < TOLERANCE[dtype]

    equal()


FORGOTTEN = {
    "window": ("Mistral", {"sliding_window": lambda _: None}),
    "window of some layers": ("Gemma 3", {"sliding_window": lambda _: None}),
    "softcap": ("Gemma 2", {"softcap": lambda _: None}),
    "sinks": ("gpt-oss", {"s_aux": lambda sinks: sinks - 20}),
    "scale": ("Gemma 2", {"scaling": lambda _: None}),
}


@pytest.mark.parametrize("family, forgotten", FORGOTTEN.values(), ids=FORGOTTEN)
def test_what_the_attention_forgets_would_show(monkeypatch, family, forgotten):
    """The equalities above are not true of any attention."""
    right = attention.shared_prompt_attention

    def forgetful(*args, **keywords):
        return right(*args, **{**keywords, **{name: change(keywords[name]) for name, change in forgotten.items()}})

    monkeypatch.setattr(attention, "shared_prompt_attention", forgetful)
    monkeypatch.setattr(LogprobModel, "_check_sharing", lambda *_: True)
    settings = {"query_pre_attn_scalar": 32} if "scaling" in forgotten else {}
    model = model_of(family, dtype=torch.float64, **settings)
    assert min(errors(model, samples_of([(20, [20, 3]), (30, [25])], 0))) > 1e-3


def test_completions_that_see_each_other_would_show(monkeypatch):
    """As in a causal row without a layout, which is what a packed row is by itself."""

    def causal(layout, attention, query, key, value):
        return attention(query, key, value)

    monkeypatch.setattr(attention, "_packed", causal)
    monkeypatch.setattr(LogprobModel, "_check_sharing", lambda *_: True)
    assert min(errors(model_of(), samples_of([(5, [9, 3, 4])], 0))) > 1e-3


@settings(max_examples=25, deadline=None)
@given(groups, seeds, st.integers(1, 12), st.sampled_from(["Llama", "Mistral", "Gemma 2"]))
def test_blocks_of_queries_change_nothing(shape, seed, block, family):
    """As long completions are computed: block after block, each with the keys that it may see."""
    model, samples = model_of(family, dtype=torch.float64), samples_of(shape, seed)
    whole = scored(model, samples, packed=True, seed=seed)
    with mock.patch.object(attention, "QUERY_BLOCK", block):
        cut = scored(model, samples, packed=True, seed=seed)
    torch.testing.assert_close(cut[0], whole[0], rtol=0, atol=1e-6)
    assert relative_error(cut[1], whole[1]) < TOLERANCE[torch.float64]


def test_two_draws_of_one_row_share_it_too():
    samples = [TrainingSample((5, 6, 7), (8 + place, 9), 1.0, True, True, None) for place in range(4)]
    batch = collate(samples, pad_token_id=2, device=CPU, packed=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 9, 9, 10, 9, 11, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 3, 4, 3, 4]]
    assert batch.logit_indices.tolist() == [2, 3, 2, 5, 2, 7, 2, 9]
    assert batch.num_tokens == 11


@pytest.mark.parametrize("multiple", [8, 64])
def test_padding_of_a_packed_row_is_seen_by_nobody(multiple):
    samples = samples_of([(7, [3, 9]), (4, [5])], 0)
    batch = collate(samples, pad_token_id=2, device=CPU, packed=True, pad_to_multiple_of=multiple)
    assert batch.input_ids.shape[1] % multiple == 0 and batch.num_tokens == 7 + 12 + 4 + 5 < batch.input_ids.shape[1]
    model = model_of(dtype=torch.float64, exact=True)
    assert max(errors(model, samples, Cut(multiple=multiple))) < EXACT
    logprob_model = LogprobModel(model)
    logprob_model.prepare(model, CPU)
    with torch.no_grad(), logprob_model.attention():
        found = logprob_model.logprobs(model, batch).logprobs
        batch.input_ids[0, batch.num_tokens :] = 77
        assert torch.equal(logprob_model.logprobs(model, batch).logprobs, found), "whatever the padding is"


def test_dropout_of_attention_is_that_of_the_model():
    """Off where scoring is without dropout, on where it is asked for."""
    from grupo.policy.logprob_model import disable_dropout

    model = family_model("Llama", attention_dropout=0.4)
    samples = samples_of([(9, [5, 6])], 0)
    batch = collate(samples, pad_token_id=2, device=CPU, packed=True)
    logprob_model = LogprobModel(model)
    logprob_model.prepare(model, CPU)
    assert logprob_model.use_prompt_sharing is True, "the check is not deceived by dropout"
    model.train()
    with torch.no_grad(), logprob_model.attention():
        with disable_dropout(model):
            quiet = [logprob_model.logprobs(model, batch).logprobs for _ in range(2)]
        noisy = [logprob_model.logprobs(model, batch).logprobs for _ in range(2)]
    assert torch.equal(*quiet) and not torch.equal(*noisy)


# ---- nothing is left behind ------------------------------------------------------------------------------------------


def implementations(model):
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


@torch.no_grad()
def padded_logits(model):
    """Of two rows of different lengths, the padding on the left."""
    ids = torch.tensor([[2, 2, 2, 7, 8, 9], [3, 4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    return model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0)).logits


@pytest.mark.parametrize("family", ["Llama", "Gemma 2", "Mistral"])
def test_the_model_is_its_own_again_afterwards(family):
    model = family_model(family).eval()
    before, logits = implementations(model), padded_logits(model)
    scored(model, samples_of([(4, [3, 5])], 0), packed=True)
    assert implementations(model) == before == [FAMILIES[family].attention] * len(before)
    assert torch.equal(padded_logits(model), logits)


@pytest.mark.parametrize("inside", ["forward", "backward", "check"])
def test_the_model_is_its_own_again_after_an_error(tmp_path, inside, monkeypatch):
    class Broken(Exception):
        pass

    def breaks(*_):
        raise Broken

    model = family_model("Llama")
    before, logits = implementations(model), padded_logits(model)
    trainer = make_trainer(tmp_path, model=model)
    layer = model.model.layers[1].mlp
    if inside == "check":
        monkeypatch.setattr(attention, "_packed", breaks)
    else:
        trainer.forward_backward.logprob_model.prepare(model, CPU)
        register = layer.register_forward_hook if inside == "forward" else layer.register_full_backward_hook
        register(breaks)
    with pytest.raises(Broken):
        trainer.train()
    layer._forward_hooks.clear()
    assert implementations(model) == before
    assert torch.equal(padded_logits(model.eval()), logits)


def test_configurations_that_differ_come_back_as_they_were():
    """A part of a model may have an attention of its own."""
    outer, inner = family_model("Llama"), family_model("Qwen3")
    outer.add_module("tower", inner)
    inner.config._attn_implementation_internal = "eager"
    with packed_attention(outer):
        assert {outer.config._attn_implementation, inner.config._attn_implementation} == {attention.ATTENTION}
    assert (outer.config._attn_implementation, inner.config._attn_implementation) == ("sdpa", "eager")


def test_two_models_one_after_the_other():
    samples = samples_of([(6, [4, 7, 2])], 0)
    first, second = family_model("Mistral", dtype=torch.float64), family_model("gpt-oss", dtype=torch.float64)
    alone = [scored(copy.deepcopy(model), samples, packed=True) for model in (first, second)]
    for model, (logprobs, gradient) in [(first, alone[0]), (second, alone[1]), (first, alone[0])]:
        again = scored(model, samples, packed=True)
        assert torch.equal(again[0], logprobs)
        assert relative_error(again[1], gradient) == 0


# ---- the check -------------------------------------------------------------------------------------------------------


class DropsTheLayout(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, attention_layout=None, **keywords):
        return super().forward(input_ids=input_ids, position_ids=position_ids, **keywords)


class HasItsOwnAttention(LlamaForCausalLM):
    """Takes everything and attends as it likes."""

    def forward(self, *args, **keywords):
        installed, self.config._attn_implementation_internal = self.config._attn_implementation_internal, "sdpa"
        try:
            return super().forward(*args, **keywords)
        finally:
            self.config._attn_implementation_internal = installed


class NoFurtherKeywords(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, logits_to_keep=0):
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
        )


class HidesItsWindows(MistralForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = _HidingAttention


class _HidingAttention(MistralAttention):
    """The mask has the window; the attention function is not told."""

    def forward(self, *args, **keywords):
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return super().forward(*args, **keywords)
        finally:
            self.config.sliding_window = window


def variant(kind, family, **config):
    model = family_model(family, **config)
    other = kind(model.config)
    other.load_state_dict(model.state_dict())
    return other


UNFIT = {
    "linear attention": (lambda: family_model("Qwen3.5"), "log-probs differ by"),
    "drops the layout": (lambda: variant(DropsTheLayout, "Llama"), "does not accept packed sequences"),
    "ignores the layout": (lambda: variant(HasItsOwnAttention, "Llama"), "log-probs differ by"),
    "no further keywords": (lambda: variant(NoFurtherKeywords, "Llama"), "no further keywords"),
    # Longer than anything in here: no number could tell.
    "hides its windows": (lambda: variant(HidesItsWindows, "Mistral", sliding_window=256), "sliding windows"),
}


@pytest.mark.parametrize("build, reason", UNFIT.values(), ids=UNFIT)
def test_a_model_that_cannot_share_is_noticed_told_once_and_trained_all_the_same(tmp_path, caplog, build, reason):
    caplog.set_level(logging.INFO, "grupo")
    trainer = make_trainer(tmp_path / "asked", model=build(), num_iterations=2, max_steps=2)
    spy = Spy(trainer)
    trainer.train()
    assert trainer.forward_backward.logprob_model.use_prompt_sharing is False
    told = [record.message for record in caplog.records if "once per completion" in record.message]
    assert len(told) == 1 and reason in told[0]

    plain = make_trainer(tmp_path / "told", model=build(), num_iterations=2, max_steps=2)
    plain.forward_backward.logprob_model.use_prompt_sharing = False
    wanted = Spy(plain)
    plain.train()
    for step, other in zip(spy.steps, wanted.steps, strict=True):
        assert distance(step.gradients, other.gradients) == 0


def test_a_model_that_can_share_says_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "grupo")
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert trainer.forward_backward.logprob_model.use_prompt_sharing is True
    assert "once per completion" not in caplog.text


def test_switched_off_nothing_is_packed_and_nothing_checked(monkeypatch):
    monkeypatch.setattr(LogprobModel, "_check_sharing", lambda *_: pytest.fail("checked"))
    model = family_model("Llama")
    logprob_model = LogprobModel(model, use_prompt_sharing=False)
    logprob_model.prepare(model, CPU)
    assert logprob_model.use_prompt_sharing is False
    with logprob_model.attention():
        assert implementations(model) == ["sdpa"] * len(implementations(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_allows_for_the_rounding_of_low_precision(dtype):
    model = family_model("Llama", dtype=dtype)
    logprob_model = LogprobModel(model)
    logprob_model.prepare(model, CPU)
    assert logprob_model.use_prompt_sharing is True


def test_the_layout_keyword_is_one_that_no_model_has():
    import inspect

    for name in FAMILIES:
        assert LAYOUT_KEYWORD not in inspect.signature(type(family_model(name)).forward).parameters


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def tokens_of(rows: Sequence[TrainingSample], packed: bool) -> int:
    batch = collate(rows, pad_token_id=2, device=CPU, packed=packed)
    return batch.input_ids.numel()


def fewest_parts(group: Sequence[TrainingSample], rows: int, budget: int | None) -> int:
    """Filled one after the other, the longest completions first."""
    prompt, parts, count, tokens = len(group[0].prompt_ids), 0, 0, 0
    for length in sorted((len(sample.completion_ids) for sample in group), reverse=True):
        if not parts or count == rows or (budget is not None and prompt + tokens + length > budget):
            parts, count, tokens = parts + 1, 0, 0
        count, tokens = count + 1, tokens + length
    return parts


@settings(max_examples=300, deadline=None)
@given(
    shape=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=12)), min_size=1, max_size=5
    ),
    seed=seeds,
    rows=st.integers(1, 20),
    budget=st.none() | st.integers(1, 400),
    packed=st.booleans(),
)
def test_micro_batches(shape, seed, rows, budget, packed):
    samples = samples_of(shape, seed)
    batches = list(micro_batches(samples, rows, token_budget=budget, packed=packed))
    assert sorted(id(sample) for batch in batches for sample in batch) == sorted(map(id, samples)), "each once"
    for batch in batches:
        assert 0 < len(batch) <= rows
        assert len(batch) == 1 or budget is None or tokens_of(batch, packed) <= budget
    if packed:
        for prompt in {sample.prompt_ids for sample in samples}:
            group = [sample for sample in samples if sample.prompt_ids == prompt]
            parts = [batch for batch in batches if any(sample.prompt_ids == prompt for sample in batch)]
            assert len(parts) <= fewest_parts(group, rows, budget), "every part computes the prompt once more"
            for batch in parts:
                members = [sample.prompt_ids == prompt for sample in batch]
                first = members.index(True)
                assert all(members[first : first + sum(members)]), "neighbours, or the prompt would be there twice"


def test_a_group_that_does_not_fit_is_cut_evenly():
    samples = samples_of([(10, [4] * 7)], 0)
    assert [len(batch) for batch in micro_batches(samples, 8, token_budget=10 + 24, packed=True)] == [4, 3]
    assert [len(batch) for batch in micro_batches(samples, 3, packed=True)] == [3, 3, 1]
    uneven = samples_of([(10, [60, 56, 49, 48, 40, 32, 30, 28, 24, 22, 17, 11, 9, 8, 8, 4])], 0)
    tokens = [tokens_of(batch, True) - 10 for batch in micro_batches(uneven, 16, token_budget=300, packed=True)]
    assert tokens == [60 + 56 + 49 + 48, 446 - 213], "and not 285 and 161"


@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_similar_length_stand_together(packed):
    samples = samples_of([(5, [1, 60]), (6, [2, 50]), (7, [3, 55])], 0)
    if packed:
        (batch,) = micro_batches(samples, 6, packed=True)
        assert tokens_of(batch, True) == 5 + 6 + 7 + 61 + 52 + 58, "nothing is padded and no prompt is there twice"
    else:
        long, short = micro_batches(samples, 3)
        assert {len(s.completion_ids) for s in long} == {60, 50, 55}
        assert {len(s.completion_ids) for s in short} == {1, 2, 3}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_the_token_budget_changes_no_gradient(tmp_path, monkeypatch, packed, loss_type):
    options = {"num_iterations": 2, "max_steps": 2, "beta": 0.1, "loss_type": loss_type}
    whole = run(tmp_path / "whole", **options)
    passes = set()
    for budget in (1, 17, 40, 100):
        trainer = make_trainer(tmp_path / str(budget), **options)
        trainer.forward_backward.token_budget = budget
        trainer.forward_backward.logprob_model.use_prompt_sharing = packed
        spy = Spy(trainer)
        with monkeypatch.context() as patch:
            batches = recorded_batches(patch)
            trainer.train()
        passes.add(len(batches))
        assert all(batch.input_ids.numel() <= budget or len(batch.lengths) == 1 for batch in batches)
        for step, wanted in zip(spy.steps, whole, strict=True):
            assert distance(step.gradients, wanted.gradients) < 1e-5
    assert len(passes) == 4, "each budget cuts the step in another way"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_batch_of_one_is_room_for_one_of_the_longest_rows(tmp_path, monkeypatch, packed):
    whole = run(tmp_path / "whole", max_completion_length=40)
    trainer = make_trainer(
        tmp_path / "one", max_completion_length=40, per_device_train_batch_size=1, gradient_accumulation_steps=16
    )
    trainer.forward_backward.logprob_model.use_prompt_sharing = packed
    room = max(len(row.token_ids) for row in trainer.train_rows) + 40
    spy = Spy(trainer)
    with monkeypatch.context() as patch:
        batches = recorded_batches(patch)
        trainer.train()
    batches = batches[1:]  # the first checks packed rows against padded ones
    rows = [len(batch.lengths) for batch in batches]
    assert all(batch.input_ids.numel() <= room for batch in batches)
    assert max(rows) > 1 if packed else set(rows) == {1}
    for step, wanted in zip(spy.steps, whole, strict=True):
        assert distance(step.gradients, wanted.gradients) < 1e-5


def test_gradients_of_the_trainer_are_those_of_padded_rows(tmp_path):
    """The whole step, with everything that is scored: policy, old policy, reference and entropy threshold."""
    options = {"num_iterations": 2, "max_steps": 2, "beta": 0.1, "top_entropy_quantile": 0.6, "entropy_coef": 0.05}
    packed = make_trainer(tmp_path / "packed", **options)
    padded = make_trainer(tmp_path / "padded", **options)
    padded.forward_backward.logprob_model.use_prompt_sharing = False
    spies = [Spy(packed), Spy(padded)]
    for trainer in (packed, padded):
        trainer.train()
    assert packed.forward_backward.logprob_model.use_prompt_sharing is True
    for step, wanted in zip(spies[0].steps, spies[1].steps, strict=True):
        assert distance(step.gradients, wanted.gradients) < 1e-5
        assert step.loss == pytest.approx(wanted.loss, abs=1e-6)
        assert step.metrics["entropy"] == pytest.approx(wanted.metrics["entropy"], rel=1e-5)
        assert step.metrics["computed_tokens"] < wanted.metrics["computed_tokens"]
    assert gradients(packed.model).keys() == gradients(padded.model).keys()
