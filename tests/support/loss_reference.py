"""The losses a second time, written independently: plain loops over rows and tokens, gradients by hand, no autograd.

`loss_by_loops` takes the log-probs twice: as what moves and as what is frozen (stop-gradient), so that finite
differences in the first can check the hand gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from loss_cases import Case, Result, Settings, entropies, log_softmax, threshold_of

SAPO_TEMPERATURES = {True: 1.0, False: 1.05}
VESPO_SHAPE_AND_RATE = {True: (2.0, 3.0), False: (3.0, 2.0)}


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
    settings, row = case.settings, REFERENCES[case.settings.loss_type]
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
        whole_sequence = row.level == "sequence" or (
            row.level is None and settings.importance_sampling_level == "sequence"
        )
        sequence_ratio = math.exp(sum(log_ratios.values()) / len(tokens))
        kept = _is_kept(case, i, tokens, frozen)
        frozen_log_ratio = sum(min(max(frozen[i, t] - old[t], -20.0), 20.0) for t in tokens)

        for t in tokens:
            weight = row.weight(len(tokens), len(rows), all_tokens, settings.max_completion_length)
            ratio = sequence_ratio if whole_sequence else math.exp(log_ratios[t])
            frozen_ratio = (
                math.exp(sum(frozen[i, u] - old[u] for u in tokens) / len(tokens))
                if whole_sequence
                else math.exp(frozen[i, t] - old[t])
            )
            if kept and (i, t) in acting:
                token = Token(case.advantages[i], ratio, frozen_ratio, frozen_log_ratio, logprobs[i, t])
                term = row.term(settings, token)
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


@dataclass(frozen=True)
class Token:
    """What a term is a function of."""

    advantage: float
    ratio: float
    frozen_ratio: float
    """The ratio under a stop-gradient."""
    frozen_log_ratio: float
    """Sum over the completion, under a stop-gradient."""
    logprob: float


def clip(settings: Settings, token: Token) -> Term:
    ratio, advantage = token.ratio, token.advantage
    high = 1 + (settings.epsilon_high if settings.epsilon_high is not None else settings.epsilon)
    low = 1 - settings.epsilon
    free, free_slope = (ratio, 1.0) if settings.delta is None or ratio < settings.delta else (settings.delta, 0.0)
    bounded, bounded_slope = (ratio, 1.0) if low < ratio < high else (min(max(ratio, low), high), 0.0)
    if free * advantage <= bounded * advantage:
        return Term(-free * advantage, -free_slope * advantage, 0.0)
    return Term(-bounded * advantage, -bounded_slope * advantage, 0.0)


def cispo(settings: Settings, token: Token) -> Term:
    cap = 5.0 if settings.epsilon_high is None else settings.epsilon_high
    weight = min(token.frozen_ratio, cap) * token.advantage
    return Term(-weight * token.logprob, 0.0, -weight)


def sapo(settings: Settings, token: Token) -> Term:
    temperature = SAPO_TEMPERATURES[bool(token.advantage > 0)]
    gate = 1 / (1 + math.exp(-temperature * (token.ratio - 1)))
    return Term(-4 / temperature * gate * token.advantage, -4 * gate * (1 - gate) * token.advantage, 0.0)


def vespo(settings: Settings, token: Token) -> Term:
    shape, rate = VESPO_SHAPE_AND_RATE[bool(token.advantage >= 0)]
    log_w = min(max(token.frozen_log_ratio, math.log(1e-8)), 20.0)
    exponent = rate + shape * log_w - rate * math.exp(log_w)
    phi = math.exp(exponent) if exponent > -700 else 0.0
    return Term(-phi * token.advantage * token.logprob, 0.0, -phi * token.advantage)


# What one token's term is multiplied by in the loss of the step.


def by_sequence(own_tokens: int, rows: int, all_tokens: int, max_completion_length: int) -> float:
    return 1 / (own_tokens * rows)


def by_row(own_tokens: int, rows: int, all_tokens: int, max_completion_length: int) -> float:
    return 1 / rows


def by_token(own_tokens: int, rows: int, all_tokens: int, max_completion_length: int) -> float:
    return 1 / all_tokens


def by_fixed_length(own_tokens: int, rows: int, all_tokens: int, max_completion_length: int) -> float:
    return 1 / (rows * max_completion_length)


@dataclass(frozen=True)
class Reference:
    """A loss: its term, the weight of a token, and the level of the ratio where the loss fixes it."""

    term: Callable[[Settings, Token], Term]
    weight: Callable[[int, int, int, int], float]
    level: str | None = None


REFERENCES = {
    "grpo": Reference(clip, by_sequence),
    "bnpo": Reference(clip, by_token),
    "dr_grpo": Reference(clip, by_fixed_length),
    "dapo": Reference(clip, by_token),
    "cispo": Reference(cispo, by_token),
    "sapo": Reference(sapo, by_sequence),
    "luspo": Reference(clip, by_row),
    "vespo": Reference(vespo, by_token),
    "gspo": Reference(clip, by_sequence, level="sequence"),
}
