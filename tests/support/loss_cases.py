"""Random tiny-vocabulary optimizer steps for the loss tests, and how to run grupo's loss on them.

Legend: B completions, T tokens, V vocabulary. A case is numpy float64 only; `Settings` are the options of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from grupo.algo.losses import GRPOLoss, LossInputs, LossOutput, StepTotals
from grupo.algo.terms import LossSettings

LEVELS = ("token", "sequence")


def grpo_loss(**settings: Any) -> GRPOLoss:
    return GRPOLoss(LossSettings(**settings))


@dataclass(frozen=True)
class Settings:
    """Options of the loss; the names are those of the configuration."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    max_completion_length: int = 7
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0

    def loss_function(self) -> GRPOLoss:
        own = {"entropy_coef", "top_entropy_quantile"}
        return grpo_loss(**{name: value for name, value in vars(self).items() if name not in own})


@dataclass(frozen=True)
class Case:
    """One optimizer step in float64."""

    logits: np.ndarray
    """(B, T, V) of the policy."""
    actions: np.ndarray
    """(B, T) sampled tokens."""
    mask: np.ndarray
    """(B, T) bool."""
    advantages: np.ndarray
    """(B,)."""
    old: np.ndarray | None
    """(B, T)."""
    reference: np.ndarray
    """(B, T)."""
    behavior: np.ndarray | None = None
    """(B, T), NaN where the engine could not score."""
    settings: Settings = field(default_factory=Settings)

    def rows(self, selected: slice | np.ndarray) -> Case:
        """The same step reduced to some of its rows."""

        def pick(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array[selected]

        names = ("logits", "actions", "mask", "advantages", "old", "reference", "behavior")
        return replace(self, **{name: pick(getattr(self, name)) for name in names})

    def with_settings(self, **changes: Any) -> Case:
        return replace(self, settings=replace(self.settings, **changes))


def random_case(
    seed: int,
    settings: Settings | None = None,
    *,
    batch: int = 5,
    length: int = 4,
    vocabulary: int = 5,
    on_policy: bool = False,
    with_behavior: bool = False,
    full_rows: bool = False,
    off_policyness: float = 0.5,
) -> Case:
    """Rows with holes in the mask (as tool calls leave them) and a last row without any loss token (as a masked
    truncation has none); with `full_rows` every token is in the loss.
    """
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(batch, length, vocabulary))
    actions = generator.integers(vocabulary, size=(batch, length))
    policy = log_softmax(logits)
    taken = np.take_along_axis(policy, actions[..., None], axis=2)[..., 0]
    mask = np.ones((batch, length), dtype=bool)
    if not full_rows:
        mask = generator.random((batch, length)) < 0.7
        mask[np.arange(batch), generator.integers(length, size=batch)] = True
        mask[-1] = False
    behavior = None
    if with_behavior:
        behavior = taken + off_policyness * generator.normal(size=taken.shape)
        behavior[generator.random(taken.shape) < 0.15] = np.nan
    return Case(
        logits=logits,
        actions=actions,
        mask=mask,
        advantages=generator.normal(size=batch),
        old=None if on_policy else taken + off_policyness * generator.normal(size=taken.shape),
        reference=taken + 0.3 * generator.normal(size=taken.shape),
        behavior=behavior,
        settings=settings or Settings(),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def entropies(logits: np.ndarray) -> np.ndarray:
    logprobs = log_softmax(logits)
    return -(np.exp(logprobs) * logprobs).sum(axis=-1)


def threshold_of(case: Case) -> float | None:
    """The step's entropy threshold; computed once here, so that no test hangs on the last digit of an interpolation."""
    if case.settings.top_entropy_quantile >= 1.0:
        return None
    return float(np.quantile(entropies(case.logits)[case.mask], 1 - case.settings.top_entropy_quantile))


def totals_of(case: Case) -> StepTotals:
    threshold = threshold_of(case)
    acting = case.mask if threshold is None else case.mask & (entropies(case.logits) >= threshold)
    return StepTotals(
        tokens=int(case.mask.sum()), completions=int(case.mask.any(axis=1).sum()), entropy_tokens=int(acting.sum())
    )


@dataclass(frozen=True)
class Result:
    """Loss of one step and its gradient, as numpy."""

    loss: float
    gradient: np.ndarray
    """(B, T, V) with respect to the logits."""
    policy_loss: float
    metrics: dict[str, float]


def run_grupo(
    case: Case,
    *,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float64,
    garbage: float | None = None,
    extra_columns: int = 0,
) -> Result:
    """The real loss of the step, cut into `micro_batches`.

    `garbage` is put at every masked position of every (B, T) input; `extra_columns` pads the rows on the right.
    """
    totals = totals_of(case)
    threshold = threshold_of(case)
    pieces = np.array_split(np.arange(len(case.advantages)), micro_batches)
    outputs, gradients = [], []
    for piece in pieces:
        part = case.rows(piece)
        logits = torch.tensor(part.logits, dtype=dtype, requires_grad=True)
        output = case.settings.loss_function()(
            _inputs(part, logits, threshold, garbage, extra_columns), totals, entropy_coef=case.settings.entropy_coef
        )
        output.loss.backward()
        assert logits.grad is not None
        gradients.append(logits.grad.numpy())
        outputs.append(output)
    return Result(
        loss=sum(output.loss.item() for output in outputs),
        gradient=np.concatenate(gradients),
        policy_loss=sum(output.policy_loss.item() for output in outputs),
        metrics=_merge(outputs),
    )


def loss_inputs(case: Case) -> LossInputs:
    return _inputs(case, torch.tensor(case.logits, requires_grad=True), threshold_of(case), None, 0)


def _inputs(
    case: Case, logits: torch.Tensor, threshold: float | None, garbage: float | None, extra_columns: int
) -> LossInputs:
    dtype = logits.dtype
    mask = torch.tensor(case.mask)
    logprobs = torch.log_softmax(logits, dim=-1)
    policy = logprobs.gather(2, torch.tensor(case.actions)[..., None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)

    def prepare(values: torch.Tensor | np.ndarray | None) -> torch.Tensor | None:
        if values is None:
            return None
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
        if garbage is not None:
            tensor = torch.where(mask, tensor, garbage)
        padding = tensor.new_full((tensor.shape[0], extra_columns), 0.0 if garbage is None else garbage)
        return torch.cat([tensor, padding], dim=1)

    padded_mask = torch.cat([mask, mask.new_zeros(mask.shape[0], extra_columns)], dim=1)
    policy_logprobs = prepare(policy)
    assert policy_logprobs is not None
    return LossInputs(
        policy_logprobs=policy_logprobs,
        advantages=torch.tensor(case.advantages, dtype=dtype),
        mask=padded_mask,
        old_logprobs=prepare(case.old),
        reference_logprobs=prepare(case.reference),
        behavior_logprobs=prepare(case.behavior),
        entropy=prepare(entropy),
        entropy_threshold=threshold,
    )


def _merge(outputs: list[LossOutput]) -> dict[str, float]:
    """Metrics of the step from those of its micro-batches, as a trainer adds them up."""
    metrics = {}
    for name in outputs[0].sums:
        numerator = sum(output.sums[name][0].item() for output in outputs)
        denominator = sum(output.sums[name][1].item() for output in outputs)
        metrics[name] = numerator / denominator if denominator else float("nan")
    for name in outputs[0].extremes:
        reduce = min if name.endswith("_min") else max
        metrics[name] = reduce(output.extremes[name].item() for output in outputs)
    return metrics


def assert_same(actual: Result, expected: Result, *, tolerance: float = 1e-10) -> None:
    """Loss, policy loss and gradient agree; raises AssertionError where they do not."""
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(actual.policy_loss, expected.policy_loss, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(actual.gradient, expected.gradient, rtol=tolerance, atol=tolerance)
