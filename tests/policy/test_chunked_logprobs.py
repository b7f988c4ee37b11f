"""Chunked log-probs and entropy against plain log-softmax: values and gradients. N tokens, H hidden, V vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from grupo.policy.chunked_logprobs import chunked_logprobs, logprobs_from_logits


def naive(hidden, weight, targets, bias, temperature):
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    if bias is not None and torch.isinf(bias).any():
        # Forbidden tokens are not there at all.
        allowed = ~torch.isinf(bias)
        targets, logits = allowed.cumsum(0)[targets] - 1, logits[:, allowed]
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def problem(n=13, h=7, v=29, seed=0, dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    return leaf(n, h), leaf(v, h), torch.randint(v, (n,), generator=generator), leaf(v) if bias else None


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 20),
    v=st.integers(2, 40),
    token_chunk=st.integers(1, 25),
    vocabulary_chunk=st.integers(1, 45),
    temperature=st.floats(0.2, 3.0),
    bias=st.sampled_from(["none", "finite", "forbids"]),
    trained=st.sets(st.sampled_from(["hidden", "weight", "bias"]), min_size=1),
    entropy=st.sampled_from(["not asked for", "looked at", "with gradient"]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_log_softmax(
    n, v, token_chunk, vocabulary_chunk, temperature, bias, trained, entropy, seed
):
    """Whatever is frozen: head, bias, or everything below the head."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, targets, bias_term = problem(n=n, v=v, seed=seed, bias=bias != "none")
    if bias == "forbids":
        with torch.no_grad():
            forbidden = torch.rand(v, generator=generator) < 0.4
            bias_term[forbidden & ~torch.isin(torch.arange(v), targets)] = -torch.inf
    named = {"hidden": hidden, "weight": weight, **({} if bias_term is None else {"bias": bias_term})}
    leaves = [leaf.requires_grad_(name in trained) for name, leaf in named.items()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    coefficients = torch.randn(2, n, dtype=torch.float64, generator=generator)
    if entropy != "with gradient":
        coefficients = coefficients[:1]

    expected = naive(hidden, weight, targets, bias_term, temperature)
    got = chunked_logprobs(
        hidden, weight, targets, bias=bias_term, temperature=temperature, with_entropy=entropy != "not asked for",
        token_chunk=token_chunk, vocabulary_chunk=vocabulary_chunk,
    )  # fmt: skip
    assert (got[1] is None) == (entropy == "not asked for")
    pairs = [(one, other) for one, other in zip(got, expected, strict=True) if one is not None]
    if leaves:
        # Not strict: without gradient for the entropy there is one coefficient per token.
        losses = [sum((c * o).sum() for c, o in zip(coefficients, out, strict=False)) for out in (got, expected)]
        found, wanted = (torch.autograd.grad(loss, leaves) for loss in losses)
        pairs += zip(found, wanted, strict=True)
    for one, other in pairs:
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


class Products(TorchDispatchMode):
    """Multiplications and additions of every matrix product that runs, in units of N x V x H."""

    def __init__(self, unit):
        super().__init__()
        self.unit, self.count = unit, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            left, right = args[-2:]
            self.count += left.numel() * right.shape[-1] / self.unit
        return result


@pytest.mark.parametrize(
    "frozen, entropy, forwards, backwards",
    [
        (True, "not asked for", 2, 0),
        (True, "looked at", 2, 0),
        # The entropy's own gradient takes the logits again, and the product with the head.
        (True, "with gradient", 2, 2),
        # Logits again, and the products with head and hidden states.
        (False, "looked at", 1, 3),
        (False, "with gradient", 1, 3),
    ],
)
def test_projections_through_the_head(frozen, entropy, forwards, backwards):
    """A frozen head is done when the forward is: logits once, and the mean of its rows under the softmax."""
    hidden, weight, targets, _ = problem(n=12, h=8, v=30, bias=False)
    weight.requires_grad_(not frozen)
    unit = hidden.numel() * weight.shape[0]
    with Products(unit) as forward:
        logprobs, entropies = chunked_logprobs(
            hidden, weight, targets, with_entropy=entropy != "not asked for", token_chunk=5, vocabulary_chunk=7
        )
    loss = logprobs.sum() + (entropies.sum() if entropy == "with gradient" else 0)
    with Products(unit) as backward:
        loss.backward()
    assert (forward.count, backward.count) == pytest.approx((forwards, backwards))


def test_without_gradient_there_is_one_projection():
    """As in scoring of the reference and of the old policy."""
    hidden, weight, targets, _ = problem(bias=False)
    with torch.no_grad(), Products(hidden.numel() * weight.shape[0]) as products:
        chunked_logprobs(hidden, weight, targets, with_entropy=True, vocabulary_chunk=7)
    assert products.count == pytest.approx(1)


def test_one_pass_and_two_passes_agree_in_low_precision():
    """The frozen head rounds its mean row, the trained one its probabilities: both to bfloat16."""
    exact_hidden, exact_weight, targets, _ = problem(n=40, h=32, v=300, bias=False)
    gradients = {}
    for name, dtype, frozen in (
        ("exact", torch.float64, True),
        ("one pass", torch.bfloat16, True),
        ("two passes", torch.bfloat16, False),
    ):
        # The same numbers in every dtype.
        hidden, weight = (t.detach().bfloat16().to(dtype) for t in (exact_hidden, exact_weight))
        logprobs, _ = chunked_logprobs(hidden.requires_grad_(), weight.requires_grad_(not frozen), targets)
        logprobs.sum().backward()
        gradients[name] = hidden.grad.double()
    for name in ("one pass", "two passes"):
        error = (gradients[name] - gradients["exact"]).norm() / gradients["exact"].norm()
        assert error < 0.01, name


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
