"""Drawing one token per row from logits. R rows, V vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grupo.sampling import SamplingSpec

BLOCK = 128
"""Tokens of the vocabulary; a divisor of most sizes."""
LOGIT_TENSORS = 5
"""Float32 tensors as large as the logits while tokens are sampled; twice as many with top-k, top-p or min-p."""


class SampledTokens(NamedTuple):
    """What one decode step yields, each (R,)."""

    token_ids: Tensor
    behavior_logprobs: Tensor
    """Nats, under the tempered full softmax."""
    sampled_logprobs: Tensor
    """Nats, under the distribution that was really drawn from."""
    entropies: Tensor
    """Nats, of the tempered full softmax."""


def sample_tokens(logits: Tensor, spec: SamplingSpec, uniforms: Tensor, seen: Tensor | None = None) -> SampledTokens:
    """Draws by inverse CDF.

    Args:
        logits: (R, V), any float dtype; computed in float32.
        uniforms: (R,) float64 in [0, 1), one number per row; not read when greedy.
        seen: (R, V) bool, tokens of prompt and completion so far; needed for a repetition penalty.
    """
    logits = logits.float()
    temperature = 1.0 if spec.is_greedy else spec.temperature
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    probs = log_probs.exp()
    entropies = -torch.linalg.vecdot(probs, log_probs.clamp_min(torch.finfo(log_probs.dtype).min))
    sampled_log_probs = log_probs
    if _changes_distribution(spec):
        sampled_log_probs = truncated_log_probs(logits, spec, seen)
        probs = sampled_log_probs.exp()
    token_ids = probs.argmax(-1) if spec.is_greedy else _inverse_cdf(probs, uniforms)
    index = token_ids.unsqueeze(-1)
    return SampledTokens(
        token_ids,
        log_probs.gather(-1, index).squeeze(-1),
        sampled_log_probs.gather(-1, index).squeeze(-1),
        entropies,
    )


def sampling_bytes(rows: int, vocabulary: int, spec: SamplingSpec) -> int:
    """Peak memory of sampling one token in each of `rows` rows."""
    return rows * vocabulary * 4 * LOGIT_TENSORS * (2 if _truncates(spec) else 1)


def _truncates(spec: SamplingSpec) -> bool:
    return bool(spec.top_k or spec.top_p < 1.0 or spec.min_p)


def _changes_distribution(spec: SamplingSpec) -> bool:
    return _truncates(spec) or spec.repetition_penalty != 1.0


def truncated_log_probs(logits: Tensor, spec: SamplingSpec, seen: Tensor | None = None) -> Tensor:
    """(R, V) log-probs after repetition penalty, temperature, top-k, top-p and min-p, in transformers' order.

    Tokens outside the kept support get -inf. At least one token is always kept.
    """
    if spec.repetition_penalty != 1.0:
        # Not transformers' own: it needs as many ids in each row, and rows here have prompts of different lengths.
        assert seen is not None, "a repetition penalty needs the tokens seen so far"
        penalised = torch.where(logits < 0, logits * spec.repetition_penalty, logits / spec.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if not spec.is_greedy:
        logits = logits / spec.temperature
    warpers: list[Any] = []
    if spec.top_k:
        warpers.append(TopKLogitsWarper(spec.top_k))
    if spec.top_p < 1.0:
        warpers.append(TopPLogitsWarper(spec.top_p))
    if spec.min_p:
        warpers.append(MinPLogitsWarper(spec.min_p))
    for warper in warpers:
        logits = warper(None, logits)  # reads no token ids
    return torch.log_softmax(logits, dim=-1)


def _inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """(R,) indices: the first whose cumulative probability exceeds the uniform number.

    First the block of the vocabulary is found, then the token in it: sums of blocks are much cheaper than one
    cumulative sum over all tokens.
    """
    missing = -probs.shape[-1] % BLOCK
    blocks = functional.pad(probs, (0, missing)) if missing else probs
    blocks = blocks.unflatten(-1, (-1, BLOCK))
    mass = blocks.sum(-1, dtype=torch.float64)
    cumulative = mass.cumsum(-1)
    block, rest = _first_above(cumulative, uniforms.double().unsqueeze(-1) * cumulative[:, -1:])
    within = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double().cumsum(-1)
    place, _ = _first_above(within, rest)
    return (block * BLOCK + place).squeeze(-1)


def _first_above(cumulative: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """(R, 1) the first column above the threshold, which so is of positive probability, and the threshold less the
    columns before it."""
    # Rounding can put the threshold at the total, which no column exceeds.
    threshold = torch.minimum(threshold, torch.nextafter(cumulative[:, -1:], torch.zeros_like(threshold)))
    # NaN is above everything; who reads the draw's log-probs finds it.
    index = torch.searchsorted(cumulative, threshold, right=True).clamp_max(cumulative.shape[-1] - 1)
    before = functional.pad(cumulative, (1, 0)).gather(-1, index)
    return index, threshold - before
