"""The losses a second time, written independently: plain loops over rows and tokens, gradients by hand, no autograd.

`loss_by_loops` takes the log-probs twice: as what moves and as what is frozen (stop-gradient), so that finite
differences in the first can check the hand gradients too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loss_cases import Case, Result, entropies, log_softmax, threshold_of

SAPO_TEMPERATURES = {True: 1.0, False: 1.05}
VESPO_SHAPE_AND_RATE = {True: (2.0, 3.0), False: (3.0, 2.0)}
FAMILY = {
    "grpo": "clip",
    "bnpo": "clip",
    "dr_grpo": "clip",
    "dapo": "clip",
    "luspo": "clip",
    "gspo": "clip",
    "cispo": "cispo",
    "sapo": "sapo",
    "vespo": "vespo",
}


@dataclass(frozen=True)
class Term:
    """A scalar with its two partial derivatives: by the ratio and by the token's own log-prob."""

    value: float
    by_ratio: float
    by_logprob: float


def reference(case: Case) -> Result:
    """Loss and gradient with respect to the logits of a whole step."""
    logprobs = log_softmax(case.logits)
    taken = np.take_along_axis(logprobs, case.actions[..., None], axis=2)[..., 0]
    entropy = entropies(case.logits)
    loss, policy_loss, by_logprob, by_entropy = _step(case, taken, taken, entropy)

    probabilities = np.exp(logprobs)
    one_hot = np.eye(case.logits.shape[2])[case.actions]
    logprob_gradient = one_hot - probabilities
    entropy_gradient = -probabilities * (logprobs + entropy[..., None])
    gradient = by_logprob[..., None] * logprob_gradient + by_entropy[..., None] * entropy_gradient
    return Result(loss, gradient, policy_loss, metrics={})


def loss_by_loops(case: Case, moving: np.ndarray, frozen: np.ndarray) -> float:
    """The policy loss as a function of the moving log-probs (B, T), everything under a stop-gradient at `frozen`."""
    return _step(case, moving, frozen, entropies(case.logits))[1]


def hand_gradient(case: Case, logprobs: np.ndarray) -> np.ndarray:
    """(B, T) of the policy loss with respect to the log-probs."""
    return _step(case, logprobs, logprobs, entropies(case.logits))[2]


def _step(
    case: Case, logprobs: np.ndarray, frozen: np.ndarray, entropy: np.ndarray
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Loss, loss without entropy bonus, and the gradients by log-prob and by entropy, both (B, T)."""
    settings = case.settings
    threshold = threshold_of(case)
    rows = [i for i in range(len(case.advantages)) if case.mask[i].any()]
    all_tokens = sum(int(case.mask[i].sum()) for i in rows)
    policy_loss = 0.0
    by_logprob = np.zeros(case.mask.shape)
    by_entropy = np.zeros(case.mask.shape)
    bonus_tokens = [
        (i, t) for i in rows for t in np.flatnonzero(case.mask[i]) if threshold is None or entropy[i, t] >= threshold
    ]
    acting = set(bonus_tokens)

    for i in rows:
        tokens = np.flatnonzero(case.mask[i])
        old = frozen[i] if case.old is None else case.old[i]
        log_ratios = {t: logprobs[i, t] - old[t] for t in tokens}
        whole_sequence = settings.importance_sampling_level == "sequence" or settings.loss_type == "gspo"
        sequence_ratio = math.exp(sum(log_ratios.values()) / len(tokens))
        kept = _is_kept(case, i, tokens, frozen)
        frozen_log_ratio = sum(min(max(frozen[i, t] - old[t], -20.0), 20.0) for t in tokens)

        for t in tokens:
            weight = _weight(settings.loss_type, len(tokens), len(rows), all_tokens, settings.max_completion_length)
            ratio = sequence_ratio if whole_sequence else math.exp(log_ratios[t])
            frozen_ratio = (
                math.exp(sum(frozen[i, u] - old[u] for u in tokens) / len(tokens))
                if whole_sequence
                else math.exp(frozen[i, t] - old[t])
            )
            if kept and (i, t) in acting:
                term = _policy_term(case, case.advantages[i], ratio, frozen_ratio, frozen_log_ratio, logprobs[i, t])
                policy_loss += weight * term.value
                by_logprob[i, t] += weight * term.by_logprob
                if whole_sequence:
                    for u in tokens:
                        by_logprob[i, u] += weight * term.by_ratio * ratio / len(tokens)
                else:
                    by_logprob[i, t] += weight * term.by_ratio * ratio
            if settings.beta:
                to_reference = case.reference[i, t] - logprobs[i, t]
                kl = math.exp(to_reference) - to_reference - 1
                kl_slope = 1 - math.exp(to_reference)
                if settings.use_bias_correction_kl:
                    token_ratio = math.exp(log_ratios[t])
                    kl, kl_slope = token_ratio * kl, token_ratio * (kl + kl_slope)
                policy_loss += weight * settings.beta * kl
                by_logprob[i, t] += weight * settings.beta * kl_slope

    loss = policy_loss
    if settings.entropy_coef:
        for i, t in bonus_tokens:
            loss -= settings.entropy_coef * entropy[i, t] / len(bonus_tokens)
            by_entropy[i, t] = -settings.entropy_coef / len(bonus_tokens)
    return loss, policy_loss, by_logprob, by_entropy


def _weight(loss_type: str, own_tokens: int, rows: int, all_tokens: int, max_completion_length: int) -> float:
    """What one token's term is multiplied by in the step's loss."""
    if loss_type in ("grpo", "gspo", "sapo"):
        return 1 / (own_tokens * rows)
    if loss_type == "luspo":
        return 1 / rows
    if loss_type == "dr_grpo":
        return 1 / (rows * max_completion_length)
    return 1 / all_tokens


def _is_kept(case: Case, i: int, tokens: np.ndarray, frozen: np.ndarray) -> bool:
    threshold = case.settings.off_policy_mask_threshold
    if threshold is None or case.advantages[i] >= 0:
        return True
    sampler = case.behavior if case.behavior is not None else case.old
    if sampler is None:
        return True
    drift = 0.0
    for t in tokens:
        if not math.isnan(sampler[i, t]):
            drift += sampler[i, t] - frozen[i, t]
    return drift / len(tokens) <= threshold


def _policy_term(
    case: Case, advantage: float, ratio: float, frozen_ratio: float, frozen_log_ratio: float, logprob: float
) -> Term:
    settings = case.settings
    family = FAMILY[settings.loss_type]
    if family == "clip":
        high = 1 + (settings.epsilon_high if settings.epsilon_high is not None else settings.epsilon)
        low = 1 - settings.epsilon
        free, free_slope = (ratio, 1.0) if settings.delta is None or ratio < settings.delta else (settings.delta, 0.0)
        bounded, bounded_slope = (ratio, 1.0) if low < ratio < high else (min(max(ratio, low), high), 0.0)
        if free * advantage <= bounded * advantage:
            return Term(-free * advantage, -free_slope * advantage, 0.0)
        return Term(-bounded * advantage, -bounded_slope * advantage, 0.0)
    if family == "cispo":
        cap = 5.0 if settings.epsilon_high is None else settings.epsilon_high
        weight = min(frozen_ratio, cap) * advantage
        return Term(-weight * logprob, 0.0, -weight)
    if family == "sapo":
        temperature = SAPO_TEMPERATURES[bool(advantage > 0)]
        gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
        return Term(-4 / temperature * gate * advantage, -4 * gate * (1 - gate) * advantage, 0.0)
    shape, rate = VESPO_SHAPE_AND_RATE[bool(advantage >= 0)]
    log_w = min(max(frozen_log_ratio, math.log(1e-8)), 20.0)
    exponent = rate + shape * log_w - rate * math.exp(log_w)
    phi = math.exp(exponent) if exponent > -700 else 0.0
    return Term(-phi * advantage * logprob, 0.0, -phi * advantage)
