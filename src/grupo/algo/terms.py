"""The per-token policy terms that the losses are built from.

Legend: B completions, T tokens, A advantage, rho importance ratio. rho is (B, T) at token level and (B, 1) at sequence
level; every term keeps that shape, and losses.py spreads it over the tokens of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grupo.algo.ratios import masked

if TYPE_CHECKING:
    from grupo.algo.losses import Objective

CISPO_CAP = 5.0
"""CISPO's bound on rho when `epsilon_high` is not set: ScaleRL's value (arXiv 2510.13786)."""

VESPO_LOG_RATIO_RANGE = (math.log(1e-8), 20.0)
"""Bounds on VESPO's sequence log ratio, nats. Outside them the gamma weight is 0 to every digit."""


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy term sees of one micro-batch. Log-probs and log ratios are 0 outside the mask."""

    logprobs: Tensor
    """(B, T) of the policy, with gradient."""
    log_ratio: Tensor
    """(B, T) policy - old, with gradient."""
    ratio: Tensor
    """(B, T) or (B, 1) importance ratio rho, with gradient."""
    advantages: Tensor
    """(B, 1)."""
    mask: Tensor
    """(B, T) bool."""


@dataclass(frozen=True)
class PolicyTerm:
    """A per-token loss and the numbers that TRL logs beside it; all (B, T) or (B, 1)."""

    loss: Tensor
    clipped: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> flags to average over tokens, or over rows where they are (B, 1). Never set where A = 0."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> values to average in the same way."""
    lowest_row: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> values whose smallest row mean is reported."""
    highest_row: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> values whose largest row mean is reported."""


PolicyTermFunction = Callable[[PolicyTokens, "Objective"], PolicyTerm]


def clipped(tokens: PolicyTokens, settings: Objective) -> PolicyTerm:
    """-min(min(rho, delta) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A).

    PPO's clipped surrogate (GRPO, arXiv 2402.03300, eq. 3), with DAPO's separate upper bound (arXiv 2503.14476) and,
    where `delta` is set, INTELLECT-2's bound on the unclipped side (arXiv 2505.07291). As in TRL, the clip metrics look
    at the ratio after `delta`.
    """
    low = 1 - settings.epsilon
    high = 1 + (settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    advantages = tokens.advantages
    bounded = tokens.ratio if settings.delta is None else tokens.ratio.clamp(max=settings.delta)
    loss = -torch.minimum(bounded * advantages, tokens.ratio.clamp(low, high) * advantages)

    clipped_low = (bounded < low) & (advantages < 0)
    clipped_high = (bounded > high) & (advantages > 0)
    return PolicyTerm(
        loss,
        clipped={
            "clip_ratio/low_mean": clipped_low,
            "clip_ratio/high_mean": clipped_high,
            "clip_ratio/region_mean": clipped_low | clipped_high,
        },
        lowest_row={"clip_ratio/low_min": clipped_low},
        highest_row={"clip_ratio/high_max": clipped_high},
    )


def cispo(tokens: PolicyTokens, settings: Objective) -> PolicyTerm:
    """-stopgrad(min(rho, epsilon_high)) A log pi (CISPO, MiniMax-M1, arXiv 2506.13585).

    `epsilon_high` is the bound itself, not a distance from 1.
    """
    cap = CISPO_CAP if settings.epsilon_high is None else settings.epsilon_high
    loss = -tokens.ratio.clamp(max=cap).detach() * tokens.advantages * tokens.logprobs
    return PolicyTerm(loss, clipped={"cispo_clip_ratio": (tokens.ratio > cap) & (tokens.advantages > 0)})


def sapo(tokens: PolicyTokens, settings: Objective) -> PolicyTerm:
    """-(4 / tau) sigmoid(tau (rho - 1)) A (SAPO, arXiv 2511.20347).

    A soft gate in place of the clip: the gradient is A at rho = 1 and fades smoothly away from it. The temperature tau
    is one for A > 0 and another for A <= 0.
    """
    temperature = _by_sign(tokens.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg, tokens)
    gate = torch.sigmoid(temperature * (tokens.ratio - 1)) * 4 / temperature
    return PolicyTerm(-gate * tokens.advantages)


def vespo(tokens: PolicyTokens, settings: Objective) -> PolicyTerm:
    """-stopgrad(phi(w)) A log pi, with w the ratio of the whole sequence (a product over tokens, not a mean).

    phi(w) = exp(lambda) w^k exp(-lambda w) is a gamma weight with phi(1) = 1; k and lambda depend on the sign of A
    (VESPO, arXiv 2602.10693).
    """
    is_positive = tokens.advantages >= 0
    shape = _by_sign(is_positive, settings.vespo_k_pos, settings.vespo_k_neg, tokens)
    rate = _by_sign(is_positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg, tokens).clamp(min=1e-4)
    log_w = masked(tokens.log_ratio.detach().clamp(-20.0, 20.0), tokens.mask).sum(dim=1, keepdim=True)
    log_w = log_w.clamp(*VESPO_LOG_RATIO_RANGE)
    phi = torch.exp(rate + shape * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0)
    return PolicyTerm(-phi * tokens.advantages * tokens.logprobs, means={"vespo/phi_seq_mean": phi})


def _by_sign(is_positive: Tensor, positive: float, negative: float, tokens: PolicyTokens) -> Tensor:
    """(B, 1) one of two settings for each row, in the dtype of the advantages (torch.where would round to float32)."""
    return torch.full_like(tokens.advantages, negative).masked_fill(is_positive, positive)
