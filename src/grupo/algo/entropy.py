"""The policy's entropy in GRPO: the threshold of high-entropy tokens, and the adaptive entropy bonus."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def entropy_threshold(values: Tensor, top_quantile: float) -> Tensor:
    """Entropy in nats that the top `top_quantile` share of `values` (N,) reaches (arXiv 2506.01939).

    `values` are the entropies of all loss tokens of one optimizer step. Interpolates between neighbours like
    torch.quantile, without its limit of 16 million values. For N = 0 it is inf, which no token reaches.
    """
    if values.numel() == 0:
        return values.new_tensor(math.inf)
    ordered = values.sort().values
    # A Python float: in float32 a rank above 2^24 would be rounded to another token.
    rank = (1 - top_quantile) * (ordered.numel() - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return torch.lerp(ordered[low], ordered[high], rank - low)


class EntropyController:
    """Skywork-OR1's adaptive entropy coefficient (arXiv 2505.22312), with TRL's rule.

    After an optimizer step the coefficient rises by `delta` if the mean entropy of the step was at or below `target`
    nats, and falls by `delta` otherwise, between `minimum` and `maximum`. The bonus is applied only while the last
    entropy is at or below the target, so never in the first step.
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
        """Coefficient for the next optimizer step; 0 while the entropy is above the target."""
        return self.coef if self.last_entropy <= self.target else 0.0

    def update(self, entropy_sum: float, tokens: int) -> None:
        """Moves the coefficient after an optimizer step; a step without tokens changes nothing.

        Args:
            entropy_sum: sum of the entropies, nats, of the tokens with an entropy bonus, over all ranks.
            tokens: number of these tokens.
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
