"""Log-probs and entropies of given tokens from hidden states, without materialising full logits.

N tokens, H hidden, V vocabulary; n tokens and v vocabulary entries per tile. Logits exist for one n x v tile at a time;
the log-sum-exp over the vocabulary is accumulated online (Milakov and Gimelshein, arXiv:1805.02867).

With a frozen head one pass is enough: d logprob / d hidden = (w_target - E_p[w]) / temperature, and the mean of the
head's weight vectors under the softmax, E_p[w], is accumulated together with the log-sum-exp, as attention accumulates
its values. Value and gradient then take two projections. A trained head needs all probabilities again, so the backward
pass recomputes its logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TOKEN_CHUNK = 1024
VOCABULARY_CHUNK = 4096


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
        weight: (V, H) weight of the output embedding.
        targets: (N,) int64 token ids.
        bias: (V,) or None.
        temperature: divides the logits, as in sampling.
        with_entropy: also return the entropy of each distribution, with gradient.
        head_in_float32: compute the projection in float32 (ScaleRL, arXiv:2510.13786) instead of the dtype of `hidden`.

    Returns:
        (N,) log-probs in nats and (N,) entropies in nats or None; float32, or float64 for float64 input.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, weight, bias, targets, temperature, with_entropy, head_in_float32, token_chunk, vocabulary_chunk
    )
    return logprobs, entropy if with_entropy else None


def logprob_bytes(head: Any, count: int, *, vocabulary: int, itemsize: int) -> int:
    """Peak memory of the log-probs of `count` tokens and of their gradients, with a head of `vocabulary` rows.

    Args:
        head: the model's output embedding. Where it is not a plain linear layer, full logits are computed.
        itemsize: bytes of one number of the hidden states.
    """
    if type(head) is not nn.Linear:
        return 4 * count * vocabulary * 4  # logits, logits in float32, probabilities, gradient
    tile = 2 * min(count, TOKEN_CHUNK) * min(vocabulary, VOCABULARY_CHUNK) * 4
    weight_gradient = head.weight.numel() * 4 if head.weight.requires_grad else 0
    return count * head.in_features * 2 * (itemsize + 4) + tile + weight_gradient


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
        # Under autocast the model's own head runs in the autocast dtype, and so does this projection.
        matmul_dtype = _matmul_dtype(hidden, head_in_float32)
        result_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        tiles = _Tiles(weight, bias, temperature, matmul_dtype, result_dtype, vocabulary_chunk)
        count = hidden.shape[0]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        one_pass = needs_hidden and not needs_weight and not needs_bias
        # The mean logit is the hidden state times the mean weight vector, if the dtype is precise enough.
        entropy_from_mean = one_pass and bias is None and matmul_dtype == result_dtype
        logprobs = hidden.new_empty(count, dtype=result_dtype)
        log_normalizer = hidden.new_empty(count, dtype=result_dtype)
        entropy = hidden.new_empty(count if with_entropy else 0, dtype=result_dtype)
        mean_weight = hidden.new_empty(hidden.shape if one_pass else (0, 0), dtype=result_dtype)
        for rows in _slices(count, token_chunk):
            reduced = tiles.reduced(
                hidden[rows],
                targets[rows],
                with_entropy=with_entropy and not entropy_from_mean,
                with_mean_weight=one_pass,
            )
            log_normalizer[rows] = reduced.log_normalizer
            logprobs[rows] = reduced.target_logit - reduced.log_normalizer
            if with_entropy:
                mean_logit = reduced.mean_logit
                if entropy_from_mean:
                    mean_logit = torch.linalg.vecdot(hidden[rows].to(result_dtype), reduced.mean_weight) / temperature
                entropy[rows] = reduced.log_normalizer - mean_logit
            if reduced.mean_weight is not None:
                mean_weight[rows] = reduced.mean_weight
        # The entropy is often only logged; without a gradient for it, backward skips its terms.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy, mean_weight)
        ctx.settings = (temperature, matmul_dtype, result_dtype, token_chunk, vocabulary_chunk, one_pass)
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_normalizer, entropy, mean_weight = ctx.saved_tensors
        temperature, matmul_dtype, result_dtype, token_chunk, vocabulary_chunk, one_pass = ctx.settings
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizer)
        if one_pass and grad_entropy is None:
            toward_target = weight[targets].to(result_dtype).sub_(mean_weight)
            grad_hidden = toward_target.mul_((grad_logprobs / temperature)[:, None])
            return grad_hidden.to(hidden.dtype), *(None,) * 8
        tiles = _Tiles(weight, bias, temperature, matmul_dtype, result_dtype, vocabulary_chunk)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=result_dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=result_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=result_dtype) if bias is not None and needs_bias else None
        for rows in _slices(hidden.shape[0], token_chunk):
            tokens = torch.arange(hidden[rows].shape[0], device=hidden.device)
            for columns, logits in tiles(hidden[rows]):
                log_p = logits.sub_(log_normalizer[rows, None])
                # d logprob / d logit_j = [j = target] - p_j
                inside = (targets[rows] >= columns.start) & (targets[rows] < columns.stop)
                hits = tokens[inside]
                if grad_entropy is None:
                    grad_logits = log_p.exp_().mul_(-grad_logprobs[rows, None])
                else:
                    p = log_p.exp()
                    # d H / d logit_j = -p_j (log p_j + H); a token of probability 0 has log p = -inf and adds nothing
                    term = torch.where(p > 0, p * (log_p + entropy[rows, None]), torch.zeros_like(p))
                    grad_logits = p.mul_(-grad_logprobs[rows, None]).sub_(term.mul_(grad_entropy[rows, None]))
                grad_logits[hits, targets[rows][inside] - columns.start] += grad_logprobs[rows][inside]
                grad_logits = grad_logits.div_(temperature).to(matmul_dtype)
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


class _Reduced(NamedTuple):
    """Sums over the whole vocabulary for a chunk of n tokens."""

    target_logit: Tensor
    """(n,) taken from the logits that are summed up: computed separately, its rounding would differ, and log-probs in
    bfloat16 could exceed 0."""
    log_normalizer: Tensor
    """(n,) log-sum-exp of the logits."""
    mean_logit: Tensor
    """(n,) mean logit under the softmax; zeros unless requested."""
    mean_weight: Tensor | None
    """(n, H) mean weight vector of the head under the softmax; None unless requested."""


class _Tiles:
    """Logits of a chunk of tokens at the sampling temperature, tile by tile over the vocabulary."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        matmul_dtype: torch.dtype,
        result_dtype: torch.dtype,
        vocabulary_chunk: int,
    ) -> None:
        self.weight, self.temperature = weight, temperature
        # Finite, because a probability of 0 times a logit of -inf would make the mean logit NaN.
        self.bias = None if bias is None else bias.to(result_dtype).clamp_min(-1e30)
        self.matmul_dtype, self.result_dtype = matmul_dtype, result_dtype
        self.vocabulary_chunk = vocabulary_chunk

    def __call__(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(n, v) logits, tile by tile; each tile reuses the memory of the previous one."""
        hidden = hidden.to(self.matmul_dtype)
        columns_at_once = min(self.vocabulary_chunk, self.weight.shape[0])
        buffer = hidden.new_empty(hidden.shape[0] * columns_at_once)
        for columns in _slices(self.weight.shape[0], self.vocabulary_chunk):
            width = columns.stop - columns.start
            tile = buffer[: hidden.shape[0] * width].view(hidden.shape[0], width)
            torch.mm(hidden, self.weight[columns].to(self.matmul_dtype).T, out=tile)
            logits = tile.to(self.result_dtype)
            if self.bias is not None:
                logits += self.bias[columns]
            if self.temperature != 1.0:
                logits /= self.temperature
            yield columns, logits

    def reduced(self, hidden: Tensor, targets: Tensor, *, with_entropy: bool, with_mean_weight: bool) -> _Reduced:
        count = hidden.shape[0]
        target_logit = hidden.new_zeros(count, dtype=self.result_dtype)
        maximum = hidden.new_full((count,), -torch.inf, dtype=self.result_dtype)
        total = hidden.new_zeros(count, dtype=self.result_dtype)
        weighted = hidden.new_zeros(count, dtype=self.result_dtype)
        mean_weight = hidden.new_zeros(hidden.shape, dtype=self.result_dtype) if with_mean_weight else None
        for columns, logits in self(hidden):
            inside = (targets >= columns.start) & (targets < columns.stop)
            column = (targets - columns.start).clamp(0, logits.shape[-1] - 1)
            target_logit = torch.where(inside, logits.gather(-1, column[:, None]).squeeze(-1), target_logit)
            new_maximum = torch.maximum(maximum, logits.amax(-1))
            rescale = (maximum - new_maximum).exp()
            if with_entropy:
                weights = (logits - new_maximum[:, None]).exp_()
                weighted = weighted * rescale + torch.linalg.vecdot(weights, logits)
            else:
                weights = logits.sub_(new_maximum[:, None]).exp_()
            total = total * rescale + weights.sum(-1)
            if mean_weight is not None:
                mean_weight.mul_(rescale[:, None])
                mean_weight += weights.to(self.matmul_dtype) @ self.weight[columns].to(self.matmul_dtype)
            maximum = new_maximum
        if mean_weight is not None:
            mean_weight.div_(total[:, None])
        return _Reduced(target_logit, maximum + total.log(), weighted / total, mean_weight)


def logprobs_from_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies from full (N, V) logits, for models whose logits are not a plain projection."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
    logprobs = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return logprobs, None
    # A token of probability 0 has log p = -inf, and 0 * -inf would be NaN in the value and in the gradient.
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
