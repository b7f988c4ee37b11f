"""The registry of losses is true, complete, and all that a new loss needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grupo import GRPOConfig
from grupo.algo import terms
from grupo.algo.losses import AGGREGATIONS
from grupo.algo.registry import LOSSES, LossSpec
from grupo.algo.terms import LossSettings, PolicyTerm, TermInputs
from grupo.errors import ConfigError
from loss_cases import Settings, assert_same, grpo_loss, loss_inputs, random_case, run_grupo, totals_of
from loss_reference import REFERENCES, Reference, Term, by_token
from loss_reference import reference as reference_of
from tiny_trainer import distance, run

CHANGED: dict[str, Any] = {
    "importance_sampling_level": "sequence",
    "epsilon": 0.05,
    "epsilon_high": 0.9,
    "delta": 1.1,
    "sapo_temperature_neg": 3.0,
    "sapo_temperature_pos": 3.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
}
"""Every setting that a loss may read or not, with a value other than its default."""


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_loss_reads_what_its_entry_lists_and_nothing_else(loss_type: str) -> None:
    case = random_case(3, batch=8, off_policyness=1.0)
    inputs, totals = loss_inputs(case), totals_of(case)
    assert {name for spec in LOSSES.values() for name in spec.reads} == CHANGED.keys()
    default = grpo_loss(loss_type=loss_type)(inputs, totals).loss
    for name, value in CHANGED.items():
        is_fixed = name == "importance_sampling_level" and LOSSES[loss_type].level is not None
        is_read = name in LOSSES[loss_type].reads and not is_fixed
        changed = grpo_loss(**{"loss_type": loss_type, name: value})(inputs, totals).loss
        assert (changed != default) == is_read, name


def test_every_entry_names_a_term_an_aggregation_and_a_reference() -> None:
    assert REFERENCES.keys() == LOSSES.keys()
    for spec in LOSSES.values():
        assert callable(getattr(terms, spec.term)) and spec.aggregation in AGGREGATIONS and spec.note


# ---- a new loss: one term, one entry, one row of the reference -------------------------------------------------------


def scaled_reinforce(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    scale = 2.0 if settings.delta is None else settings.delta
    return PolicyTerm(-scale * inputs.advantages * inputs.logprobs)


@pytest.fixture
def new_loss(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(terms, "scaled_reinforce", scaled_reinforce, raising=False)
    monkeypatch.setitem(LOSSES, "new", LossSpec("scaled_reinforce", "token_mean", frozenset({"delta"})))

    def term(settings: Settings, token: Any) -> Term:
        scale = settings.delta or 2.0
        return Term(-scale * token.advantage * token.logprob, 0.0, -scale * token.advantage)

    monkeypatch.setitem(REFERENCES, "new", Reference(term, by_token))
    return "new"


def test_a_new_loss_is_computed_and_checked_like_the_others(new_loss: str) -> None:
    case = random_case(1, Settings(loss_type=new_loss, beta=0.1, delta=3.0, entropy_coef=0.1), with_behavior=True)
    assert_same(run_grupo(case, micro_batches=3, garbage=math.nan), reference_of(case))


def test_a_new_loss_is_a_choice_with_conditions(new_loss: str) -> None:
    assert GRPOConfig(loss_type=new_loss, delta=3.0).loss_settings() == LossSettings(loss_type=new_loss, delta=3.0)
    for settings, message in (
        ({"loss_type": "news"}, "'vespo', 'gspo', 'new'. Did you mean 'new'?"),
        ({"loss_type": new_loss, "epsilon": 0.1}, "epsilon=0.1 has no effect with loss_type='new'"),
        ({"loss_type": new_loss, "importance_sampling_level": "sequence"}, "no effect with loss_type='new'"),
        (
            {"loss_type": "sapo", "delta": 3.0},
            "only with loss_type 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'luspo', 'gspo', 'new'",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            GRPOConfig(**settings)
        assert message in str(caught.value)


def test_a_new_loss_trains(tmp_path: Path, new_loss: str) -> None:
    """On-policy its gradient is that of dapo, times its scale."""
    (dapo,) = run(tmp_path / "dapo", loss_type="dapo")
    for scale, settings in ((2.0, {}), (3.0, {"delta": 3.0})):
        (step,) = run(tmp_path / f"{scale}", loss_type=new_loss, **settings)
        scaled = {name: None if value is None else scale * value for name, value in dapo.gradients.items()}
        assert distance(step.gradients, scaled) < 1e-5
