"""What a reward function may return, and how None, NaN and infinity are handled.

All forms of values are in tests/rewards/execution/test_runner.py; these tests cover their effect on a run. TRL #6533,
PR #6534 (wrong counts), PRs #3079, #5773, #5775 (None), #3936; modelscope/ms-swift #8123 (one NaN affects the batch).
"""

from __future__ import annotations

import math
from decimal import Decimal

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

VALID = {
    "list": SCORES,
    "float32 array": np.array(SCORES, dtype=np.float32),
    "tensor that requires grad": torch.tensor(SCORES, requires_grad=True),
    "series": pd.Series(SCORES),
    "decimals": [Decimal(str(score)) for score in SCORES],
}
INVALID = {
    "seven": ([1.0] * 7, "returned 7 rewards for 8 completions"),
    "column": (torch.ones(8, 1), r"shape \(8, 1\).*\(8,\).*squeeze\(1\)"),
    "text": (["1.0"] * 8, r"a str \('1.0'\) as reward 0"),
    "nothing": (None, "returned None .*lack a return"),
}


def advantages_and_weights(folder, scores, **settings):
    trainer = make_trainer(folder, given(scores), script=SCRIPT, **settings)
    train(trainer)
    return advantages_of(trainer), snapshot(trainer.model)


def test_valid_forms_train_the_same(tmp_path):
    results = {name: advantages_and_weights(tmp_path / name, scores) for name, scores in VALID.items()}
    wanted_advantages, wanted_weights = results.pop("list")
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
def test_the_other_prompt_is_not_affected(tmp_path, settings):
    """With "batch" and "normalize_then_sum", prompts share one standard deviation by definition."""
    filled = advantages_of(run_two(tmp_path / "filled", with_value(A, 1, 0), with_value(B, 3, 0), **settings))
    abstained = advantages_of(run_two(tmp_path / "none", A, B, **settings))
    assert torch.equal(abstained[4:], filled[4:])
    wanted = torch.tensor([-1, 1, 1, -1]) * (
        0.5 / (1 / math.sqrt(3) + 1e-4) if settings["scale_rewards"] == "group" else 0.5
    )
    torch.testing.assert_close(abstained[4:], wanted.double())


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=ids)
def test_one_value_that_is_not_finite_costs_one_completion(tmp_path, settings, caplog):
    trainer = run_two(tmp_path, with_value(A, 0, math.nan), B, **settings)
    first, *rest = completions_of(trainer)
    assert first["statuses"]["reward"] == "failed" and first["reward"] is None and first["advantage"] == 0
    assert [completion["reward"] for completion in rest] == [0.5, 0.5, 1, 0, 1, 1, 0]
    assert logs_of(trainer)[0]["rewards/reward/failed_share"] == 1 / 8
    assert "'reward'" in caplog.text and "completion 0" in caplog.text, "function and row are named"


def test_a_failed_completion_is_not_in_the_loss(tmp_path):
    """Neither in the statistics of its group nor in the denominators, as if it had not been sampled."""
    scores = [math.nan, 0, 1, 1, 0, 1, 1, 0]
    trainer = make_trainer(tmp_path, given(scores), script=SCRIPT, loss_type="dapo", scale_rewards="none")
    train(trainer)
    torch.testing.assert_close(advantages_of(trainer)[:4], torch.tensor([0, -2 / 3, 1 / 3, 1 / 3]).double())
    # Tokens with the stop token: 3, 2, 3 without the failed completion, and 2, 3, 2, 3 of the other prompt.
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


def test_a_completion_that_all_functions_abstain_on_is_left_out_and_logged(tmp_path, caplog):
    trainer = run_two(tmp_path, with_value(A, 3, None), B, scale_rewards="batch")
    row = completions_of(trainer)[3]
    assert row["reward"] is None and row["advantage"] == 0
    assert "1 of 8 completions" in caplog.text and "abstained" in caplog.text


def test_a_group_that_all_functions_abstain_on_has_zero_variance(tmp_path):
    trainer = run_two(tmp_path, [None] * 4 + A[4:], [None] * 4 + B[4:])
    assert advantages_of(trainer)[:4].tolist() == [0, 0, 0, 0] and advantages_of(trainer)[4:].abs().min() > 0.8
    assert logs_of(trainer)[0]["frac_reward_zero_std"] == 0.5


def test_abstaining_on_everything_trains_nothing(tmp_path):
    trainer = make_trainer(tmp_path, given([None] * 8), script=SCRIPT, beta=0.1)
    before = snapshot(trainer.model)
    train(trainer)
    (line,) = logs_of(trainer)
    assert unchanged(trainer.model, before) and line["loss"] == 0 and line["grad_norm"] == 0
    assert "reward" not in line, "no completion has a reward, so there is no mean"


def test_numbers_beyond_float32_stay_finite(tmp_path):
    trainer = make_trainer(tmp_path, given([1e300, 0, 0, 0, 1e-300, 0, 0, 0]), script=SCRIPT)
    train(trainer)
    assert all_finite(trainer.model) and torch.isfinite(advantages_of(trainer)).all()
