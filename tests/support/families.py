"""Tiny random models of the families that are trained, from their transformers config classes.

Attention matters in them, every bias and sink is a number of its own, and sliding windows are shorter than most
sequences of the tests: what a way through the model forgets would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import VOCABULARY_SIZE

WINDOW = 12
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
MIXED_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    shares_prompts: bool = True
    takes_reentrant_checkpointing: bool = True


FAMILIES = {
    "Llama": Family("llama"),
    "Qwen2": Family("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": Family("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    # Three of four layers are linear attention, which knows neither masks nor layouts.
    "Qwen3.5": Family(
        "qwen3_5_text",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
        shares_prompts=False,
    ),
    "Gemma 3": Family(
        "gemma3_text",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True, **MIXED_WINDOWS},
    ),
    # Softcaps of attention scores and of logits.
    "Gemma 2": Family(
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 3.0,
            **MIXED_WINDOWS,
        },
        attention="eager",
    ),
    "Phi-3": Family("phi3", {"sliding_window": WINDOW}),
    "Mistral": Family("mistral", {"head_dim": 8, "sliding_window": WINDOW}),
    # Attention sinks, and experts.
    "gpt-oss": Family(
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED_WINDOWS},
        attention="eager",
        takes_reentrant_checkpointing=False,
    ),
    "Mixtral": Family(
        "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, takes_reentrant_checkpointing=False
    ),
    # DeepSeek-R1-distill: biases on queries, keys and values, and a head of its own; scaled rotary angles.
    "R1 distill (Qwen)": Family("qwen2", {"rms_norm_eps": 1e-6}),
    "R1 distill (Llama)": Family(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}


def family_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Any:
    """A random model of the family; `settings` go on top of its own."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.settings, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=family.attention).to(dtype)
    if dtype is torch.float64 and "num_local_experts" in family.settings:
        model.set_experts_implementation("eager")  # the fused kernels know no float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model
