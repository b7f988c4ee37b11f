"""Intervals against published values, closed forms, and their coverage in simulations. P prompts, S samples of each."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from grupo.evals.statistics import Interval, clustered_interval, paired_difference, student95, wilson

Z = 1.959963984540054
T3 = 3.182446305284263  # Student's t with 3 degrees of freedom


def beta_bernoulli(p: float, correlation: float, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """(runs, P, S) of 0 and 1 with mean p; two samples of a prompt have this correlation, those of two prompts none."""
    generator = np.random.default_rng(seed)
    if correlation == 0:
        of_prompt = np.full(shape[:2], p)
    elif correlation == 1:
        of_prompt = (generator.random(shape[:2]) < p).astype(float)
    else:
        strength = 1 / correlation - 1
        of_prompt = generator.beta(p * strength, (1 - p) * strength, shape[:2])
    return (generator.random(shape) < of_prompt[..., None]).astype(float)


def coverage(p: float, correlation: float, prompts: int, samples: int, runs: int = 1500) -> float:
    drawn = beta_bernoulli(p, correlation, (runs, prompts, samples), seed=0)
    intervals = [clustered_interval(run.tolist()) for run in drawn]
    return sum(interval.low <= p <= interval.high for interval in intervals) / runs


# ---- Wilson ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_values(right: int, count: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17, 857 (1998), table I, method 3."""
    assert wilson(right / count, count) == pytest.approx((low, high), abs=5e-5)


def test_the_bounds_of_wilson_are_where_the_score_test_turns() -> None:
    """|share - p| is z standard errors of p, at both bounds."""
    for share, count in ((0.3, 40), (0.95, 12.5), (0.01, 300)):
        for bound in wilson(share, count):
            assert abs(share - bound) == pytest.approx(Z * math.sqrt(bound * (1 - bound) / count))


# ---- one model -------------------------------------------------------------------------------------------------------


def test_one_sample_per_prompt_is_wilson() -> None:
    interval = clustered_interval([[1.0]] * 6 + [[0.0]] * 14)
    assert interval == Interval(0.3, *wilson(0.3, 20), 20)


def test_repeating_an_answer_adds_no_information() -> None:
    once = clustered_interval([[1.0]] * 6 + [[0.0]] * 14)
    often = clustered_interval([[1.0] * 5] * 6 + [[0.0] * 5] * 14)
    assert (often.mean, often.low, often.high) == pytest.approx((once.mean, once.low, once.high))
    assert (once.n, often.n) == (20, 100)


def test_the_effective_number_of_samples_is_between_prompts_and_samples() -> None:
    """p (1 - p) over the variance of the prompt means (Kish), by hand."""
    right = [3, 1, 2, 0, 3]
    scores = [[1.0] * count + [0.0] * (4 - count) for count in right]
    means = [count / 4 for count in right]
    effective = 0.45 * 0.55 / (statistics.variance(means) / 5)
    assert 5 < effective < 20
    assert clustered_interval(scores) == Interval(0.45, *wilson(0.45, effective), 20)
    # Prompts that agree more than independent samples would are not trusted further than that.
    agreeing = clustered_interval([[1.0, 0.0, 1.0, 0.0]] * 7 + [[1.0, 1.0, 1.0, 0.0]])
    assert (agreeing.low, agreeing.high) == wilson(agreeing.mean, 32)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_or_all_wrong_is_no_certainty(value: float) -> None:
    interval = clustered_interval([[value] * 4] * 20)
    assert (interval.low, interval.high) == wilson(value, 20)
    assert interval.high - interval.low > 0.15
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1


def test_rewards_that_are_no_shares_get_a_normal_interval_of_the_prompt_means() -> None:
    interval = clustered_interval([[-1.0, -3.0], [0.5, 1.5], [4.0, 2.0], [0.0, 0.0]])
    error = statistics.stdev([-2.0, 1.0, 3.0, 0.0]) / 2
    assert (interval.mean, interval.n) == (0.5, 8)
    assert (interval.low, interval.high) == pytest.approx((0.5 - T3 * error, 0.5 + T3 * error), rel=0.01)


def test_one_prompt_says_nothing_about_others() -> None:
    interval = clustered_interval([[-2.0, 3.0]])
    assert (interval.mean, interval.low, interval.high) == (0.5, -math.inf, math.inf)
    interval = clustered_interval([[1.0, 0.0, 1.0, 1.0]])
    assert (interval.low, interval.high) == wilson(0.75, 1)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.7, 1.0])
def test_the_interval_covers_the_truth_in_95_of_100_runs(p: float, correlation: float) -> None:
    """As many prompts and samples as the quickstart has."""
    assert 0.92 <= coverage(p, correlation, prompts=38, samples=4) <= 0.98


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_it_covers_a_rare_success_nearly_as_often(correlation: float) -> None:
    """Two right prompts of 38 tell little about how much samples of one prompt agree."""
    assert 0.89 <= coverage(0.05, correlation, prompts=38, samples=4) <= 0.98


def test_taking_samples_for_independent_would_cover_too_little() -> None:
    """What the clusters are for: the simulation can tell a wrong interval from a right one."""
    drawn = beta_bernoulli(0.5, 0.7, (1500, 38, 4), seed=0).reshape(1500, -1)
    bounds = [wilson(float(run.mean()), run.size) for run in drawn]
    assert sum(low <= 0.5 <= high for low, high in bounds) / len(bounds) < 0.85


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 3.182), (5, 2.571), (9, 2.262), (30, 2.042), (120, 1.980)])
def test_student_gives_the_published_quantiles(degrees: int, quantile: float) -> None:
    assert student95(degrees) == pytest.approx(quantile, rel=0.01)


# ---- two models ------------------------------------------------------------------------------------------------------


def test_the_paired_difference_by_hand() -> None:
    before = [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    after = [[1.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    error = statistics.stdev([1.0, 0.5, 0.5, -0.5]) / 2
    interval = paired_difference(before, after)
    assert (interval.mean, interval.n) == (0.375, 8)
    assert (interval.low, interval.high) == pytest.approx((0.375 - T3 * error, 0.375 + T3 * error), rel=0.02)
    swapped = paired_difference(after, before)
    assert (swapped.mean, swapped.low, swapped.high) == (-0.375, -interval.high, -interval.low)


def test_the_same_answers_are_no_difference() -> None:
    scores = [[1.0, 0.0], [0.0, 0.0]]
    assert paired_difference(scores, scores) == Interval(0.0, 0.0, 0.0, 4)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError):
        paired_difference([[1.0]], [[1.0], [0.0]])


@pytest.mark.parametrize("prompts", [6, 38])
@pytest.mark.parametrize("gain", [0.0, 0.2])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_paired_interval_covers_the_change(gain: float, correlation: float, prompts: int) -> None:
    """Both models find the same prompts hard; the change is what the second one gains on each."""
    runs, samples = 1500, 4
    generator = np.random.default_rng(0)
    strength = 1 / correlation - 1 if correlation else 1e9
    hard = generator.beta(0.4 * strength, 0.6 * strength, (runs, prompts, 1))
    before = (generator.random((runs, prompts, samples)) < hard).astype(float)
    after = (generator.random((runs, prompts, samples)) < hard + gain * (1 - hard)).astype(float)
    truth = gain * 0.6
    intervals = [paired_difference(old.tolist(), new.tolist()) for old, new in zip(before, after, strict=True)]
    covered = sum(interval.low <= truth <= interval.high for interval in intervals) / runs
    assert 0.92 <= covered <= 0.98
    if correlation and prompts > 6:
        unpaired = [clustered_interval(new.tolist()) for new in after]
        width = sum(interval.high - interval.low for interval in intervals)
        assert width < sum(interval.high - interval.low for interval in unpaired) * math.sqrt(2)
