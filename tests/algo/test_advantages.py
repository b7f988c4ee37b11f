"""Rewards to advantages: known values by hand, and what must not matter."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from grupo.algo.advantages import compute_advantages

SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
NAN = math.nan


def column(*rewards: float) -> torch.Tensor:
    """(B, 1) of one reward function."""
    return torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)


def approx(values: list[float], tolerance: float = 1e-5) -> object:
    return pytest.approx(values, abs=tolerance)


# Groups follow the prompt, not the position


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7], [7, 0, 2, 5, 4, 1, 6, 3]])
def test_groups_by_id_in_any_order(order: list[int]) -> None:
    """Prompt P always 5, prompt Q 0, 3, 3, 6, in grouped, interleaved and mixed layout (R1-V #67)."""
    rewards, ids = np.array([5.0, 5, 5, 5, 0, 3, 3, 6])[order], np.array([70, 70, 70, 70, 11, 11, 11, 11])[order]
    expected = {"group": 1.22469, "none": 3.0}
    for scale, size in expected.items():
        found = compute_advantages(column(*rewards), ids.tolist(), scale=scale)
        by_row = np.array([0.0, 0, 0, 0, -size, 0, 0, size])[order]
        assert found.advantages.tolist() == approx(by_row.tolist())
        assert found.has_signal.tolist() == [i == 11 for i in ids]


def test_bessel_and_epsilon() -> None:
    found = compute_advantages(column(0, 1, 1, 0), [3] * 4)
    assert found.advantages.tolist() == approx([-0.86588, 0.86588, 0.86588, -0.86588])
    assert found.group_std.tolist() == approx([math.sqrt(1 / 3)] * 4)
    assert found.group_mean.tolist() == [0.5] * 4


def test_uneven_groups_have_their_own_statistics() -> None:
    """One completion of a group was removed (THUDM/slime #1414, AReaL #1419)."""
    found = compute_advantages(column(1, 0, 3, 0, 2, 1), [0, 1, 1, 1, 0, 0], scale="none")
    assert found.advantages.tolist() == approx([1 - 4 / 3, -1, 2, -1, 2 - 4 / 3, 1 - 4 / 3])


def test_batch_scale_is_the_std_of_all_scored_rows() -> None:
    found = compute_advantages(column(0, 1, 1, 5, NAN, 1), [0, 0, 0, 1, 1, 1], scale="batch")
    std = np.std([0, 1, 1, 5, 1], ddof=1)
    expected = np.array([-2 / 3, 1 / 3, 1 / 3, 2, 0, -2]) / (std + 1e-4)
    assert found.advantages.tolist() == approx(expected.tolist(), 1e-12)


def test_two_ranks_see_one_group() -> None:
    """G 4 split 2 + 2, rewards 0, 1 | 1, 0 (NousResearch/torchtitan #69)."""
    found = compute_advantages(column(0, 1, 1, 0), [5, 5, 5, 5])
    assert found.advantages.tolist() == approx([-0.866, 0.866, 0.866, -0.866], 5e-4)


def test_the_order_of_rows_does_not_matter() -> None:
    generator = np.random.default_rng(0)
    scores = torch.tensor(generator.normal(size=(12, 2)))
    ids = torch.tensor([4, 4, 4, 4, 4, 1, 1, 1, 2, 2, 2, 2])
    order = torch.tensor(generator.permutation(12))
    for scale in SCALES:
        for aggregation in AGGREGATIONS:
            straight = compute_advantages(scores, ids, scale=scale, aggregation=aggregation)
            shuffled = compute_advantages(scores[order], ids[order], scale=scale, aggregation=aggregation)
            torch.testing.assert_close(shuffled.advantages, straight.advantages[order], atol=1e-13, rtol=0)


# Groups without a signal


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_are_exactly_no_signal(scale: str, aggregation: str) -> None:
    """Also next to a normal group (NVIDIA-NeMo/RL #4158, #4161)."""
    for reward, size, dtype in itertools.product((0.1, 0.7, 1 / 3, 0.9), (3, 7, 8, 12), (torch.float32, torch.float64)):
        scores = torch.tensor([reward] * size + [0.0, 1.0, 1.0], dtype=dtype).unsqueeze(1)
        found = compute_advantages(scores, [0] * size + [1] * 3, scale=scale, aggregation=aggregation)
        assert not (found.advantages[:size].any() or found.has_signal[:size].any() or found.group_std[:size].any())
        assert found.advantages[size:].all() and found.has_signal[size:].all()


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_whose_sums_differ_by_rounding_are_equal(scale: str) -> None:
    scores = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1], [0.0, 0.3]], dtype=torch.float64)
    assert len(set(scores.sum(dim=1).tolist())) > 1
    assert not compute_advantages(scores, [0] * 4, scale=scale).advantages.any()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.7, -0.7, 700.0, 7e-6])
def test_rewards_that_differ_by_float32_rounding_are_equal(reward: float, scale: str) -> None:
    """As from a reward model; the differences stay when the scores are float64 by the time they come in."""
    exact = np.float32(reward)
    scores = torch.tensor([[exact], [np.nextafter(exact, np.float32(1e9))], [exact]], dtype=torch.float64)
    assert scores[0] != scores[1]
    assert not compute_advantages(scores, [0] * 3, scale=scale).advantages.any()


def test_rounding_is_measured_by_what_was_added_up() -> None:
    """0.7 - 0.7 leaves a residue that is all there is of the total."""
    scores = torch.tensor([[0.7, -0.7, 0.0], [0.1 + 0.2, -0.2, -0.1]], dtype=torch.float64)
    assert len(set(scores.sum(dim=1).tolist())) > 1
    for scale in SCALES:
        assert not compute_advantages(scores, [0, 0], scale=scale).advantages.any()


@pytest.mark.parametrize("difference", [1e-3, 1e-5])
def test_small_real_differences_stay(difference: float) -> None:
    found = compute_advantages(column(1.0, 1.0 + difference), [0, 0], scale="none")
    assert found.advantages.tolist() == approx([-difference / 2, difference / 2], 1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_row_alone_has_nothing_to_be_better_than(scale: str, aggregation: str) -> None:
    """Alone in its group, or alone with a known reward (ruc-datalab/DeepAnalyze #116: the std of one is NaN)."""
    found = compute_advantages(column(2, NAN, 5, 0, 1), [0, 1, 1, 2, 2], scale=scale, aggregation=aggregation)
    assert not found.advantages[:3].any()
    assert found.advantages[3:].all()
    assert found.scored.tolist() == [True, False, True, True, True]
    assert found.group_std[:3].isnan().all()
    assert found.group_mean.tolist() == [2, 5, 5, 0.5, 0.5]
    alone = compute_advantages(column(7), [0], scale=scale, aggregation=aggregation)
    assert alone.advantages.tolist() == [0.0]


# Abstentions and failures


@pytest.mark.parametrize("scale", SCALES)
def test_an_abstention_is_left_out_of_its_row_only(scale: str) -> None:
    """modelscope/ms-swift #8123, huggingface/trl #3079."""
    first = torch.tensor([[1, 0], [NAN, 0.5], [0, 0.5], [1, NAN]], dtype=torch.float64)
    second = torch.tensor([[0, 0], [1, 0], [1, 0], [0, 0]], dtype=torch.float64)
    ids = [0] * 4 + [1] * 4
    found = compute_advantages(torch.cat([first, second]), ids, scale=scale)
    assert found.rewards.tolist() == [1, 0.5, 0.5, 1, 0, 1, 1, 0]
    without = compute_advantages(torch.cat([first.nan_to_num(0.0), second]), ids, scale=scale)
    torch.testing.assert_close(found.advantages[4:], without.advantages[4:], atol=1e-15, rtol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_rows_without_a_known_reward_enter_no_statistic(scale: str, aggregation: str) -> None:
    scores = torch.tensor([[1, 0], [0, 2], [NAN, NAN], [9, NAN], [0, 1], [1, 1]], dtype=torch.float64)
    ids, failed = [0, 0, 0, 0, 1, 1], torch.tensor([False, False, False, True, False, False])
    found = compute_advantages(scores, ids, failed=failed, scale=scale, aggregation=aggregation)
    assert found.scored.tolist() == [True, True, False, False, True, True]
    assert found.advantages[2:4].tolist() == [0.0, 0.0]
    assert found.rewards[2:4].isnan().all()
    rest = [0, 1, 4, 5]
    alone = compute_advantages(scores[rest], [0, 0, 1, 1], scale=scale, aggregation=aggregation)
    torch.testing.assert_close(found.advantages[rest], alone.advantages, atol=1e-15, rtol=0)
    torch.testing.assert_close(found.group_mean[rest], alone.group_mean, atol=1e-15, rtol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_scored_is_no_signal(aggregation: str) -> None:
    found = compute_advantages(torch.full((3, 2), NAN), [0, 0, 1], aggregation=aggregation)
    assert not found.advantages.any()
    assert not found.scored.any()
    assert not found.has_signal.any()
    assert found.group_mean.isnan().all()


def test_no_rows() -> None:
    found = compute_advantages(torch.empty(0, 2), [])
    assert found.advantages.shape == found.has_signal.shape == (0,)


# Several rewards


def test_weights() -> None:
    """Always 2 with weight 0.5 and always 10 with weight 0.1 make 2 (huggingface/trl #5352)."""
    found = compute_advantages(torch.tensor([[2.0, 10.0]] * 3), [0] * 3, weights=[0.5, 0.1])
    assert found.rewards.tolist() == approx([2.0] * 3, 1e-12)
    assert not found.advantages.any()


def test_normalize_then_sum_keeps_rewards_of_different_size_apart() -> None:
    """GDPO's point: a reward of size 1 with weight 2 outweighs one of size 100; summed first, it would not count."""
    scores = torch.tensor([[1, 0], [0, 100]], dtype=torch.float64)
    summed_first = compute_advantages(scores, [0, 0], weights=[2.0, 1.0])
    assert summed_first.advantages.tolist() == approx([-math.sqrt(0.5), math.sqrt(0.5)])
    found = compute_advantages(scores, [0, 0], aggregation="normalize_then_sum", weights=[2.0, 1.0])
    # By hand: +-0.5 and +-50 over their standard deviations, weighted; then the batch of two over its own.
    total = 2 * 0.5 / (math.sqrt(0.5) + 1e-4) - 50 / (math.sqrt(5000) + 1e-4)
    expected = total / (total * math.sqrt(2) + 1e-4)
    assert found.advantages.tolist() == approx([expected, -expected], 1e-12)


def test_a_dead_group_beside_a_live_one_is_dead_under_normalize_then_sum() -> None:
    scores = torch.tensor([[0.1, 0.3], [0.1, 0.3], [0.1, 0.3], [1.0, 0.2], [0.3, 0.9], [0.4, 0.7]])
    found = compute_advantages(scores, [0, 0, 0, 1, 1, 1], aggregation="normalize_then_sum")
    assert not found.advantages[:3].any()
    assert found.has_signal.tolist() == [False] * 3 + [True] * 3


# The edges of the interface


def test_no_graph_and_no_change_of_the_callers_tensors() -> None:
    scores = torch.tensor([[1.0], [0.0]], requires_grad=True)
    failed = torch.tensor([True, False])
    found = compute_advantages(scores, [0, 0], failed=failed)
    assert not found.advantages.requires_grad
    assert scores.tolist() == [[1.0], [0.0]]


def test_the_arithmetic_is_float64_whatever_comes_in() -> None:
    """In float32, the mean of three rewards near 1e4 is off by 5e-4."""
    given = np.array([10000.1, 10000.2, 10000.4], dtype=np.float32)
    found = compute_advantages(torch.tensor(given)[:, None], [0] * 3)
    rewards = given.astype(np.float64)
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert found.advantages.dtype == torch.float64
    assert found.advantages.tolist() == approx(expected.tolist(), 1e-9)
    weighted = compute_advantages(column(1, 0), [0, 0], weights=[0.1])
    assert weighted.rewards.tolist() == [0.1, 0.0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scale": "groups"}, "scale='groups'.*batch, group, none"),
        ({"aggregation": "sum"}, "aggregation='sum'.*normalize_then_sum"),
        ({"weights": [1.0, 2.0]}, "1 reward functions and 2 weights"),
    ],
)
def test_unknown_names_and_misfits_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_advantages(column(1, 0), [0, 0], **arguments)  # type: ignore[arg-type]


def test_shapes_and_infinities_are_refused() -> None:
    with pytest.raises(ValueError, match=r"with B group ids; their shapes are \(2, 1\) and \(3,\)"):
        compute_advantages(column(1, 0), [0, 0, 0])
    with pytest.raises(ValueError, match=r"shapes are \(2,\)"):
        compute_advantages(torch.tensor([1.0, 0.0]), [0, 0])
    with pytest.raises(ValueError, match="infinite"):
        compute_advantages(column(1, math.inf), [0, 0])
