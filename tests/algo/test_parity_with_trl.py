"""The same tensors through TRL 1.16.0's own code and through grupo: equal, but for what docs/differences.md lists."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl import GRPOConfig, GRPOTrainer

from grupo.algo.advantages import compute_advantages
from grupo.algo.entropy import EntropyController
from loss_cases import LEVELS, Case, Settings, assert_same, entropies, random_case, run_grupo
from trl_oracle import loss_trainer, trl_advantages, trl_inputs, trl_loss

TRL_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SCALES = ("group", "batch", "none")
QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"

# The loss


@st.composite
def comparable_cases(draw: st.DrawFn, loss_type: str, level: str) -> Case:
    """Any step on which docs/differences.md promises equality."""
    options = Settings(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=draw(st.sampled_from([0.2, 0.05])),
        epsilon_high=draw(st.sampled_from([0.28, 1.5] if loss_type == "cispo" else [None, 0.28, 1.5])),
        delta=draw(st.sampled_from([None, 1.4, 3.0])),
        beta=draw(st.sampled_from([0.0, 0.04, 1.0])),
        use_bias_correction_kl=draw(st.booleans()) if level == "token" else False,
        off_policy_mask_threshold=draw(st.sampled_from([None, 0.05, 0.3])),
        entropy_coef=draw(st.sampled_from([0.0, 0.01, 0.5])),
        top_entropy_quantile=draw(st.sampled_from([1.0, 0.37])),
    )
    case = random_case(
        draw(st.integers(0, 10**6)),
        options,
        # Two tokens at least: TRL rounds the threshold to float32, so a single token may fail to reach itself.
        batch=draw(st.integers(3, 6)),
        length=draw(st.integers(2, 5)),
        on_policy=draw(st.booleans()),
        with_behavior=draw(st.booleans()),
        off_policyness=draw(st.sampled_from([0.01, 0.5, 2.0])),
    )
    return case.rows(slice(0, -1))  # without the row that has no token


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_values_gradients_and_metrics_equal_trl(loss_type: str, level: str) -> None:
    @QUICK
    @given(comparable_cases(loss_type, level))
    def check(case: Case) -> None:
        ours, theirs = run_grupo(case), trl_loss(case)
        assert_same(ours, theirs, tolerance=1e-10)
        for name, value in theirs.metrics.items():
            if name != "entropy_coef":
                assert ours.metrics[name] == pytest.approx(value, abs=1e-6), name

    check()


@pytest.mark.parametrize("seed", range(3))
def test_gspo_equals_trl_with_grpo_at_sequence_level(seed: int) -> None:
    case = random_case(seed, Settings(loss_type="gspo")).rows(slice(0, -1))
    assert_same(run_grupo(case), trl_loss(case, loss_type="grpo", importance_sampling_level="sequence"))


@pytest.mark.parametrize("loss_type", sorted(set(TRL_LOSS_TYPES) - {"bnpo"}))
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulated_steps_equal_trl(loss_type: str, micro_batches: int) -> None:
    case = random_case(7, Settings(loss_type=loss_type, epsilon_high=0.5, beta=0.1), batch=9).rows(slice(0, -1))
    ours, theirs = run_grupo(case, micro_batches=micro_batches), trl_loss(case, micro_batches=micro_batches)
    assert_same(ours, theirs)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_rewards_to_gradient_equals_trl(loss_type: str, level: str, scale: str) -> None:
    """Rewards with abstentions, advantages, loss, gradient: the whole chain on the same numbers."""
    for seed in range(3):
        generator = np.random.default_rng(seed)
        scores = torch.tensor(generator.normal(size=(8, 2)))
        scores[generator.random((8, 2)) < 0.2] = math.nan
        scores[:, 0].nan_to_num_(nan=0.3)
        options = Settings(loss_type=loss_type, importance_sampling_level=level, epsilon_high=0.4)
        case = random_case(seed, options, batch=9).rows(slice(0, -1))
        theirs = trl_advantages(scores, 4, weights=[1.0, 0.5], scale_rewards=scale)[0]
        ours = compute_advantages(scores, [0] * 4 + [1] * 4, weights=[1.0, 0.5], scale=scale).advantages
        assert_same(
            run_grupo(replace(case, advantages=ours.numpy())),
            trl_loss(replace(case, advantages=theirs.numpy())),
        )


def test_the_adaptive_entropy_coefficient_equals_trl() -> None:
    settings = {"entropy_target": 1.35, "entropy_coef_delta": 0.1, "entropy_coef_min": 0.0, "entropy_coef_max": 0.55}
    first = random_case(0, Settings(entropy_coef=0.5))
    trainer = loss_trainer({**vars(first.settings), **settings}, 1, 1)
    trainer.use_adaptive_entropy, trainer._entropy_window_stats, trainer._last_world_entropy = True, None, math.inf
    ours = EntropyController(0.5, target=1.35, delta=0.1, minimum=0.0, maximum=0.55)
    applied = set()
    for seed in range(30):
        case = random_case(seed, first.settings, batch=3).rows(slice(0, -1))
        step = case.with_settings(entropy_coef=ours.applied_coef)
        tokens = torch.tensor(float(case.mask.sum()))
        theirs = trainer._compute_loss(None, trl_inputs(trainer, case, torch.tensor(case.logits), tokens))
        assert run_grupo(step).loss == pytest.approx(theirs.item(), abs=1e-12)
        acting = entropies(case.logits)[case.mask]
        ours.update(float(acting.sum()), acting.size)
        assert (ours.coef, ours.last_entropy) == pytest.approx((trainer.entropy_coef, trainer._last_world_entropy))
        applied.add(round(ours.applied_coef, 6))
    assert {0.0, 0.55} <= applied, "target or bound were never reached, so nothing was tested"


# The advantages


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_advantages_equal_trl(aggregation: str, scale: str, group_size: int) -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        scores = torch.tensor(generator.choice([0.0, 0.5, 1.0, 2.5], size=(3 * group_size, 3)))
        scores[generator.random(scores.shape) < 0.3] = math.nan
        weights = generator.normal(size=3).tolist()
        ours = compute_advantages(
            scores,
            np.repeat([5, 2, 9], group_size).tolist(),
            weights=weights,
            scale=scale,
            aggregation=aggregation,
        )
        theirs, metrics = trl_advantages(
            scores, group_size, weights=weights, scale_rewards=scale, multi_objective_aggregation=aggregation
        )
        # TRL leaves rounding residue where all rewards of a group are equal; see the exclusions.
        torch.testing.assert_close(ours.advantages, theirs, atol=1e-10, rtol=1e-10)
        assert ours.rewards.nanmean().item() == pytest.approx(metrics["reward"], nan_ok=True)
        if aggregation == "sum_then_normalize" and scale != "batch":
            assert (ours.group_std == 0).double().mean().item() == pytest.approx(metrics["frac_reward_zero_std"])


# The exclusions: for each, that TRL differs, and what makes both equal


def differs(ours: float | np.ndarray, theirs: float | np.ndarray) -> bool:
    return not np.allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def cispo_bound_by_default() -> None:
    case = random_case(1, Settings(loss_type="cispo"), on_policy=True).rows(slice(0, -1))
    ours, theirs = run_grupo(case), trl_loss(case)
    np.testing.assert_allclose(theirs.gradient, ours.gradient / 5, atol=1e-12)  # TRL bounds the ratio 1 by 0.2
    switched = case.with_settings(epsilon_high=0.2)
    assert_same(run_grupo(switched), theirs)


def token_count_of_the_optimizer_step() -> None:
    case = random_case(2, batch=9).rows(slice(0, -1))
    for loss_type in ("dapo", "cispo", "vespo"):
        step = case.with_settings(loss_type=loss_type, epsilon_high=0.5)
        # Two optimizer steps per rollout; TRL takes half of the rollout's tokens for each.
        first, tokens = step.rows(slice(0, 4)), step.mask.sum()
        assert first.mask.sum() * 2 != tokens
        theirs = trl_loss_of_a_part(first, tokens_of_the_rollout=int(tokens), steps_per_generation=2)
        np.testing.assert_allclose(theirs * (tokens / 2) / first.mask.sum(), run_grupo(first).loss, rtol=1e-10)
        assert differs(run_grupo(first).loss, theirs)


def trl_loss_of_a_part(case: Case, *, tokens_of_the_rollout: int, steps_per_generation: int) -> float:
    trainer = loss_trainer(vars(case.settings), 1, steps_per_generation)
    inputs = trl_inputs(trainer, case, torch.tensor(case.logits), torch.tensor(float(tokens_of_the_rollout)))
    return float(trainer._compute_loss(None, inputs))


def bnpo_over_the_optimizer_step() -> None:
    case = random_case(3, Settings(loss_type="bnpo"), batch=9).rows(slice(0, -1))
    assert differs(run_grupo(case, micro_batches=4).gradient, trl_loss(case, micro_batches=4).gradient)
    assert_same(run_grupo(case, micro_batches=4), trl_loss(case, micro_batches=1))


def entropy_threshold_over_the_optimizer_step() -> None:
    case = random_case(4, Settings(top_entropy_quantile=0.37), batch=9).rows(slice(0, -1))
    assert differs(run_grupo(case, micro_batches=4).gradient, trl_loss(case, micro_batches=4).gradient)
    assert_same(run_grupo(case, micro_batches=4), trl_loss(case, micro_batches=1))


def entropy_bonus_over_the_optimizer_step() -> None:
    case = random_case(5, Settings(entropy_coef=0.5), batch=9).rows(slice(0, -1))
    assert differs(run_grupo(case, micro_batches=4).gradient, trl_loss(case, micro_batches=4).gradient)
    assert_same(run_grupo(case, micro_batches=4), trl_loss(case, micro_batches=1))


def adaptive_entropy_without_tokens() -> None:
    case = random_case(6, Settings(entropy_coef=0.5), batch=3)
    case = replace(case, mask=np.zeros_like(case.mask))
    controller = {"entropy_target": 0.2, "entropy_coef_delta": 0.1, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0}
    trainer = loss_trainer({**vars(case.settings), **controller}, 1, 1)
    trainer.use_adaptive_entropy, trainer._entropy_window_stats, trainer._last_world_entropy = True, None, math.inf
    trainer._compute_loss(None, trl_inputs(trainer, case, torch.tensor(case.logits), torch.tensor(0.0)))
    assert trainer.entropy_coef == pytest.approx(0.6)  # TRL reads an entropy of 0 from no token

    ours = EntropyController(0.5, target=0.2, delta=0.1, minimum=0.0, maximum=1.0)
    ours.update(0.0, 0)
    assert ours.coef == 0.5
    assert ours.applied_coef == 0.0


def masked_rows_leave_the_row_count() -> None:
    case = random_case(7)
    assert not case.mask[-1].any()
    for loss_type in ("grpo", "sapo", "luspo", "dr_grpo"):
        step = case.with_settings(loss_type=loss_type)
        theirs = trl_loss(step)
        assert differs(run_grupo(step).gradient, theirs.gradient)
        np.testing.assert_allclose(run_grupo(step).gradient * 4 / 5, theirs.gradient, atol=1e-12)
    assert_same(run_grupo(case), trl_loss(case))  # token means have no row count


def unscored_rows_leave_the_loss() -> None:
    scores = torch.tensor([[1.0], [0.0], [math.nan], [0.0]], dtype=torch.float64)
    case = random_case(8, Settings(beta=0.1), batch=4, full_rows=True)
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        step = case.with_settings(loss_type=loss_type)
        theirs = trl_loss(replace(step, advantages=trl_advantages(scores, 4)[0].numpy()))
        found = compute_advantages(scores, [0] * 4)
        assert found.scored.tolist() == [True, True, False, True]
        ours = run_grupo(
            replace(step, advantages=found.advantages.numpy(), mask=step.mask & found.scored.numpy()[:, None])
        )
        assert not ours.gradient[2].any()
        assert theirs.gradient[2].any()  # the KL of a completion that no reward function judged
        without_kl = replace(step.with_settings(beta=0.0), advantages=found.advantages.numpy())
        ours = run_grupo(replace(without_kl, mask=step.mask & found.scored.numpy()[:, None]))
        np.testing.assert_allclose(ours.gradient * 3 / 4, trl_loss(without_kl).gradient, atol=1e-12)


def kl_correction_by_the_ratio_of_the_token() -> None:
    case = random_case(9, Settings(beta=1.0, importance_sampling_level="sequence")).rows(slice(0, -1))
    on_policy = replace(case, old=None)
    assert run_grupo(on_policy).loss == pytest.approx(trl_loss(on_policy).loss, abs=1e-12)
    assert differs(run_grupo(on_policy).gradient, trl_loss(on_policy).gradient)
    uncorrected = case.with_settings(use_bias_correction_kl=False)
    assert_same(run_grupo(uncorrected), trl_loss(uncorrected))


def equal_rewards_without_residue() -> None:
    scores = torch.tensor([0.7] * 7 + [1.0] + [0.0] * 6, dtype=torch.float32).unsqueeze(1)
    ours, theirs = compute_advantages(scores, [0] * 7 + [1] * 7).advantages, trl_advantages(scores, 7)[0]
    assert theirs[:7].abs().max() > 1e-4
    assert not ours[:7].any()
    torch.testing.assert_close(ours[7:].float(), theirs[7:])


LOSS_EXCLUSIONS: dict[str, Callable[[], None]] = {
    "epsilon_high": cispo_bound_by_default,
    "steps_per_generation": token_count_of_the_optimizer_step,
    "loss_type": bnpo_over_the_optimizer_step,
    "top_entropy_quantile": entropy_threshold_over_the_optimizer_step,
    "entropy_coef": entropy_bonus_over_the_optimizer_step,
    "use_adaptive_entropy": adaptive_entropy_without_tokens,
    "mask_truncated_completions": masked_rows_leave_the_row_count,
    "reward_funcs": unscored_rows_leave_the_loss,
    "use_bias_correction_kl": kl_correction_by_the_ratio_of_the_token,
}
ADVANTAGE_EXCLUSIONS: dict[str, Callable[[], None]] = {"scale_rewards": equal_rewards_without_residue}


@pytest.mark.parametrize("field", [*LOSS_EXCLUSIONS, *ADVANTAGE_EXCLUSIONS])
def test_each_exclusion_is_a_real_difference_and_ends_where_the_table_says(field: str) -> None:
    {**LOSS_EXCLUSIONS, **ADVANTAGE_EXCLUSIONS}[field]()


# The table


def differences() -> list[dict[str, str]]:
    """Rows of the table in docs/differences.md."""
    lines = [line for line in DIFFERENCES.read_text().splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    assert all(len(cells) == len(header) for cells in body), "a row of the table has another number of cells"
    return [dict(zip(header, cells, strict=True)) for cells in body]


def field_of(row: dict[str, str]) -> str:
    match = re.match(r"`(\w+)[`=]", row["field"])
    assert match, f"the first column must start with the field's name in backticks: {row['field']}"
    return match[1]


def test_the_exclusions_are_exactly_the_rows_of_the_documentation() -> None:
    for concerns, exclusions in (("loss", LOSS_EXCLUSIONS), ("advantages", ADVANTAGE_EXCLUSIONS)):
        listed = [field_of(row) for row in differences() if row["concerns"] == concerns]
        assert sorted(listed) == sorted(exclusions)
        assert set(listed) <= {*GRPOConfig.__dataclass_fields__, *inspect.signature(GRPOTrainer).parameters}


def test_every_difference_says_what_why_and_how_to_get_trls_behaviour() -> None:
    rows = differences()
    assert len(rows) > 15
    for row in rows:
        assert all(row.values()), f"empty cell in the row of {row['field']}"
        switch = row["switch for TRL's behaviour"]
        assert "`" in switch or switch.startswith("none, because"), row["field"]
