"""The loss of one optimizer step, as a sum of contributions of its micro-batches.

Legend: B completions of the micro-batch, T tokens of the longest one.

    per token      l = policy term of the loss type            terms.py
                   l = 0 where the off-policy mask or the entropy mask excludes the token
                   l = l + beta * KL
    aggregated     sum over the micro-batch / denominator of the whole optimizer step
    entropy bonus  - entropy_coef * sum of entropies / tokens of the whole optimizer step

The denominators are counted once, over all micro-batches and ranks (`StepTotals`), and passed in. So the contributions
of the micro-batches add up to the same loss and the same gradient however the step is split (what goes wrong otherwise:
huggingface/trl #3021, #5619, #6369).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grupo.algo import terms
from grupo.algo.ratios import LEVELS, completion_mean, k3, masked, off_policy_sequence_mask
from grupo.algo.registry import LOSSES
from grupo.algo.terms import LossSettings, PolicyTerm, PolicyTermFunction, TermInputs


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Values outside `mask` are never read. Log-probs and entropies are in nats."""

    policy_logprobs: Tensor
    """(B, T) with gradient. The whole computation uses its dtype."""
    advantages: Tensor
    """(B,)."""
    mask: Tensor
    """(B, T) bool, tokens in the loss."""
    old_logprobs: Tensor | None = None
    """(B, T); None: on-policy, where the ratio is 1 and only its gradient matters."""
    reference_logprobs: Tensor | None = None
    """(B, T), required where beta is not 0."""
    behavior_logprobs: Tensor | None = None
    """(B, T) by the engine, read by the off-policy mask. NaN: the engine has no log-prob for the token."""
    entropy: Tensor | None = None
    """(B, T) of the policy; with gradient where there is an entropy bonus."""
    entropy_threshold: float | Tensor | None = None
    """Nats, computed over the whole optimizer step. Tokens below it have no policy term. None: all tokens have one."""
    kl_completions: Tensor | None = None
    """(B,) bool, completions with a KL term. None: all."""


@dataclass(frozen=True)
class StepTotals:
    """Denominators of one optimizer step, over all its micro-batches and ranks."""

    tokens: int
    """Tokens in the loss masks."""
    completions: int
    """Completions with at least one such token."""
    entropy_tokens: int
    """Tokens with an entropy bonus: those in the loss masks that reach the entropy threshold, if there is one."""


@dataclass(frozen=True)
class LossOutput:
    """Contribution of one micro-batch to the step, and its metrics. Everything except `loss` is detached."""

    loss: Tensor
    """() with gradient. The values of all micro-batches and ranks add up to the loss of the step."""
    policy_loss: Tensor
    """() the loss without the entropy bonus."""
    sums: dict[str, tuple[Tensor, Tensor]]
    """Metric name -> (numerator, denominator), each (); both add up over micro-batches and ranks."""
    extremes: dict[str, Tensor]
    """`clip_ratio/low_min` and `clip_ratio/high_max` over completions; +inf and -inf where there are none."""


# Aggregations: (B, T) per-token loss that is 0 outside the mask -> () contribution to the loss of the step.

Aggregation = Callable[[Tensor, Tensor, StepTotals, int], Tensor]


def sequence_mean(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Mean over completions of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    return completion_mean(loss, mask).sum() / max(totals.completions, 1)


def sequence_sum(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Mean over completions of the sum over their tokens (LUSPO, arXiv 2602.05261)."""
    return loss.sum() / max(totals.completions, 1)


def token_mean(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Mean over all tokens of the step (DAPO, arXiv 2503.14476)."""
    return loss.sum() / max(totals.tokens, 1)


def fixed_length(loss: Tensor, mask: Tensor, totals: StepTotals, max_completion_length: int) -> Tensor:
    """Sum over tokens / (completions x maximum length), independent of their lengths (Dr. GRPO, arXiv 2503.20783)."""
    return loss.sum() / (max(totals.completions, 1) * max_completion_length)


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "token_mean": token_mean,
    "fixed_length": fixed_length,
}


@dataclass(frozen=True)
class GRPOLoss:
    """The loss function of a run, for any `loss_type`."""

    settings: LossSettings

    def __call__(self, inputs: LossInputs, totals: StepTotals, *, entropy_coef: float = 0.0) -> LossOutput:
        """Contribution of this micro-batch. B = 0 and an empty mask are valid: zero loss and zero gradient."""
        settings, mask = self.settings, inputs.mask
        term_inputs = self._term_inputs(inputs)
        entropy = None if inputs.entropy is None else masked(inputs.entropy, mask)
        sums = {"ratio/mean": _sum_and_count(term_inputs.ratio, mask)}

        high_entropy = mask
        if inputs.entropy_threshold is not None:
            assert entropy is not None, "an entropy threshold needs the entropies of the micro-batch"
            high_entropy = mask & (entropy >= inputs.entropy_threshold)

        in_term = high_entropy
        if settings.off_policy_mask_threshold is not None:
            kept = _off_policy_mask(inputs, term_inputs, settings.off_policy_mask_threshold)
            in_term = in_term & kept
            sums["off_policy/kept_mean"] = _sum_and_count(kept, mask)

        term = self._term(term_inputs)
        per_token = masked(term.loss, in_term)
        if settings.beta != 0.0:
            in_kl = mask if inputs.kl_completions is None else mask & inputs.kl_completions.unsqueeze(1)
            per_token_kl = masked(self._kl(inputs, term_inputs), in_kl)
            per_token = per_token + settings.beta * per_token_kl
            sums["kl"] = _sum_and_count(per_token_kl, in_kl)
        aggregate = AGGREGATIONS[LOSSES[settings.loss_type].aggregation]
        policy_loss = aggregate(per_token, mask, totals, settings.max_completion_length)

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
        """`sums` and `extremes` of the clip metrics for completions of advantage 0 with tokens `mask` (B, T).

        They are never clipped, whatever their ratio is, so no forward pass is needed for them.
        """
        zeros = torch.zeros(mask.shape)
        term = self._term(self._term_inputs(LossInputs(policy_logprobs=zeros, advantages=zeros[:, 0], mask=mask)))
        return {name: _sum_and_count(flags, mask) for name, flags in term.clipped.items()}, _extremes(term, mask)

    def _term(self, inputs: TermInputs) -> PolicyTerm:
        function: PolicyTermFunction = getattr(terms, LOSSES[self.settings.loss_type].term)
        return function(inputs, self.settings)

    def _term_inputs(self, inputs: LossInputs) -> TermInputs:
        level = LOSSES[self.settings.loss_type].level or self.settings.importance_sampling_level
        logprobs = masked(inputs.policy_logprobs, inputs.mask)
        old = logprobs.detach() if inputs.old_logprobs is None else masked(inputs.old_logprobs, inputs.mask)
        log_ratio = logprobs - old.to(logprobs.dtype)
        ratio = torch.exp(LEVELS[level](log_ratio, inputs.mask))
        advantages = inputs.advantages.to(logprobs.dtype).unsqueeze(1)
        return TermInputs(logprobs, log_ratio, ratio, advantages, inputs.mask)

    def _kl(self, inputs: LossInputs, term_inputs: TermInputs) -> Tensor:
        """(B, T) KL to the reference policy.

        Multiplied by the ratio, its gradient is that of the reverse KL (DeepSeek-V3.2, arXiv 2512.02556); without the
        ratio it is not, even on-policy. The ratio is the token's own at either level: a sequence ratio would give every
        token a gradient from the KL of all tokens of the completion (huggingface/trl #6586).
        """
        assert inputs.reference_logprobs is not None, "beta != 0 needs the reference log-probs of the micro-batch"
        reference = masked(inputs.reference_logprobs, inputs.mask).to(term_inputs.logprobs.dtype)
        per_token_kl = k3(reference, term_inputs.logprobs)
        if self.settings.use_bias_correction_kl:
            per_token_kl = per_token_kl * term_inputs.log_ratio.exp()
        return per_token_kl


def _off_policy_mask(inputs: LossInputs, term_inputs: TermInputs, threshold: float) -> Tensor:
    """(B, 1) bool. The engine's log-probs show both kinds of drift: later updates, and engine against trainer."""
    sampling = inputs.behavior_logprobs
    if sampling is None:
        sampling = inputs.old_logprobs
    if sampling is None:
        sampling = term_inputs.logprobs.detach()
    return off_policy_sequence_mask(sampling, term_inputs.logprobs, term_inputs.advantages, inputs.mask, threshold)


def _sum_and_count(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a mean over tokens, or over completions with tokens where `values` is (B, 1)."""
    counted = mask if values.shape == mask.shape else mask.any(dim=1, keepdim=True)
    return masked(values.detach(), counted).sum(), counted.sum()


def _extremes(term: PolicyTerm, mask: Tensor) -> dict[str, Tensor]:
    lowest, highest = term.completion_min.items(), term.completion_max.items()
    return {
        **{name: _completion_means(values, mask, empty=math.inf).amin() for name, values in lowest},
        **{name: _completion_means(values, mask, empty=-math.inf).amax() for name, values in highest},
    }


def _completion_means(values: Tensor, mask: Tensor, *, empty: float) -> Tensor:
    """(completions with tokens + 1,) mean of each one, then `empty`, so that there is always a value to reduce."""
    means = completion_mean(masked(values.detach(), mask), mask)[mask.any(dim=1)]
    return torch.cat([means, means.new_tensor([empty])])
