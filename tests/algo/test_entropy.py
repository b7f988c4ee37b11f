"""The high-entropy threshold and the adaptive coefficient."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from grupo.algo.entropy import EntropyController, entropy_threshold


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
@pytest.mark.parametrize("top", [0.01, 0.2, 0.37, 0.5, 0.999, 1.0])
def test_the_threshold_is_the_quantile_that_torch_and_numpy_find(count: int, top: float) -> None:
    values = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    found = entropy_threshold(values, top)
    assert found.item() == pytest.approx(torch.quantile(values, 1 - top).item(), abs=1e-15)
    assert found.item() == pytest.approx(np.quantile(values.numpy(), 1 - top), abs=1e-15)
    assert found.dtype == values.dtype


def test_the_top_fifth_of_a_hundred_and_one_values() -> None:
    assert entropy_threshold(torch.arange(101.0), 0.2).item() == pytest.approx(80.0)


def test_more_values_than_torch_quantile_takes() -> None:
    """torch.quantile refuses above 2^24 elements, and float32 ranks would be rounded there."""
    count = 2**24 + 3
    values = torch.arange(count, dtype=torch.int32).to(torch.float64)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    assert entropy_threshold(values, 0.5).item() == (count - 1) / 2


def test_without_values_nothing_reaches_the_threshold() -> None:
    assert entropy_threshold(torch.empty(0), 0.2).item() == math.inf


def controller(coef: float = 0.5) -> EntropyController:
    return EntropyController(coef, target=0.2, delta=0.1, minimum=0.45, maximum=0.65)


def test_the_coefficient_rises_at_low_entropy_and_falls_at_high_entropy_within_its_bounds() -> None:
    adaptive = controller()
    seen = []
    for entropy in (0.1, 0.2, 0.3, 0.3, 0.3):
        adaptive.update(entropy * 40, 40)
        seen.append(adaptive.coef)
    assert seen == pytest.approx([0.6, 0.65, 0.55, 0.45, 0.45])


def test_the_bonus_is_applied_only_after_an_entropy_at_or_below_the_target() -> None:
    adaptive = controller()
    assert adaptive.applied_coef == 0.0
    adaptive.update(2.0, 10)
    assert adaptive.applied_coef == pytest.approx(0.6)
    adaptive.update(3.0, 10)
    assert adaptive.applied_coef == 0.0


def test_a_step_without_tokens_changes_nothing() -> None:
    adaptive = controller()
    adaptive.update(2.0, 10)
    before = adaptive.state_dict()
    adaptive.update(0.0, 0)
    assert adaptive.state_dict() == before


def test_a_resumed_controller_goes_on_as_the_first_would_have() -> None:
    first = controller()
    resumed = controller(coef=0.0)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.applied_coef == 0.0
    first.update(1.0, 10)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for adaptive in (first, resumed):
        adaptive.update(3.0, 10)
    assert first.state_dict() == resumed.state_dict()
