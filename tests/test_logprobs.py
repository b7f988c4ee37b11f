"""Chunked log-probs and entropy against plain log-softmax: values and gradients. N tokens, H hidden, V vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grupo.scoring.logprobs import chunked_logprobs, logprobs_from_logits


def naive(hidden, weight, targets, bias, temperature):
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def problem(n=13, h=7, v=29, seed=0, dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    return leaf(n, h), leaf(v, h), torch.randint(v, (n,), generator=generator), leaf(v) if bias else None


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 20),
    v=st.integers(2, 40),
    token_chunk=st.integers(1, 25),
    vocabulary_chunk=st.integers(1, 45),
    temperature=st.floats(0.2, 3.0),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_log_softmax(n, v, token_chunk, vocabulary_chunk, temperature, bias, seed):
    hidden, weight, targets, bias_term = problem(n=n, v=v, seed=seed, bias=bias)
    leaves = [leaf for leaf in (hidden, weight, bias_term) if leaf is not None]
    coefficients = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    expected = naive(hidden, weight, targets, bias_term, temperature)
    wanted = torch.autograd.grad(sum((c * e).sum() for c, e in zip(coefficients, expected, strict=True)), leaves)
    got = chunked_logprobs(
        hidden, weight, targets, bias=bias_term, temperature=temperature, with_entropy=True,
        token_chunk=token_chunk, vocabulary_chunk=vocabulary_chunk,
    )  # fmt: skip
    found = torch.autograd.grad(sum((c * g).sum() for c, g in zip(coefficients, got, strict=True)), leaves)

    for one, other in [*zip(got, expected, strict=True), *zip(found, wanted, strict=True)]:
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("which", ["logprobs", "entropy"])
def test_gradient_of_one_output_alone(which):
    hidden, weight, targets, bias = problem()
    index = 0 if which == "logprobs" else 1
    expected = torch.autograd.grad(naive(hidden, weight, targets, bias, 0.7)[index].sum(), [hidden, weight])
    output = chunked_logprobs(
        hidden, weight, targets, bias=bias, temperature=0.7, with_entropy=True, vocabulary_chunk=8
    )
    found = torch.autograd.grad(output[index].sum(), [hidden, weight])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_frozen_head_gets_no_gradient():
    hidden, weight, targets, _ = problem(bias=False)
    weight = weight.detach()
    logprobs, _ = chunked_logprobs(hidden, weight, targets)
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_extreme_logits_stay_finite():
    """A token of probability 0 has log p = -inf; it must not turn the entropy or a gradient into NaN."""
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [200.0], [-200.0]], requires_grad=True)
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([1, 2]), with_entropy=True, vocabulary_chunk=2)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(logprobs.detach(), torch.tensor([0.0, -400.0]))
    assert torch.isfinite(entropy).all() and torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_full_logits_path_agrees():
    hidden, weight, targets, bias = problem()
    expected = naive(hidden, weight, targets, bias, 1.3)
    found = logprobs_from_logits(hidden @ weight.T + bias, targets, temperature=1.3, with_entropy=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_full_logits_path_survives_forbidden_tokens():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    logprobs, entropy = logprobs_from_logits(logits, torch.tensor([1]), with_entropy=True)
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(entropy).all() and torch.isfinite(logits.grad).all()


def test_bfloat16_hidden_states_give_float32_results():
    hidden, weight, targets, _ = problem(dtype=torch.float32, bias=False)
    exact, _ = chunked_logprobs(hidden.double(), weight.double(), targets)
    rounded, _ = chunked_logprobs(hidden.bfloat16(), weight.bfloat16(), targets)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), exact, rtol=0.05, atol=0.1)


def test_bfloat16_logprobs_of_likely_tokens_are_those_of_full_logits():
    hidden, weight, _, _ = problem(n=64, h=64, v=500, dtype=torch.float32, bias=False)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = hidden @ weight.T
    targets = logits.argmax(-1)
    expected, _ = logprobs_from_logits(logits, targets)
    found, _ = chunked_logprobs(hidden, weight, targets, vocabulary_chunk=123)
    torch.testing.assert_close(found, expected)
    assert (found <= 0).all()


def test_head_in_float32_is_closer_than_bfloat16():
    hidden, weight, targets, _ = problem(n=64, h=64, v=500, dtype=torch.float32, bias=False)
    low = hidden.detach().bfloat16(), weight.detach().bfloat16()
    exact, _ = chunked_logprobs(low[0].double(), low[1].double(), targets)
    error_float32 = (chunked_logprobs(*low, targets, head_in_float32=True)[0] - exact).abs().max()
    error_bfloat16 = (chunked_logprobs(*low, targets)[0] - exact).abs().max()
    assert error_float32 < 1e-4 < error_bfloat16
