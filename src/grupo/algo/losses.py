"""The loss of one optimizer step, as a sum of what its micro-batches contribute.

Legend: B completions of the micro-batch, T tokens of the longest one.

    per token      l = policy term of the loss type            terms.py
                   l = 0 where the off-policy or the entropy mask says so
                   l = l + beta * KL
    aggregated     sum over the micro-batch / denominator of the whole optimizer step
    entropy bonus  - entropy_coef * sum of entropies / tokens of the whole optimizer step

The denominators are counted once, over all micro-batches and ranks (`StepTotals`), and passed in. So the shares of
all micro-batches add up to the same loss and the same gradient, however the step was cut (what goes wrong otherwise:
huggingface/trl #3021, #5619, #6369).

A new loss is one function in terms.py and one line in `LOSSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grupo.algo.ratios import LEVELS, k3, masked, on_policy_enough, row_mean
from grupo.algo.terms import PolicyTerm, PolicyTermFunction, PolicyTokens, cispo, clipped, sapo, vespo


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Whatever stands outside `mask` is never read. Log-probs and entropies are in nats."""

    policy_logprobs: Tensor
    """(B, T) with gradient. Its dtype is the dtype of the whole computation."""
    advantages: Tensor
    """(B,)."""
    mask: Tensor
    """(B, T) bool, the tokens that the loss acts on."""
    old_logprobs: Tensor | None = None
    """(B, T); None: on-policy, the ratio is 1 and only its gradient counts."""
    reference_logprobs: Tensor | None = None
    """(B, T), needed where beta is not 0."""
    behavior_logprobs: Tensor | None = None
    """(B, T) by the engine, read by the off-policy mask. NaN: the engine could not score the token."""
    entropy: Tensor | None = None
    """(B, T) of the policy; with gradient where an entropy bonus is asked for."""
    entropy_threshold: float | Tensor | None = None
    """Nats. Tokens below it get no policy term; counted over the whole optimizer step. None: all tokens act."""
    kl_rows: Tensor | None = None
    """(B,) bool, rows whose KL counts. None: all."""


@dataclass(frozen=True)
class StepTotals:
    """Denominators of one optimizer step, over all its micro-batches and ranks."""

    tokens: int
    """Tokens in the loss masks."""
    rows: int
    """Completions with at least one such token."""
    entropy_tokens: int
    """Tokens that the entropy bonus acts on: those in the loss masks that reach the entropy threshold, if any."""


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's share of the step, and what to log about it. All but `loss` is detached."""

    loss: Tensor
    """() with gradient. The shares of all micro-batches and ranks add up to the loss of the step."""
    policy_loss: Tensor
    """() the same without the entropy bonus."""
    sums: dict[str, tuple[Tensor, Tensor]]
    """Metric name -> (numerator, denominator), each (); both add up over micro-batches and ranks."""
    extremes: dict[str, Tensor]
    """`clip_ratio/low_min`, smallest over rows, and `clip_ratio/high_max`, largest; +inf and -inf without any row."""


# Aggregations: (B, T) per-token loss that is 0 outside the mask -> () share of the step's loss.

Aggregation = Callable[[Tensor, Tensor, StepTotals, int], Tensor]


def sequence_mean(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Mean over completions of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    return row_mean(loss, mask).sum() / max(totals.rows, 1)


def sequence_sum(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Mean over completions of the sum over their tokens (LUSPO, arXiv 2602.05261)."""
    return loss.sum() / max(totals.rows, 1)


def token_mean(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Mean over all tokens of the step (DAPO, arXiv 2503.14476)."""
    return loss.sum() / max(totals.tokens, 1)


def constant(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Sum over all tokens by a constant that no completion's length can move (Dr. GRPO, arXiv 2503.20783)."""
    return loss.sum() / (max(totals.rows, 1) * max_completion_length)


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "token_mean": token_mean,
    "constant": constant,
}


@dataclass(frozen=True)
class PolicyLoss:
    """A per-token term, the name of its aggregation, and the level of the ratio where the loss fixes it."""

    term: PolicyTermFunction
    aggregation: str
    level: str | None = None


LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(clipped, "sequence_mean"),
    "gspo": PolicyLoss(clipped, "sequence_mean", level="sequence"),
    "dapo": PolicyLoss(clipped, "token_mean"),
    "bnpo": PolicyLoss(clipped, "token_mean"),
    "dr_grpo": PolicyLoss(clipped, "constant"),
    "luspo": PolicyLoss(clipped, "sequence_sum"),
    "cispo": PolicyLoss(cispo, "token_mean"),
    "sapo": PolicyLoss(sapo, "sequence_mean"),
    "vespo": PolicyLoss(vespo, "token_mean"),
}


@dataclass(frozen=True)
class Objective:
    """The loss function of a run. The settings have TRL's names and defaults.

    Raises ValueError for an unknown `loss_type` or `importance_sampling_level`.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: `epsilon`, and for CISPO 5.0, because there it bounds the ratio itself."""
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

    def __post_init__(self) -> None:
        for name, value, known in (
            ("loss_type", self.loss_type, LOSSES),
            ("importance_sampling_level", self.importance_sampling_level, LEVELS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(sorted(known))}.")

    def __call__(self, inputs: LossInputs, totals: StepTotals, *, entropy_coef: float = 0.0) -> LossOutput:
        """This micro-batch's share of the step's loss. B = 0 and an empty mask are fine: zero loss, zero gradient."""
        policy = LOSSES[self.loss_type]
        mask = inputs.mask
        tokens = self._policy_tokens(inputs, policy.level or self.importance_sampling_level)
        entropy = None if inputs.entropy is None else masked(inputs.entropy, mask)
        sums = {"ratio/mean": _sum_and_count(tokens.ratio, mask)}

        high_entropy = mask
        if inputs.entropy_threshold is not None:
            assert entropy is not None, "an entropy threshold needs the entropies of the micro-batch"
            high_entropy = mask & (entropy >= inputs.entropy_threshold)

        acting = high_entropy
        if self.off_policy_mask_threshold is not None:
            kept = self._kept_rows(inputs, tokens, self.off_policy_mask_threshold)
            acting = acting & kept
            sums["off_policy/kept_mean"] = _sum_and_count(kept, mask)

        term = policy.term(tokens, self)
        per_token = masked(term.loss, acting)
        if self.beta != 0.0:
            counted = mask if inputs.kl_rows is None else mask & inputs.kl_rows.unsqueeze(1)
            per_token_kl = masked(self._kl(inputs, tokens), counted)
            per_token = per_token + self.beta * per_token_kl
            sums["kl"] = _sum_and_count(per_token_kl, counted)
        policy_loss = AGGREGATIONS[policy.aggregation](per_token, mask, totals, self.max_completion_length)

        loss = policy_loss
        if entropy_coef != 0.0:
            assert entropy is not None, "an entropy bonus needs the entropies of the micro-batch"
            loss = loss - entropy_coef * masked(entropy, high_entropy).sum() / max(totals.entropy_tokens, 1)

        if entropy is not None:
            sums["entropy"] = _sum_and_count(entropy, mask)
        values_to_average = {**term.clipped, **term.means}
        sums.update({name: _sum_and_count(values, mask) for name, values in values_to_average.items()})
        return LossOutput(loss, policy_loss.detach(), sums, _extremes(term, mask))

    def clip_metrics_without_advantage(
        self, mask: Tensor
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """`sums` and `extremes` of the clip metrics for rows of advantage 0 with tokens `mask` (B, T).

        Whatever their ratio is, such rows are never clipped, so that nothing need be computed for them.
        """
        policy = LOSSES[self.loss_type]
        zeros = torch.zeros(mask.shape)
        inputs = LossInputs(policy_logprobs=zeros, advantages=zeros[:, 0], mask=mask)
        term = policy.term(self._policy_tokens(inputs, policy.level or self.importance_sampling_level), self)
        return {name: _sum_and_count(flags, mask) for name, flags in term.clipped.items()}, _extremes(term, mask)

    def _policy_tokens(self, inputs: LossInputs, level: str) -> PolicyTokens:
        logprobs = masked(inputs.policy_logprobs, inputs.mask)
        old = logprobs.detach() if inputs.old_logprobs is None else masked(inputs.old_logprobs, inputs.mask)
        log_ratio = logprobs - old.to(logprobs.dtype)
        ratio = torch.exp(LEVELS[level](log_ratio, inputs.mask))
        advantages = inputs.advantages.to(logprobs.dtype).unsqueeze(1)
        return PolicyTokens(logprobs, log_ratio, ratio, advantages, inputs.mask)

    def _kept_rows(self, inputs: LossInputs, tokens: PolicyTokens, threshold: float) -> Tensor:
        """(B, 1) bool. The engine's log-probs see both kinds of drift: updates since, and engine against trainer."""
        sampling = inputs.behavior_logprobs
        if sampling is None:
            sampling = inputs.old_logprobs
        if sampling is None:
            sampling = tokens.logprobs.detach()
        return on_policy_enough(sampling, tokens.logprobs, tokens.advantages, inputs.mask, threshold)

    def _kl(self, inputs: LossInputs, tokens: PolicyTokens) -> Tensor:
        """(B, T) KL to the reference.

        Times the ratio, its gradient is the reverse KL's (DeepSeek-V3.2, arXiv 2512.02556); without, it is not, even
        on-policy. The ratio is the token's own at either level: a sequence's ratio would push every token of the row
        by the KL of all of them (huggingface/trl #6586).
        """
        assert inputs.reference_logprobs is not None, "beta != 0 needs the reference log-probs of the micro-batch"
        reference = masked(inputs.reference_logprobs, inputs.mask).to(tokens.logprobs.dtype)
        per_token_kl = k3(reference, tokens.logprobs)
        if self.use_bias_correction_kl:
            per_token_kl = per_token_kl * tokens.log_ratio.exp()
        return per_token_kl


def _sum_and_count(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a mean over tokens, or over rows with tokens where `values` is (B, 1)."""
    counted = mask if values.shape == mask.shape else mask.any(dim=1, keepdim=True)
    return masked(values.detach(), counted).sum(), counted.sum()


def _extremes(term: PolicyTerm, mask: Tensor) -> dict[str, Tensor]:
    lowest = {name: _row_means(values, mask, empty=math.inf).amin() for name, values in term.lowest_row.items()}
    highest = {name: _row_means(values, mask, empty=-math.inf).amax() for name, values in term.highest_row.items()}
    return {**lowest, **highest}


def _row_means(values: Tensor, mask: Tensor, *, empty: float) -> Tensor:
    """(rows with tokens + 1,) mean of each row, then `empty`, so that there is always one value to reduce."""
    means = row_mean(masked(values.detach(), mask), mask)[mask.any(dim=1)]
    return torch.cat([means, means.new_tensor([empty])])
