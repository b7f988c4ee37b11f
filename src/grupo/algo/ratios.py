"""Importance ratios, the off-policy sequence mask and the KL estimator.

Legend: B completions, T tokens. Everything outside the mask is set to 0 before any exponential, so that garbage, inf or
NaN on padding reaches neither a value nor a gradient (0 * inf would be NaN).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) `values`, (B, T) or (B, 1), where `mask` is set; exactly 0 elsewhere, gradient included. Bool to float."""
    return torch.where(mask, values, 0.0)


def completion_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) mean over tokens of `values` (B, T), which are 0 outside `mask`; 0 for a completion without tokens."""
    return values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def token_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(B, T) log importance ratio per token."""
    return log_ratio


def sequence_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) log importance ratio per completion: the *mean* over its tokens (GSPO, arXiv 2507.18071)."""
    return completion_mean(log_ratio, mask).unsqueeze(1)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_level, "sequence": sequence_level}


def off_policy_sequence_mask(
    sampling_logprobs: Tensor, policy_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """(B, 1) bool, True for completions to keep (off-policy sequence mask, DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    A completion with a negative advantage is dropped where the mean of `sampling - policy` log-probs exceeds
    `threshold` nats: the policy has moved too far from the sampler. NaN marks a token without a log-prob by the
    sampler; it is left out of the sum.

    Args: log-probs (B, T), advantages (B, 1), mask (B, T).
    """
    drift = masked(sampling_logprobs - policy_logprobs.detach(), mask & ~torch.isnan(sampling_logprobs))
    return (advantages >= 0) | (completion_mean(drift, mask).unsqueeze(1) <= threshold)


def k3(reference_logprobs: Tensor, policy_logprobs: Tensor) -> Tensor:
    """(B, T) non-negative KL estimate, exp(d) - d - 1 with d = reference - policy (Schulman 2020, "Approximating KL").

    expm1 because exp(d) - 1 loses all digits where the policy has hardly moved.
    """
    difference = reference_logprobs - policy_logprobs
    return torch.expm1(difference) - difference
