"""C1 and C2: what a reward function may return, and what becomes of None, NaN and infinity.

TRL #6533, PR #6534 (wrong counts), PRs #3079, #5773, #5775 (None), #3936; ms-swift #8123 (one NaN poisons the batch).
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from grupo.errors import RewardError
from harness import (
    SCORES,
    SCRIPT,
    advantages_of,
    all_finite,
    completions_of,
    given,
    logs_of,
    make_trainer,
    snapshot,
    train,
    unchanged,
)

WHOLE = [1, 0, 0, 2, 0, 1, 1, 3]

VALID = {
    "list of float": SCORES,
    "tuple": tuple(SCORES),
    "float32 array": np.array(SCORES, dtype=np.float32),
    "object array": np.array(SCORES, dtype=object),
    "float64 tensor": torch.tensor(SCORES, dtype=torch.float64),
    "bfloat16 tensor": torch.tensor(SCORES, dtype=torch.bfloat16),
    "tensor that requires grad": torch.tensor(SCORES, requires_grad=True),
    "numpy scalars": [np.float32(score) for score in SCORES],
    "tensor scalars": [torch.tensor(score, requires_grad=True) for score in SCORES],
    "series": pd.Series(SCORES),
    "decimals": [Decimal(str(score)) for score in SCORES],
    "fractions": [Fraction(score) for score in SCORES],
}
VALID_WHOLE = {
    "list of int": WHOLE,
    "int array": np.array(WHOLE),
    "int tensor": torch.tensor(WHOLE),
    "mixed": [1, 0.0, False, np.int64(2), torch.tensor(0), True, np.float16(1), Decimal(3)],
}
VALID_BOOL = {"list of bool": [True, False] * 4, "bool array": np.array([True, False] * 4), "int": [1, 0] * 4}

INVALID = {
    "one value": ([1.0], "returned 1 reward for 8 completions"),
    "seven": ([1.0] * 7, "returned 7 rewards for 8 completions"),
    "nine": ([1.0] * 9, "returned 9 rewards for 8 completions"),
    "none": ([], "returned 0 rewards for 8 completions"),
    "scalar": (1.0, "a float; it must return a list of 8 numbers"),
    "array scalar": (np.float32(1.0), r"an array of shape \(\)"),
    "column": (torch.ones(8, 1), r"shape \(8, 1\).*\(8,\).*squeeze\(1\)"),
    "row": (np.ones((1, 8)), r"shape \(1, 8\).*\(8,\)"),
    "square": (np.ones((8, 8)), r"shape \(8, 8\)"),
    "nested": ([[1.0]] * 8, r"a list \(\[1.0\]\) as reward 0"),
    "one-element tensors": ([torch.ones(1)] * 8, "a Tensor .* as reward 0"),
    "text": (["1.0"] * 8, r"a str \('1.0'\) as reward 0"),
    "one text": ("11111111", "a str; it must return a list of 8 numbers"),
    "dict": ({"score": SCORES}, "a dict; it must return"),
    "generator": ((score for score in SCORES), "a generator; it must return"),
    "complex": ([1j] * 8, "a complex .* as reward 0"),
    "nothing": (None, "returned None .*lack a return"),
}


def advantages_and_weights(folder, scores, **settings):
    trainer = make_trainer(folder, given(scores), script=SCRIPT, **settings)
    train(trainer)
    return advantages_of(trainer), snapshot(trainer.model)


@pytest.mark.parametrize("forms", [VALID, VALID_WHOLE, VALID_BOOL], ids=["float", "int", "bool"])
def test_valid_forms_train_the_same(tmp_path, forms):
    results = {name: advantages_and_weights(tmp_path / name, scores) for name, scores in forms.items()}
    wanted_advantages, wanted_weights = results.pop(next(iter(forms)))
    assert wanted_advantages.abs().max() > 0.8
    for name, (advantages, weights) in results.items():
        assert torch.equal(advantages, wanted_advantages), name
        assert all(torch.equal(weights[key], wanted_weights[key]) for key in weights), name


@pytest.mark.parametrize("scores, message", INVALID.values(), ids=INVALID)
def test_invalid_forms_are_refused_before_any_update(tmp_path, scores, message):
    def judge(completions, **columns):
        return scores

    trainer = make_trainer(tmp_path, [given(SCORES), judge], script=SCRIPT)
    before = snapshot(trainer.model)
    with pytest.raises(RewardError, match=message) as caught:
        trainer.train()
    assert "'judge'" in str(caught.value)
    assert unchanged(trainer.model, before) and trainer.state.global_step == 0


def test_the_wrong_count_is_refused_in_evaluation_as_well(tmp_path):
    trainer = make_trainer(tmp_path, given([1.0]), script=SCRIPT, eval_rows=[{"prompt": "ab"}])
    with pytest.raises(RewardError, match="returned 1 reward for 4 completions"):
        trainer.evaluate()


def test_a_reward_that_requires_grad_stays_out_of_the_graph(tmp_path):
    knob = torch.tensor(2.0, requires_grad=True)

    def reward(completions, **columns):
        return knob * torch.tensor(SCORES)

    trainer = make_trainer(tmp_path, reward, script=SCRIPT)
    train(trainer)
    assert knob.grad is None


# ---- None, NaN, infinity ---------------------------------------------------------------------------------------------

A = [1, None, 0, 1, 0, 1, 1, 0]
B = [0, 0.5, 0.5, None, 0, 0, 0, 0]
SCALES = [{"scale_rewards": scale} for scale in ("group", "batch", "none")]
AGGREGATIONS = [*SCALES, {"multi_objective_aggregation": "normalize_then_sum"}]
ids = [next(iter(settings.values())) for settings in AGGREGATIONS]


def with_value(scores, row, value):
    return [*scores[:row], value, *scores[row + 1 :]]


def run_two(folder, a, b, **settings):
    trainer = make_trainer(folder, [given(a), given(b)], script=SCRIPT, **settings)
    train(trainer)
    assert all_finite(trainer.model)
    assert all(math.isfinite(value) for line in trainer.state.log_history for value in line.values())
    return trainer


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=ids)
def test_none_is_an_abstention_not_a_zero(tmp_path, settings):
    trainer = run_two(tmp_path, A, B, **settings)
    totals = [completion["reward"] for completion in completions_of(trainer)]
    assert totals == [1, 0.5, 0.5, 1, 0, 1, 1, 0]
    (line,) = logs_of(trainer)
    assert line["rewards/reward/mean"] == pytest.approx(4 / 7), "None rows are not in the mean"
    assert line["rewards/reward/abstained_share"] == 1 / 8 and line["rewards/reward/failed_share"] == 0
    assert line["reward"] == pytest.approx(sum(totals) / 8)


@pytest.mark.parametrize("settings", [SCALES[0], SCALES[2]], ids=["group", "none"])
def test_the_other_prompt_does_not_notice(tmp_path, settings):
    """With "batch", and with a sum brought to the scale of the batch, prompts share one spread by definition."""
    filled = advantages_of(run_two(tmp_path / "filled", with_value(A, 1, 0), with_value(B, 3, 0), **settings))
    abstained = advantages_of(run_two(tmp_path / "none", A, B, **settings))
    assert torch.equal(abstained[4:], filled[4:])
    wanted = torch.tensor([-1, 1, 1, -1]) * (
        0.5 / (1 / math.sqrt(3) + 1e-4) if settings["scale_rewards"] == "group" else 0.5
    )
    torch.testing.assert_close(abstained[4:], wanted.double())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)], ids=str)
@pytest.mark.parametrize("settings", AGGREGATIONS, ids=ids)
def test_one_value_that_is_no_number_costs_one_completion(tmp_path, settings, value, caplog):
    trainer = run_two(tmp_path, with_value(A, 0, value), B, **settings)
    first, *rest = completions_of(trainer)
    assert first["statuses"]["reward"] == "failed" and first["reward"] is None and first["advantage"] == 0
    assert [completion["reward"] for completion in rest] == [0.5, 0.5, 1, 0, 1, 1, 0]
    assert logs_of(trainer)[0]["rewards/reward/failed_share"] == 1 / 8
    assert "'reward'" in caplog.text and "completion 0" in caplog.text, "function and row are named"


def test_a_failed_row_is_not_in_the_loss(tmp_path):
    """Its group is compared without it, and its tokens leave the denominators: as if it had not been sampled."""
    scores = [math.nan, 0, 1, 1, 0, 1, 1, 0]
    trainer = make_trainer(tmp_path, given(scores), script=SCRIPT, loss_type="dapo", scale_rewards="none")
    train(trainer)
    torch.testing.assert_close(advantages_of(trainer)[:4], torch.tensor([0, -2 / 3, 1 / 3, 1 / 3]).double())
    # Tokens with the stop token: 3, 2, 3 beside the failed row, and 2, 3, 2, 3 of the other prompt.
    policy = -(3 * -2 / 3 + 2 * 1 / 3 + 3 * 1 / 3 + 2 * -0.5 + 3 * 0.5 + 2 * 0.5 + 3 * -0.5)
    assert logs_of(trainer)[0]["loss"] == pytest.approx(policy / 18, abs=1e-6)
    assert logs_of(trainer)[0]["effective_tokens"] == 18


def test_too_many_failures_stop_the_run_with_function_and_count(tmp_path):
    trainer = make_trainer(tmp_path, given(with_value(SCORES, 2, math.nan)), script=SCRIPT, max_failed_reward_share=0.1)
    before = snapshot(trainer.model)
    with pytest.raises(
        RewardError, match=r"1 of 8 completions .*\(12%\).*max_failed_reward_share=10%.*'reward' returned nan"
    ):
        trainer.train()
    assert unchanged(trainer.model, before)


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=ids)
def test_a_row_that_all_functions_abstain_on_is_left_out_and_told(tmp_path, settings, caplog):
    trainer = run_two(tmp_path, with_value(A, 3, None), B, **settings)
    row = completions_of(trainer)[3]
    assert row["reward"] is None and row["advantage"] == 0
    assert "1 of 8 completions" in caplog.text and "abstained" in caplog.text


def test_a_group_that_all_functions_abstain_on_is_dead(tmp_path):
    trainer = run_two(tmp_path, [None] * 4 + A[4:], [None] * 4 + B[4:])
    assert advantages_of(trainer)[:4].tolist() == [0, 0, 0, 0] and advantages_of(trainer)[4:].abs().min() > 0.8
    assert logs_of(trainer)[0]["frac_reward_zero_std"] == 0.5


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_abstaining_on_everything_trains_nothing(tmp_path, beta):
    trainer = make_trainer(tmp_path, given([None] * 8), script=SCRIPT, beta=beta)
    before = snapshot(trainer.model)
    train(trainer)
    (line,) = logs_of(trainer)
    assert unchanged(trainer.model, before) and line["loss"] == 0 and line["grad_norm"] == 0
    assert "reward" not in line, "no completion has a reward, so there is no mean"


def test_one_known_reward_in_a_group_has_nothing_to_be_better_than(tmp_path):
    trainer = make_trainer(tmp_path, given([5, None, None, None, 0, 1, 1, 0]), script=SCRIPT)
    train(trainer)
    assert advantages_of(trainer)[:4].tolist() == [0, 0, 0, 0] and all_finite(trainer.model)


def test_numbers_beyond_float32_stay_finite(tmp_path):
    trainer = make_trainer(tmp_path, given([1e300, 0, 0, 0, 1e-300, 0, 0, 0]), script=SCRIPT)
    train(trainer)
    assert all_finite(trainer.model) and torch.isfinite(advantages_of(trainer)).all()
