"""What GRPO does with the policy's entropy: train on uncertain tokens only, and keep some uncertainty alive."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def entropy_threshold(values: Tensor, top_quantile: float) -> Tensor:
    """The entropy, in nats, that the top `top_quantile` share of `values` (N,) reaches ("Beyond the 80/20 Rule", arXiv
    2506.01939).

    `values` are the entropies of all loss tokens of one optimizer step. Interpolates between neighbours as
    torch.quantile does, but has no limit of 16 million values. Without values it is inf: nothing reaches it.
    """
    if values.numel() == 0:
        return values.new_tensor(math.inf)
    ordered = values.sort().values
    # In Python floats: in float32 a rank beyond 2^24 would be rounded to another token.
    rank = (1 - top_quantile) * (ordered.numel() - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return torch.lerp(ordered[low], ordered[high], rank - low)


class EntropyController:
    """Skywork-OR1's adaptive entropy coefficient (arXiv 2505.22312), with TRL's rule.

    After every optimizer step the coefficient rises by `delta` where the step's mean entropy was at or below `target`
    nats, else falls by `delta`, within `minimum` and `maximum`. The bonus is applied only while the last entropy was
    at or below the target, so never in the first step.
    """

    def __init__(self, coef: float, *, target: float, delta: float, minimum: float, maximum: float) -> None:
        self.coef = coef
        self.target = target
        self.delta = delta
        self.minimum = minimum
        self.maximum = maximum
        self.last_entropy = math.inf

    @property
    def applied_coef(self) -> float:
        """The coefficient to use in the coming optimizer step; 0 while the entropy is above the target."""
        return self.coef if self.last_entropy <= self.target else 0.0

    def update(self, entropy_sum: float, tokens: int) -> None:
        """After an optimizer step: sum of the entropies and number of tokens that the bonus acts on, over all ranks.

        A step without tokens says nothing about the entropy and changes nothing.
        """
        if tokens == 0:
            return
        self.last_entropy = entropy_sum / tokens
        if self.last_entropy <= self.target:
            self.coef = min(self.coef + self.delta, self.maximum)
        else:
            self.coef = max(self.coef - self.delta, self.minimum)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
        self.last_entropy = state["last_entropy"]
