"""The models of the benchmark: the default model from its folder, or a random tiny one for trying the code itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for m in messages %}t3 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}t4{% endif %}"


def lora() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def random_llama(vocabulary_size: int, hidden_size: int = 32, layers: int = 2, heads: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=8192,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def save_tiny_model(folder: Path, vocabulary_size: int = 256) -> None:
    """A random model of some ten thousand parameters with a tokenizer of made-up words."""
    random_llama(vocabulary_size).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocabulary_size)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="t1", pad_token="t2", unk_token="t0")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def load(folder: str) -> tuple[Any, Any]:
    """Model in float32, and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
