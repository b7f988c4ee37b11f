"""Trained-looking adapters of many kinds on tiny models on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from families import family_model
from grupo.export.logit_check import TEXT
from tiny import tiny_bpe_tokenizer

SIZES = {"vocab_size": 448, "hidden_size": 64, "intermediate_size": 128}
TOKENIZER = tiny_bpe_tokenizer(TEXT + " ".join(str(37 * i) for i in range(200)))
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
INT8 = {"load_in_8bit": True}

EMBEDDINGS = ["embed_tokens", "lm_head"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear"},
    "DoRA": {"target_modules": "all-linear", "use_dora": True},
    "rsLoRA": {"target_modules": "all-linear", "use_rslora": True},
    "PiSSA": {"target_modules": "all-linear", "init_lora_weights": "pissa"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both, tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "whole embedding and head": {"target_modules": ["q_proj"], "modules_to_save": EMBEDDINGS},
    "single tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
    "whole norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}
STAYS_TIED = {"plain", "DoRA", "rsLoRA", "PiSSA", "both, tied", "single tokens", "whole norm"}
TRAINED = ("lora_B", "lora_embedding", "modules_to_save", "trainable_tokens", "magnitude")


def base_folder(folder: Path, family: str = "Llama", **settings: Any) -> Path:
    model = family_model(family, **{**SIZES, "tie_word_embeddings": True, **settings})
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def adapted(base: Path, quantization: dict[str, Any] | None = None, *, tokens: int | None = None, **lora: Any) -> Any:
    """A PEFT model whose adapter matters."""
    config = None if quantization is None else BitsAndBytesConfig(**quantization)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    if tokens is not None:
        model.resize_token_embeddings(tokens)
    adapter = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if parameter.requires_grad and any(part in name for part in TRAINED):
                parameter.add_(0.05 * torch.randn_like(parameter))
    return adapter.eval()
