"""Log-probs and entropy of given tokens from hidden states, without ever holding full logits.

N scored positions, H hidden, V vocabulary. Logits exist for one tile of tokens x vocabulary at a time, in forward and
in backward; the log-sum-exp over the vocabulary is accumulated online (Milakov and Gimelshein, arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

TOKEN_CHUNK = 1024
VOCABULARY_CHUNK = 16384


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    head_in_float32: bool = False,
    token_chunk: int = TOKEN_CHUNK,
    vocabulary_chunk: int = VOCABULARY_CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` under softmax((hidden @ weight.T + bias) / temperature), with gradient.

    Args:
        hidden: (N, H).
        weight: (V, H), of the output embedding.
        targets: (N,) int64 token ids.
        bias: (V,) or None.
        temperature: divides the logits, as in sampling.
        with_entropy: also return the entropy of each distribution, with gradient.
        head_in_float32: compute the projection in float32 (ScaleRL, arXiv:2510.13786) instead of hidden's dtype.

    Returns:
        (N,) log-probs in nats and (N,) entropies in nats or None; float32, or float64 for float64 input.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, weight, bias, targets, temperature, with_entropy, head_in_float32, token_chunk, vocabulary_chunk
    )
    return logprobs, entropy if with_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        head_in_float32: bool,
        token_chunk: int,
        vocabulary_chunk: int,
    ) -> tuple[Tensor, Tensor]:
        # Under autocast the projection of the model's own head runs in the autocast dtype; so does this one.
        matmul_dtype = _matmul_dtype(hidden, head_in_float32)
        result_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        tiles = _Tiles(weight, bias, temperature, matmul_dtype, result_dtype, vocabulary_chunk)
        count = hidden.shape[0]
        logprobs = hidden.new_empty(count, dtype=result_dtype)
        log_normalizer = hidden.new_empty(count, dtype=result_dtype)
        entropy = hidden.new_zeros(count if with_entropy else 0, dtype=result_dtype)
        for rows in _slices(count, token_chunk):
            target_logit, normalizer, mean_logit = tiles.reduced(hidden[rows], targets[rows], with_entropy)
            log_normalizer[rows] = normalizer
            logprobs[rows] = target_logit - normalizer
            if with_entropy:
                entropy[rows] = normalizer - mean_logit
        # The entropy is often only looked at: without a gradient for it, backward leaves its terms out.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy)
        ctx.settings = (temperature, matmul_dtype, result_dtype, token_chunk, vocabulary_chunk)
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_normalizer, entropy = ctx.saved_tensors
        temperature, matmul_dtype, result_dtype, token_chunk, vocabulary_chunk = ctx.settings
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizer)
        tiles = _Tiles(weight, bias, temperature, matmul_dtype, result_dtype, vocabulary_chunk)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=result_dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=result_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=result_dtype) if bias is not None and needs_bias else None
        for rows in _slices(hidden.shape[0], token_chunk):
            tokens = torch.arange(hidden[rows].shape[0], device=hidden.device)
            for columns, logits in tiles(hidden[rows]):
                log_p = logits - log_normalizer[rows, None]
                p = log_p.exp()
                # d logprob / d logit_j = [j = target] - p_j
                grad_logits = -grad_logprobs[rows, None] * p
                inside = (targets[rows] >= columns.start) & (targets[rows] < columns.stop)
                hits = tokens[inside]
                grad_logits[hits, targets[rows][inside] - columns.start] += grad_logprobs[rows][inside]
                if grad_entropy is not None:
                    # d H / d logit_j = -p_j (log p_j + H); a token of probability 0 has log p = -inf and no part in H
                    term = torch.where(p > 0, p * (log_p + entropy[rows, None]), torch.zeros_like(p))
                    grad_logits -= grad_entropy[rows, None] * term
                grad_logits = (grad_logits / temperature).to(matmul_dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] += (grad_logits @ weight[columns].to(matmul_dtype)).to(result_dtype)
                if grad_weight is not None:
                    grad_weight[columns] += (grad_logits.T @ hidden[rows].to(matmul_dtype)).to(result_dtype)
                if grad_bias is not None:
                    grad_bias[columns] += grad_logits.sum(0).to(result_dtype)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


class _Tiles:
    """Tempered logits of a chunk of tokens, one tile of the vocabulary after the other."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        matmul_dtype: torch.dtype,
        result_dtype: torch.dtype,
        vocabulary_chunk: int,
    ) -> None:
        self.weight, self.bias, self.temperature = weight, bias, temperature
        self.matmul_dtype, self.result_dtype = matmul_dtype, result_dtype
        self.vocabulary_chunk = vocabulary_chunk

    def __call__(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        hidden = hidden.to(self.matmul_dtype)
        for columns in _slices(self.weight.shape[0], self.vocabulary_chunk):
            logits = (hidden @ self.weight[columns].to(self.matmul_dtype).T).to(self.result_dtype)
            if self.bias is not None:
                logits = logits + self.bias[columns].to(self.result_dtype)
            yield columns, logits / self.temperature

    def reduced(self, hidden: Tensor, targets: Tensor, with_mean_logit: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) logit of each token's target, (n,) log-sum-exp of the logits, and (n,) their mean under the softmax
        (zeros unless asked for).

        The target's logit is one of those that are summed up: computed on its own it would be rounded differently, and
        in bfloat16 log-probs would come out above 0.
        """
        count = hidden.shape[0]
        target_logit = hidden.new_zeros(count, dtype=self.result_dtype)
        maximum = hidden.new_full((count,), -torch.inf, dtype=self.result_dtype)
        total = hidden.new_zeros(count, dtype=self.result_dtype)
        weighted = hidden.new_zeros(count, dtype=self.result_dtype)
        for columns, logits in self(hidden):
            inside = (targets >= columns.start) & (targets < columns.stop)
            column = (targets - columns.start).clamp(0, logits.shape[-1] - 1)
            target_logit = torch.where(inside, logits.gather(-1, column[:, None]).squeeze(-1), target_logit)
            new_maximum = torch.maximum(maximum, logits.amax(-1))
            rescale = (maximum - new_maximum).exp()
            weights = (logits - new_maximum[:, None]).exp()
            total = total * rescale + weights.sum(-1)
            if with_mean_logit:
                weighted = weighted * rescale + (weights * logits).sum(-1)
            maximum = new_maximum
        return target_logit, maximum + total.log(), weighted / total


def logprobs_from_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same from full (N, V) logits: for models whose logits are more than a projection of hidden states."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
    logprobs = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return logprobs, None
    # A token of probability 0 has log p = -inf: 0 * -inf would be NaN, in the value and in the gradient.
    finite = torch.where(log_p > -torch.inf, log_p, torch.zeros_like(log_p))
    return logprobs, -(finite.exp() * finite * (log_p > -torch.inf)).sum(-1)


def _matmul_dtype(hidden: Tensor, head_in_float32: bool) -> torch.dtype:
    if hidden.dtype == torch.float64:
        return torch.float64
    if head_in_float32:
        return torch.float32
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


def _slices(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))
