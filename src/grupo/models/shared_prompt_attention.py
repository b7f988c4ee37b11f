"""Attention over packed rows, in which the completions of one prompt share it, and over the cache of a rollout.

A packed row holds each prompt once and its completions behind it (`PackedLayout`); a completion attends to its prompt
and to itself. Log-probs and gradients are those of separate rows, without computing a prompt more than once. While
completions are sampled, each row has one new token that attends to its keys in the cache (`DecodeLayout`).

The function below is registered in the `AttentionInterface` of transformers, which models look up by the name in their
configuration; the layout reaches it as a keyword of the model's forward.

N tokens of the row, h heads, k key-value heads, D head size; for one prompt: P prompt tokens, G completions, C tokens
of the longest one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from grupo.models.activation_recompute import register_recompute
from grupo.models.memory import LayerWidths
from grupo.types import GroupSpan, PackedLayout

ATTENTION = "grupo_packed"
LAYOUT_KEYWORD = "attention_layout"
QUERY_BLOCK = 1024
"""Queries of a completion that are computed together: bounds the mask of long completions to this many rows, and
leaves out most of the keys that come after them."""
KEPT_MASKS = 8
"""Blocks whose masks are made once for all layers."""


@dataclass(frozen=True)
class DecodeLayout:
    """Which columns of the cache the rows of a decode step see. The new token is in the last column."""

    first_column: tuple[int, ...]
    """Of each row, in the columns that the cache gives out."""
    num_columns: int
    device: torch.device

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """(R, 1, 1, columns) 0 where a row may look, else -inf; None: all rows see all columns."""
        oldest = 0 if window is None else max(0, self.num_columns - window)
        if max(self.first_column) == 0 and oldest == 0:
            return None
        return _column_mask(self.first_column, oldest, self.num_columns, dtype, self.device)


@contextlib.contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model attends by the layout that its forward is given.

    Keep the context open until after the backward pass: checkpointing runs the forward again in there. Close it before
    the model is used in any other way.
    """
    AttentionInterface.register(ATTENTION, shared_prompt_attention)
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        # The attribute behind `attn_implementation`: its setter, and `set_attn_implementation`, would also set every
        # nested configuration, and could not set it back where they differ.
        for config, _ in before:
            config._attn_implementation_internal = ATTENTION
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        # Masks and indices are of these lengths; the next rows have others.
        for kept in (_column_mask, _Rows.of, _mask):
            kept.cache_clear()


def packing_unsupported_reason(base: Any) -> str | None:
    """What can be told without running the model; None: its numbers decide."""
    if not isinstance(base, PreTrainedModel):
        return "this model is not one of the transformers library"
    parameters = inspect.signature(type(base).forward).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return "the forward of this model takes no further keywords"
    if "chunked_attention" in (getattr(base.config.get_text_config(), "layer_types", None) or ()):
        return "this model attends in chunks"
    return None


def missing_window_reason(base: Any, layout: PackedLayout) -> str | None:
    """Whether a model, run with this layout, should have named a sliding window and did not.

    Numbers do not show it, as long as sequences are shorter than the window.
    """
    config = base.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is None:
        expected = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    else:
        expected = "sliding_attention" in types
    if expected and layout.windows <= {None}:
        return "the layers of this model do not tell their sliding windows to the attention function"
    return None


def attention_bytes(
    prompt: int,
    completion: int,
    completions: int,
    *,
    widths: LayerWidths,
    layers: int,
    itemsize: int,
    device_type: str,
) -> int:
    """Memory that attention keeps for backward, in addition to queries, keys and values.

    Each block of queries of a completion has a mask. Where the kernel does not share key-value heads, as on CUDA, each
    block also has copies, for every head, of all keys and values before its end.

    Args:
        prompt, completion: tokens of the prompt and of each completion.
        completions: completions in the micro-batch.
        layers: layers whose tensors are kept at the same time.
    """
    block = min(QUERY_BLOCK, completion)
    ends = [min(start + block, completion) for start in range(0, completion, block)]
    keys = sum(prompt + end for end in ends)
    masks = keys * block * (layers if len(ends) > KEPT_MASKS else 1)
    has_copies = device_type == "cuda" and widths.queries != widths.keys
    copies = layers * completions * keys * 2 * widths.queries if has_copies else 0
    return (masks + copies) * itemsize


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query (R, h, N, D), key and value (R, k, N or columns, D); returns (R, N, h, D).

    Args:
        sliding_window: tokens that a query sees, itself included.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        s_aux: (h,) attention sinks, scores of a key without a value (gpt-oss).
    """
    layout: PackedLayout | DecodeLayout = keywords[LAYOUT_KEYWORD]
    if isinstance(layout, DecodeLayout):
        mask = layout.mask(sliding_window, query.dtype)
        return _decode(query, key, value, mask, scaling, softcap, s_aux), None
    attention = functools.partial(
        _attention, scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    layout.windows.add(sliding_window)
    return _packed(layout, attention, query, key, value), None


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """(R, 1, h, D) of one new token per row. The heads of a key-value head are its queries: nothing is repeated."""
    rows, heads, _, size = query.shape
    shared = heads // key.shape[1]
    queries = query.reshape(rows, key.shape[1], shared, size) * (size**-0.5 if scaling is None else scaling)
    sink = None if sinks is None else sinks.view(1, -1, shared, 1)
    shares = _attention_probs(queries @ key.transpose(2, 3), mask, softcap, sink).to(value.dtype)
    return (shares @ value).reshape(rows, 1, heads, value.shape[-1])


def _attention_probs(scores: Tensor, mask: Tensor | None, softcap: float | None, sink: Tensor | None) -> Tensor:
    """What each query takes of each key, in float32 at least; `sink` is the score of a key without a value."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return shares if sink is None else shares[..., :-1]


@functools.lru_cache(maxsize=4)
def _column_mask(first: tuple[int, ...], oldest: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for every layer of a decode step that looks as far back."""
    seen = torch.tensor(first, device=device).clamp_min(oldest)
    hidden = torch.arange(columns, device=device) < seen[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None, None]


def _packed(layout: PackedLayout, attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(1, N, h, D)."""
    sizes = [size for group in layout.groups for size in (group.prompt_length, sum(group.completion_lengths))]
    padding = query.shape[2] - sum(sizes)
    # One split, whose backward is one concatenation; a slice of its own for each part would cost a whole row each.
    queries, keys, values = (tensor.split([*sizes, padding], dim=2) for tensor in (query, key, value))
    mixed: list[Tensor] = []
    for index, group in enumerate(layout.groups):
        prompt, behind = 2 * index, 2 * index + 1
        # A copy: backward needs it, and a view would keep the whole row, of which uneven completions have copies.
        mixed.append(attention(queries[prompt].clone(), keys[prompt], values[prompt]))
        if group.completion_lengths:
            key_pair, value_pair = (keys[prompt], keys[behind]), (values[prompt], values[behind])
            mixed.append(_completions(attention, group, queries[behind], key_pair, value_pair))
    result = _assembled(layout, padding, *mixed)
    register_recompute(result, functools.partial(_assembled, layout, padding), *mixed)
    return result


def _assembled(layout: PackedLayout, padding: int, *mixed: Tensor) -> Tensor:
    """(1, N, h, D) from (1, h, P, D) of each prompt and (G, h, C, D) of its completions, if it has any."""
    rest = list(mixed)
    parts: list[Tensor] = []
    for group in layout.groups:
        parts.append(rest.pop(0).transpose(1, 2))
        if group.completion_lengths:
            rows = rest.pop(0)
            parts.append(_Rows.of(group.completion_lengths, rows.device).pack(rows))
    if padding:
        parts.append(parts[0].new_zeros(1, padding, *parts[0].shape[2:]))
    return torch.cat(parts, dim=1)


def _completions(
    attention: Any, group: GroupSpan, query: Tensor, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]
) -> Tensor:
    """(G, h, C, D) of all completions of a prompt; keys and values are those of prompt and completions."""
    rows = _Rows.of(group.completion_lengths, query.device)
    full_key, full_value = rows.with_prompt(*keys), rows.with_prompt(*values)
    register_recompute(full_key, rows.with_prompt, *keys)
    register_recompute(full_value, rows.with_prompt, *values)
    queries = rows.unpack(query)
    longest, prompt = rows.longest, group.prompt_length
    if longest <= QUERY_BLOCK:
        return attention(queries, full_key, full_value)  # type: ignore[no-any-return]
    blocks = []
    for start in range(0, longest, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, longest)
        keys_seen = slice(prompt + stop)
        blocks.append(attention(queries[:, :, start:stop], full_key[:, :, keys_seen], full_value[:, :, keys_seen]))
    return torch.cat(blocks, dim=2)


class _Rows:
    """Completions between the packed row and rows of their own, padded on the right.

    The padding repeats some token of the row: causal queries do not see it, and its own outputs are dropped.
    """

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self.count, self.longest = len(lengths), max(lengths)
        self.is_even = len(set(lengths)) == 1
        if not self.is_even:
            length = torch.tensor(lengths, device=device)
            step = torch.arange(self.longest, device=device)
            first = length.cumsum(0) - length
            self.source = (first[:, None] + torch.minimum(step, length[:, None] - 1)).flatten()
            self.kept = (step < length[:, None]).flatten().nonzero().squeeze(-1)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(lengths: tuple[int, ...], device: torch.device) -> _Rows:
        """The same for every layer of a forward."""
        return _Rows(lengths, device)

    def unpack(self, packed: Tensor) -> Tensor:
        """(1, h, sum of lengths, D) -> (G, h, C, D). Tokens come before heads in memory, as projections leave them."""
        tokens = packed[0].transpose(0, 1)
        rows: Tensor = tokens if self.is_even else tokens.index_select(0, self.source)
        unpacked: Tensor = rows.unflatten(0, (self.count, self.longest)).transpose(1, 2)
        return unpacked

    def with_prompt(self, prompt: Tensor, packed: Tensor) -> Tensor:
        """(G, k, P + C, D): every row of `packed` behind a copy of `prompt`, (1, k, P, D)."""
        return torch.cat([prompt.expand(self.count, -1, -1, -1), self.unpack(packed)], dim=2)

    def pack(self, rows: Tensor) -> Tensor:
        """(G, h, C, D) -> (1, sum of lengths, h, D)."""
        tokens = rows.transpose(1, 2).flatten(0, 1)
        return (tokens if self.is_even else tokens.index_select(0, self.kept)).unsqueeze(0)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of the last tokens: query (R, h, Q, D) stands at the end of key and value (R, k, K, D)."""
    length, total = query.shape[2], key.shape[2]
    window = window if window is not None and window < total else None
    mask = None
    if length != total or window is not None:
        mask = _mask(length, total, window, query.dtype, query.device)
    if softcap is not None or sinks is not None:
        return _eager_attention(query, key, value, mask, scaling, dropout, softcap, sinks)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and query.is_cuda:
        # With a mask CUDA has no fused kernel that shares key-value heads.
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        groups = 1
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
        enable_gqa=groups > 1,
    )  # fmt: skip


@functools.lru_cache(maxsize=KEPT_MASKS)
def _mask(queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(Q, K) 0 where the last Q of K tokens may look, else -inf; the same for all layers and completions."""
    # Kept for other forwards, which may train.
    with torch.inference_mode(False):
        query = torch.arange(keys - queries, keys, device=device)[:, None]
        key = torch.arange(keys, device=device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With all scores in memory: for what fused kernels do not know."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    if mask is None:
        mask = _mask(query.shape[2], key.shape[2], None, query.dtype, query.device)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    sink = None if sinks is None else sinks.view(1, -1, 1, 1)
    shares = _attention_probs(scores, mask, softcap, sink).to(value.dtype)
    return functional.dropout(shares, dropout) @ value
