"""GRPO's arithmetic as pure tensor functions: rewards to advantages, log-probs to a loss.

    scores ──compute_advantages──▶ advantages ─┐
    log-probs, mask ───────────────────────────┴─Objective──▶ loss

    advantages.py   rewards of a group to advantages
    losses.py       one optimizer step's loss; the registries of losses and aggregations
    terms.py        the per-token policy terms: clipped, CISPO, SAPO, VESPO
    ratios.py       importance ratios, the off-policy mask, the KL estimator
    entropy.py      the high-entropy threshold and the adaptive entropy coefficient
    selection.py    the completions of a group that are worth training on

Settings arrive as plain keyword arguments. Nothing here knows about models, ranks or micro-batches: a loss is a
numerator over a denominator that the caller counted once for the whole optimizer step.
"""

from grupo.algo.advantages import Advantages, compute_advantages
from grupo.algo.entropy import EntropyController, entropy_threshold
from grupo.algo.losses import AGGREGATIONS, LOSSES, LossInputs, LossOutput, Objective, PolicyLoss, StepTotals
from grupo.algo.selection import max_variance_subset

__all__ = [
    "AGGREGATIONS",
    "LOSSES",
    "Advantages",
    "EntropyController",
    "LossInputs",
    "LossOutput",
    "Objective",
    "PolicyLoss",
    "StepTotals",
    "compute_advantages",
    "entropy_threshold",
    "max_variance_subset",
]
