"""The losses against an independent reference, by hand, and under every way to cut a step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grupo.algo.losses import AGGREGATIONS, LossInputs, StepTotals
from grupo.algo.registry import LOSSES
from loss_cases import LEVELS, Case, Settings, assert_same, entropies, grpo_loss, log_softmax, random_case, run_grupo
from loss_reference import hand_gradient, loss_by_loops, reference

QUICK = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def options(draw: st.DrawFn) -> dict[str, object]:
    """Any combination of the options that change a loss."""
    return {
        "epsilon": draw(st.sampled_from([0.2, 0.05])),
        "epsilon_high": draw(st.sampled_from([None, 0.28, 1.5])),
        "delta": draw(st.sampled_from([None, 1.4, 3.0])),
        "beta": draw(st.sampled_from([0.0, 0.04, 1.0])),
        "use_bias_correction_kl": draw(st.booleans()),
        "off_policy_mask_threshold": draw(st.sampled_from([None, 0.05, 0.3])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "top_entropy_quantile": draw(st.sampled_from([1.0, 0.37])),
    }


@st.composite
def cases(draw: st.DrawFn, loss_type: str, level: str) -> Case:
    return random_case(
        draw(st.integers(0, 10**6)),
        Settings(loss_type=loss_type, importance_sampling_level=level, **draw(options())),  # type: ignore[arg-type]
        batch=draw(st.integers(2, 6)),
        length=draw(st.integers(1, 5)),
        vocabulary=draw(st.integers(2, 6)),
        on_policy=draw(st.booleans()),
        with_behavior=draw(st.booleans()),
        full_rows=draw(st.booleans()),
        off_policyness=draw(st.sampled_from([0.01, 0.5, 2.0])),
    )


# Against the independent reference


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_level_and_option_equals_the_reference(loss_type: str, level: str) -> None:
    @QUICK
    @given(cases(loss_type, level), st.sampled_from([None, math.nan, math.inf, -math.inf, 1e30]), st.integers(1, 3))
    def check(case: Case, garbage: float | None, micro_batches: int) -> None:
        assert_same(run_grupo(case, garbage=garbage, micro_batches=micro_batches), reference(case))

    check()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_reference_gradients_are_the_finite_differences_of_its_values(loss_type: str) -> None:
    for level, seed in itertools.product(LEVELS, range(3)):
        options = {"importance_sampling_level": level, "beta": 0.1, "delta": 2.0, "epsilon_high": 0.3}
        case = random_case(seed, Settings(loss_type=loss_type, **options))  # type: ignore[arg-type]
        logprobs = np.take_along_axis(log_softmax(case.logits), case.actions[..., None], axis=2)[..., 0]
        gradient = hand_gradient(case, logprobs)
        step = 1e-6
        for i, t in np.ndindex(*logprobs.shape):
            up, down = logprobs.copy(), logprobs.copy()
            up[i, t] += step
            down[i, t] -= step
            slope = (loss_by_loops(case, up, logprobs) - loss_by_loops(case, down, logprobs)) / (2 * step)
            assert gradient[i, t] == pytest.approx(slope, abs=1e-7)


BROKEN = {
    "rows of the micro-batch": lambda totals, mask: replace(totals, completions=len(mask), tokens=mask.numel()),
    "one too many": lambda totals, mask: replace(totals, completions=totals.completions + 1, tokens=totals.tokens + 1),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_broken_denominator_is_noticed(loss_type: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(3, Settings(loss_type=loss_type))
    assert_same(run_grupo(case), reference(case))
    name = LOSSES[loss_type].aggregation
    right = AGGREGATIONS[name]
    monkeypatch.setitem(
        AGGREGATIONS, name, lambda loss, mask, totals, length: right(loss, mask, BROKEN[fault](totals, mask), length)
    )
    with pytest.raises(AssertionError):
        assert_same(run_grupo(case), reference(case))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_another_aggregation_is_noticed(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(4, Settings(loss_type=loss_type))
    for name in AGGREGATIONS:
        if name != LOSSES[loss_type].aggregation:
            with monkeypatch.context() as patch, pytest.raises(AssertionError):
                patch.setitem(LOSSES, loss_type, replace(LOSSES[loss_type], aggregation=name))
                assert_same(run_grupo(case), reference(case))


# How a step is cut, padded and ordered does not matter


@pytest.fixture(params=LOSSES)
def full_case(request: pytest.FixtureRequest) -> Case:
    """A step of eight rows with every option on."""
    return random_case(
        11,
        Settings(
            loss_type=request.param,
            beta=0.1,
            delta=1.5,
            off_policy_mask_threshold=0.1,
            entropy_coef=0.02,
            top_entropy_quantile=0.6,
        ),
        batch=8,
        with_behavior=True,
    )


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_micro_batches_add_up_to_the_step(
    full_case: Case, micro_batches: int, dtype: torch.dtype, tolerance: float
) -> None:
    whole, cut = run_grupo(full_case, dtype=dtype), run_grupo(full_case, micro_batches=micro_batches, dtype=dtype)
    assert_same(cut, whole, tolerance=tolerance)
    assert cut.metrics == pytest.approx(whole.metrics, abs=tolerance)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e30])
def test_padding_and_what_stands_on_it_do_not_matter(full_case: Case, garbage: float) -> None:
    plain, padded = run_grupo(full_case), run_grupo(full_case, garbage=garbage, extra_columns=3)
    assert_same(padded, plain, tolerance=1e-13)
    assert padded.metrics == pytest.approx(plain.metrics, abs=1e-13)


def test_the_order_of_rows_does_not_matter(full_case: Case) -> None:
    order = np.random.default_rng(0).permutation(8)
    plain, shuffled = run_grupo(full_case), run_grupo(full_case.rows(order))
    assert shuffled.loss == pytest.approx(plain.loss, abs=1e-13)
    np.testing.assert_allclose(shuffled.gradient, plain.gradient[order], atol=1e-13)
    assert shuffled.metrics == pytest.approx(plain.metrics, abs=1e-13)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_rows_without_advantage_can_be_left_out(loss_type: str) -> None:
    """Their gradient is zero while they stay in the denominator, so skipping their forward changes nothing."""
    case = random_case(5, Settings(loss_type=loss_type), batch=6)
    case = replace(case, advantages=np.where(np.arange(6) % 2, case.advantages, 0.0))
    whole = run_grupo(case)
    assert not whole.gradient[::2].any()

    part = case.rows(np.arange(1, 6, 2))
    logits = torch.tensor(part.logits, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1).gather(2, torch.tensor(part.actions)[..., None])[..., 0]
    output = case.settings.loss_function()(
        LossInputs(logprobs, torch.tensor(part.advantages), torch.tensor(part.mask), torch.tensor(part.old)),
        StepTotals(int(case.mask.sum()), int(case.mask.any(axis=1).sum()), 0),
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(whole.loss, abs=1e-14)
    np.testing.assert_allclose(logits.grad, whole.gradient[1::2], atol=1e-14)


# What a gradient must do


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_positive_advantage_raises_and_a_negative_one_lowers_the_log_prob(loss_type: str, level: str) -> None:
    logprobs = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(logprobs, torch.tensor([1.0, -1.0]), torch.ones(2, 3, dtype=torch.bool))
    loss_function = grpo_loss(loss_type=loss_type, importance_sampling_level=level)
    loss_function(inputs, StepTotals(6, 2, 6)).loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad[0] < 0).all()
    assert (logprobs.grad[1] > 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_all_losses_agree_on_policy_where_rows_are_equally_long(level: str) -> None:
    """At ratio 1 every loss is REINFORCE; only the denominators differ, and for equal lengths they are known."""
    case = random_case(6, on_policy=True, full_rows=True).with_settings(importance_sampling_level=level)
    expected = run_grupo(case.with_settings(loss_type="dapo")).gradient
    length = case.mask.shape[1]
    factor = {"luspo": length, "dr_grpo": length / case.settings.max_completion_length}
    for loss_type in LOSSES:
        gradient = run_grupo(case.with_settings(loss_type=loss_type)).gradient
        # At sequence level the gradient of a row is shared out evenly, which the per-token losses do on their own.
        np.testing.assert_allclose(gradient, expected * factor.get(loss_type, 1.0), atol=1e-13)


@pytest.mark.parametrize("level", LEVELS)
def test_the_expected_kl_gradient_is_the_reverse_kl_gradient(level: str) -> None:
    """All 9 two-token completions of a tabular policy, weighted by their probability (DeepSeek-V3.2; trl #6586)."""
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=3), generator.normal(size=(3, 3))
    reference_first = log_softmax(generator.normal(size=3))
    reference_second = log_softmax(generator.normal(size=(3, 3)))

    first_logits = torch.tensor(first, requires_grad=True)
    second_logits = torch.tensor(second, requires_grad=True)
    log_first, log_second = torch.log_softmax(first_logits, 0), torch.log_softmax(second_logits, 1)
    a, b = (index.reshape(-1) for index in np.indices((3, 3)))
    probability = (log_first[a] + log_second[a, b]).exp().detach()
    loss_function = grpo_loss(beta=1.0, importance_sampling_level=level)
    for row in range(9):
        # One completion at a time, so that each can be weighted by how often it is sampled.
        inputs = LossInputs(
            policy_logprobs=torch.stack([log_first[a[row]], log_second[a[row], b[row]]])[None],
            advantages=torch.zeros(1),
            mask=torch.ones(1, 2, dtype=torch.bool),
            reference_logprobs=torch.tensor([[reference_first[a[row]], reference_second[a[row], b[row]]]]),
        )
        (loss_function(inputs, StepTotals(2, 1, 2)).loss * probability[row]).backward(retain_graph=True)
    found_first, found_second = first_logits.grad, second_logits.grad

    first_logits.grad = second_logits.grad = None
    kl_first = (log_first.exp() * (log_first - torch.tensor(reference_first))).sum()
    kl_second = (log_second.exp() * (log_second - torch.tensor(reference_second))).sum(dim=1)
    ((kl_first + (log_first.exp().detach() * kl_second).sum()) / 2).backward()
    torch.testing.assert_close(found_first, first_logits.grad, atol=1e-12, rtol=0)
    torch.testing.assert_close(found_second, second_logits.grad, atol=1e-12, rtol=0)


def test_the_kl_estimate_keeps_its_digits_where_the_policy_has_hardly_moved() -> None:
    logprobs = torch.full((1, 1), -1.0, dtype=torch.float32, requires_grad=True)
    inputs = LossInputs(
        logprobs,
        torch.zeros(1),
        torch.ones(1, 1, dtype=torch.bool),
        reference_logprobs=torch.full((1, 1), -1.0 + 2**-12),
    )
    output = grpo_loss(beta=1.0)(inputs, StepTotals(1, 1, 1))
    assert output.loss.item() == pytest.approx(2.0**-25, rel=1e-3)


# Known values by hand


def test_accumulation_by_hand() -> None:
    """Eight completions of 2,3,5,8,2,3,5,8 tokens (huggingface/trl #5619, #6024; modelscope/ms-swift #10116)."""
    lengths = [2, 3, 5, 8, 2, 3, 5, 8]
    advantages = np.array([1.0, -0.5, 0.25, 2.0, -1.0, 0.5, -0.25, 0.75])
    case = random_case(8, batch=8, length=8, on_policy=True, full_rows=True)
    mask = np.arange(8)[None] < np.array(lengths)[:, None]
    case = replace(case, mask=mask, advantages=advantages)
    token_sum = sum(a * n for a, n in zip(advantages, lengths, strict=True))
    expected = {"dapo": -token_sum / 36, "dr_grpo": -token_sum / (8 * 20), "grpo": -advantages.mean()}
    for loss_type, loss in expected.items():
        step = case.with_settings(loss_type=loss_type, max_completion_length=20)
        whole = run_grupo(step)
        assert whole.loss == pytest.approx(loss, abs=1e-12)
        for micro_batches in (4, 8):
            assert_same(run_grupo(step, micro_batches=micro_batches), whole, tolerance=1e-12)
            single = run_grupo(step, micro_batches=micro_batches, dtype=torch.float32)
            assert np.linalg.norm(single.gradient - whole.gradient) <= 1e-5 * np.linalg.norm(whole.gradient)
        assert run_grupo(step, extra_columns=5).loss == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_whose_rows_are_all_masked_has_zero_loss_and_zero_gradient(loss_type: str, beta: float) -> None:
    """huggingface/trl #3248: everything is truncated, and truncated completions are masked."""
    case = random_case(9, Settings(loss_type=loss_type, beta=beta, entropy_coef=0.1), with_behavior=True)
    result = run_grupo(replace(case, mask=np.zeros_like(case.mask)), garbage=math.nan)
    assert result.loss == 0.0
    assert not result.gradient.any()


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_masked_tokens_leave_numerator_and_denominator_together(beta: float) -> None:
    """One row of 4 tokens with advantage 1 and one masked row of 12: the loss is -1, not -4/16 (trl #6369)."""
    logprobs = torch.full((2, 12), -1.0, requires_grad=True)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, :4] = True
    inputs = LossInputs(logprobs, torch.tensor([1.0, -3.0]), mask, reference_logprobs=logprobs.detach())
    for loss_type in ("dapo", "bnpo", "grpo"):
        assert grpo_loss(loss_type=loss_type, beta=beta)(inputs, StepTotals(4, 1, 4)).loss.item() == -1.0


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_two_ranks_by_hand(loss_type: str) -> None:
    """Rank 0 has rows of 2 tokens, rank 1 rows of 6; advantages -a, a, a, -a (huggingface/trl #3231, #6024)."""
    a = math.sqrt(3) / 2
    logprobs = torch.full((4, 6), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(6)[None] < torch.tensor([[2], [2], [6], [6]])
    inputs = LossInputs(logprobs, torch.tensor([-a, a, a, -a], dtype=torch.float64), mask)
    grpo_loss(loss_type=loss_type, max_completion_length=6)(inputs, StepTotals(16, 4, 16)).loss.backward()
    per_token = {"grpo": [1 / 8, 1 / 8, 1 / 24, 1 / 24], "dapo": [1 / 16] * 4, "dr_grpo": [1 / 24] * 4}[loss_type]
    expected = torch.tensor([[a], [-a], [-a], [a]]) * torch.tensor(per_token)[:, None] * mask
    torch.testing.assert_close(logprobs.grad, expected.to(torch.float64), atol=1e-7, rtol=0)

    ranks = [slice(0, 2), slice(2, 4)]
    halves = []
    for rows in ranks:
        own = torch.full((2, 6), -1.0, dtype=torch.float64, requires_grad=True)
        part = LossInputs(own, inputs.advantages[rows], mask[rows])
        grpo_loss(loss_type=loss_type, max_completion_length=6)(part, StepTotals(16, 4, 16)).loss.backward()
        halves.append(own.grad)
    torch.testing.assert_close(torch.cat(halves), logprobs.grad, atol=0, rtol=0)


def test_clipping_by_hand() -> None:
    """Ratios 0.5, 1, 1.5 and 4 under both signs, epsilon 0.2, epsilon_high 0.28, delta 3."""
    old = torch.zeros(2, 4, dtype=torch.float64)
    ratios = torch.tensor([[0.5, 1.0, 1.5, 4.0]], dtype=torch.float64).repeat(2, 1)
    logprobs = ratios.log().requires_grad_()
    inputs = LossInputs(logprobs, torch.tensor([1.0, -1.0]), torch.ones(2, 4, dtype=torch.bool), old_logprobs=old)
    output = grpo_loss(epsilon=0.2, epsilon_high=0.28, delta=3.0)(inputs, StepTotals(8, 2, 8))
    assert output.loss.item() == pytest.approx((-(0.5 + 1.0 + 1.28 + 1.28) + (0.8 + 1.0 + 1.5 + 3.0)) / 8)
    output.loss.backward()
    expected = torch.tensor([[-0.5, -1.0, 0.0, 0.0], [0.0, 1.0, 1.5, 0.0]], dtype=torch.float64) / 8
    torch.testing.assert_close(logprobs.grad, expected)
    ratio = {name: (numerator / denominator).item() for name, (numerator, denominator) in output.sums.items()}
    assert ratio["clip_ratio/low_mean"] == pytest.approx(1 / 8)
    assert ratio["clip_ratio/high_mean"] == pytest.approx(2 / 8)
    assert ratio["clip_ratio/region_mean"] == pytest.approx(3 / 8)
    assert ratio["ratio/mean"] == pytest.approx(7 / 4)
    assert output.extremes["clip_ratio/low_min"].item() == 0.0
    assert output.extremes["clip_ratio/high_max"].item() == pytest.approx(0.5)


def test_cispo_does_not_scale_an_on_policy_gradient() -> None:
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    inputs = LossInputs(logprobs, torch.tensor([1.0]), torch.ones(1, 2, dtype=torch.bool))
    grpo_loss(loss_type="cispo")(inputs, StepTotals(2, 1, 2)).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.5, -0.5]]


def test_off_policy_mask_by_hand() -> None:
    """Only the drifted row with a negative advantage is dropped; a token without a log-prob is no evidence."""
    logprobs = torch.full((5, 2), -2.0, requires_grad=True)
    behavior = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.9, -2.0], [math.nan, -2.0]])
    inputs = LossInputs(
        logprobs,
        torch.tensor([-1.0, 0.0, 1.0, -1.0, -1.0]),
        torch.ones(5, 2, dtype=torch.bool),
        behavior_logprobs=behavior,
    )
    output = grpo_loss(loss_type="luspo", off_policy_mask_threshold=0.5)(inputs, StepTotals(10, 5, 10))
    (output.loss * 5).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0], [0.0, 0.0], [-1.0, -1.0], [1.0, 1.0], [1.0, 1.0]]
    kept, rows = output.sums["off_policy/kept_mean"]
    assert (kept.item(), rows.item()) == (4.0, 5)


def test_vespo_by_hand() -> None:
    """phi(w) of sequence ratios e, 1/e and 1, and of a token ratio beyond exp(20), which counts as exp(20)."""
    old = -torch.tensor([[0.5, 0.5], [-0.5, -0.5], [50.0, -20.0]], dtype=torch.float64)
    logprobs = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(logprobs, torch.tensor([1.0, -1.0, 1.0]), torch.ones(3, 2, dtype=torch.bool), old_logprobs=old)
    output = grpo_loss(loss_type="vespo")(inputs, StepTotals(6, 3, 6))
    (output.loss * 6).backward()
    phi = [math.exp(3 + 2 - 3 * math.e), math.exp(2 - 3 - 2 / math.e), 1.0]
    expected = torch.tensor([[-phi[0]] * 2, [phi[1]] * 2, [-phi[2]] * 2], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)
    total, rows = output.sums["vespo/phi_seq_mean"]
    assert total.item() / rows.item() == pytest.approx(sum(phi) / 3)


def test_kl_can_be_left_out_of_rows() -> None:
    logprobs = torch.full((2, 2), -2.0, requires_grad=True)
    inputs = LossInputs(
        logprobs,
        torch.zeros(2),
        torch.ones(2, 2, dtype=torch.bool),
        reference_logprobs=torch.full((2, 2), -1.0),
        kl_completions=torch.tensor([True, False]),
    )
    output = grpo_loss(beta=0.5)(inputs, StepTotals(4, 2, 4))
    output.loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad[0] != 0).all()
    assert not logprobs.grad[1].any()
    numerator, denominator = output.sums["kl"]
    assert numerator.item() / denominator.item() == pytest.approx(math.e - 2)


# The edges of the interface


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("columns", [0, 3])
def test_an_empty_micro_batch_gives_a_connected_zero(loss_type: str, rows: int, columns: int) -> None:
    """A rank with less work still runs a backward, or the others wait for it for ever."""
    logprobs = torch.full((rows, columns), math.nan, requires_grad=True)
    inputs = LossInputs(
        logprobs,
        torch.ones(rows),
        torch.zeros(rows, columns, dtype=torch.bool),
        reference_logprobs=torch.zeros(rows, columns),
        entropy=torch.full((rows, columns), math.nan),
    )
    output = grpo_loss(loss_type=loss_type, beta=0.1)(inputs, StepTotals(10, 2, 10), entropy_coef=0.1)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    assert all(numerator == 0 and denominator == 0 for numerator, denominator in output.sums.values())
    assert all(math.isinf(value.item()) for value in output.extremes.values())


def test_the_dtype_of_the_log_probs_is_kept() -> None:
    for loss_type, dtype in itertools.product(LOSSES, (torch.float32, torch.float64)):
        logprobs = torch.full((1, 2), -1.0, dtype=dtype, requires_grad=True)
        inputs = LossInputs(logprobs, torch.ones(1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
        assert grpo_loss(loss_type=loss_type)(inputs, StepTotals(2, 1, 2)).loss.dtype == dtype


def test_metrics_and_policy_loss_carry_no_graph() -> None:
    case = random_case(1, Settings(beta=0.1, entropy_coef=0.1, off_policy_mask_threshold=0.1), with_behavior=True)
    logits = torch.tensor(case.logits, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    inputs = LossInputs(
        logprobs[..., 0],
        torch.tensor(case.advantages),
        torch.tensor(case.mask),
        reference_logprobs=torch.tensor(case.reference),
        entropy=-(logprobs.exp() * logprobs).sum(-1),
    )
    output = case.settings.loss_function()(inputs, StepTotals(10, 4, 10), entropy_coef=0.1)
    assert output.loss.requires_grad
    values = [output.policy_loss, *output.extremes.values(), *(x for pair in output.sums.values() for x in pair)]
    assert not any(value.requires_grad for value in values)


def test_the_entropy_metric_is_the_token_mean() -> None:
    case = random_case(2)
    assert run_grupo(case).metrics["entropy"] == pytest.approx(entropies(case.logits)[case.mask].mean())


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"loss_type='dappo'.*dapo"):
        grpo_loss(loss_type="dappo")
    with pytest.raises(ValueError, match=r"importance_sampling_level='word'.*sequence, token"):
        grpo_loss(importance_sampling_level="word")
