"""A decoder layer in as few operators as possible: with few rows, launching an operator costs more than its arithmetic.

R rows, N tokens of each, H hidden, h heads, k key-value heads, D head size, I inner width of the feed-forward part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Product = Callable[[Tensor], Tensor]

WINDOW_OF: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: getattr(attention.config, "sliding_window", None),
    "Qwen2DecoderLayer": lambda attention: attention.sliding_window,
    "Qwen3DecoderLayer": lambda attention: attention.sliding_window,
}
"""Layers of transformers that have the structure below, and where each keeps its sliding window."""


def is_fusible(layer: nn.Module) -> bool:
    """Whether `DecodingLayer` computes what this layer does, apart from hooks."""
    return type(layer).__name__ in WINDOW_OF and type(layer).__module__.startswith("transformers.models.")


class Rotation:
    """Cosines and sines of the rotary embedding, in the form that all layers of one forward need."""

    def __init__(self) -> None:
        self._sin: Tensor | None = None
        self._pair: tuple[Tensor, Tensor]

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(R, N, 1, D) each; sines of the first half are negated, so that the halves of a head can be swapped."""
        if sin is not self._sin:
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            self._sin, self._pair = sin, (cos.unsqueeze(2), signed.unsqueeze(2))
        return self._pair


class DecodingLayer(nn.Module):
    """x + attention(norm(x)), then x + down(act(gate(norm(x))) * up(norm(x))): a layer of the Llama family.

    Args:
        layer: the layer that is replaced; norms, activation and sizes are read from it.
        products: qkv (H to (h + 2k) D), output, gate_up (H to 2 I) and down.
        rotation: one for all layers of the model.
        plain_arithmetic: whether norms may use torch's own operator, whose rounding differs in half precision.
    """

    def __init__(
        self,
        layer: Any,
        products: tuple[Product, Product, Product, Product],
        rotation: Rotation,
        plain_arithmetic: bool,
    ) -> None:
        super().__init__()
        # Attention functions read sizes and settings of it. Not a child module: it belongs to the training model.
        self._attended: Any
        self.__dict__["_attended"] = layer.self_attn
        self.qkv, self.output, self.gate_up, self.down = products
        self.activation: Product = layer.mlp.act_fn
        self.window = WINDOW_OF[type(layer).__name__](layer.self_attn)
        self.rotation = rotation
        norm = functools.partial(_norm, plain_arithmetic=plain_arithmetic)
        self.before_attention, self.before_mlp = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        self.head_norms = (
            (norm(layer.self_attn.q_norm), norm(layer.self_attn.k_norm)) if hasattr(layer.self_attn, "q_norm") else None
        )
        self.head_size: int = layer.self_attn.head_dim
        self.heads: int = layer.self_attn.q_proj.out_features // self.head_size

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None,
        past_key_values: Any = None,
        **keywords: Any,
    ) -> Tensor:
        mixed = self._attention(
            self.before_attention(hidden_states),
            attention_mask,
            self.rotation.of(*position_embeddings),
            past_key_values if cache is None else cache,
            keywords,
        )
        hidden_states = hidden_states + mixed
        gate, up = self.gate_up(self.before_mlp(hidden_states)).chunk(2, dim=-1)
        return hidden_states + self.down(self.activation(gate) * up)

    def _attention(
        self, hidden: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor], cache: Any, keywords: dict[str, Any]
    ) -> Tensor:
        everything = self.qkv(hidden).unflatten(-1, (-1, self.head_size))
        rotated = (everything.shape[2] + self.heads) // 2
        query_key, value = everything[:, :, :rotated], everything[:, :, rotated:].transpose(1, 2)
        if self.head_norms is not None:
            parts = query_key.split([self.heads, rotated - self.heads], dim=2)
            query_key = torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], dim=2)
        cos, sin = rotation
        query_key = torch.addcmul(query_key * cos, query_key.roll(self.head_size // 2, -1), sin).transpose(1, 2)
        query, key = query_key[:, : self.heads], query_key[:, self.heads :]
        if cache is not None:
            key, value = cache.update(key, value, self._attended.layer_idx)
        attended = self._attended
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attended.config._attn_implementation, sdpa_attention_forward)
        mixed, _ = attend(
            attended, query, key, value, mask, dropout=0.0, scaling=attended.scaling, sliding_window=self.window,
            **keywords,
        )  # fmt: skip
        return self.output(mixed.reshape(*hidden.shape[:-1], -1))


def _norm(module: Any, *, plain_arithmetic: bool) -> Product:
    """RMSNorm of these models: in float32 inside, whatever the input."""
    if not plain_arithmetic:
        return module  # type: ignore[no-any-return]
    weight, size = module.weight, module.weight.shape[0]
    epsilon = weight.new_tensor(module.variance_epsilon)

    def norm(hidden: Tensor) -> Tensor:
        # torch's own operator takes twice as long for few rows.
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        result: Tensor = hidden * torch.addcmul(epsilon, length, length, value=1 / size).rsqrt_() * weight
        return result

    return norm
