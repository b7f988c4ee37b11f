"""The per-token policy terms that the losses are built from.

Legend: B completions, T tokens, A advantage, rho importance ratio. rho is (B, T) at token level and (B, 1) at sequence
level; every term keeps that shape, and losses.py broadcasts it over the tokens of the completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grupo.algo.ratios import LEVELS, masked
from grupo.algo.registry import LOSSES

CISPO_CAP = 5.0
"""CISPO's upper bound on rho where `epsilon_high` is None: the value of ScaleRL (arXiv 2510.13786)."""

VESPO_LOG_RATIO_RANGE = (math.log(1e-8), 20.0)
"""Bounds on VESPO's sequence log ratio, nats. Outside them the gamma weight is 0 in float64."""


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss, with TRL's names and defaults.

    Raises ValueError for an unknown `loss_type` or `importance_sampling_level`.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: `epsilon`, and 5.0 for CISPO, where it bounds the ratio itself."""
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 512
    """Tokens; the denominator of the `fixed_length` aggregation."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("loss_type", self.loss_type, LOSSES),
            ("importance_sampling_level", self.importance_sampling_level, LEVELS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(sorted(known))}.")


@dataclass(frozen=True)
class TermInputs:
    """Inputs of a policy term for one micro-batch. Log-probs and log ratios are 0 outside the mask."""

    logprobs: Tensor
    """(B, T) log-probs of the policy, with gradient."""
    log_ratio: Tensor
    """(B, T) policy minus old log-probs, with gradient."""
    ratio: Tensor
    """(B, T) or (B, 1) importance ratio rho, with gradient."""
    advantages: Tensor
    """(B, 1)."""
    mask: Tensor
    """(B, T) bool."""


@dataclass(frozen=True)
class PolicyTerm:
    """A per-token loss and the metrics that TRL logs with it; all (B, T) or (B, 1)."""

    loss: Tensor
    clipped: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> flags to average over tokens, or over completions where they are (B, 1). Never set where A = 0."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> values to average in the same way."""
    completion_min: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> values whose smallest mean over a completion is reported."""
    completion_max: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> values whose largest mean over a completion is reported."""


PolicyTermFunction = Callable[[TermInputs, LossSettings], PolicyTerm]


def clipped_surrogate(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """-min(min(rho, delta) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A).

    PPO's clipped surrogate (GRPO, arXiv 2402.03300, eq. 3), with DAPO's separate upper bound (arXiv 2503.14476) and,
    where `delta` is set, INTELLECT-2's bound on the unclipped side (arXiv 2505.07291). As in TRL, the clip metrics look
    at the ratio after `delta`.
    """
    low = 1 - settings.epsilon
    high = 1 + (settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    advantages = inputs.advantages
    bounded = inputs.ratio if settings.delta is None else inputs.ratio.clamp(max=settings.delta)
    loss = -torch.minimum(bounded * advantages, inputs.ratio.clamp(low, high) * advantages)

    clipped_low = (bounded < low) & (advantages < 0)
    clipped_high = (bounded > high) & (advantages > 0)
    return PolicyTerm(
        loss,
        clipped={
            "clip_ratio/low_mean": clipped_low,
            "clip_ratio/high_mean": clipped_high,
            "clip_ratio/region_mean": clipped_low | clipped_high,
        },
        completion_min={"clip_ratio/low_min": clipped_low},
        completion_max={"clip_ratio/high_max": clipped_high},
    )


def cispo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """-stopgrad(min(rho, epsilon_high)) A log pi (CISPO, MiniMax-M1, arXiv 2506.13585).

    `epsilon_high` is the bound itself, not a distance from 1.
    """
    cap = CISPO_CAP if settings.epsilon_high is None else settings.epsilon_high
    loss = -inputs.ratio.clamp(max=cap).detach() * inputs.advantages * inputs.logprobs
    return PolicyTerm(loss, clipped={"cispo_clip_ratio": (inputs.ratio > cap) & (inputs.advantages > 0)})


def sapo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """-(4 / tau) sigmoid(tau (rho - 1)) A (SAPO, arXiv 2511.20347).

    A soft gate instead of the clip: the gradient is A at rho = 1 and decays smoothly away from it. The temperature tau
    has one value for A > 0 and another for A <= 0.
    """
    temperature = _by_sign(inputs.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg, inputs)
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    return PolicyTerm(-gate * inputs.advantages)


def vespo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """-stopgrad(phi(w)) A log pi, with w the ratio of the whole sequence (a product over tokens, not a mean).

    phi(w) = exp(lambda) w^k exp(-lambda w) is a gamma weight with phi(1) = 1; k and lambda depend on the sign of A
    (VESPO, arXiv 2602.10693).
    """
    is_positive = inputs.advantages >= 0
    shape = _by_sign(is_positive, settings.vespo_k_pos, settings.vespo_k_neg, inputs)
    rate = _by_sign(is_positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg, inputs).clamp(min=1e-4)
    log_w = masked(inputs.log_ratio.detach().clamp(-20.0, 20.0), inputs.mask).sum(dim=1, keepdim=True)
    log_w = log_w.clamp(*VESPO_LOG_RATIO_RANGE)
    phi = torch.exp(rate + shape * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0)
    return PolicyTerm(-phi * inputs.advantages * inputs.logprobs, means={"vespo/phi_seq_mean": phi})


def _by_sign(is_positive: Tensor, positive: float, negative: float, inputs: TermInputs) -> Tensor:
    """(B, 1) one of two settings per completion, in the dtype of the advantages (torch.where would give float32)."""
    return torch.full_like(inputs.advantages, negative).masked_fill(is_positive, positive)
