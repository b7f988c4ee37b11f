"""What becomes of Unsloth's arguments that have nothing to set here: one line, or an error. The one table of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from grupo.errors import ConfigError, UnsupportedError
from grupo.utils.messages import did_you_mean

logger = logging.getLogger("grupo")

_VLLM = "it is about vLLM, and completions are sampled in this process"

LOADING_WITHOUT_EFFECT: dict[str, str] = {
    "gpu_memory_utilization": _VLLM,
    "max_lora_rank": "adapters of any rank are used",
    "disable_log_stats": _VLLM,
    "unsloth_vllm_standby": _VLLM,
    "float32_mixed_precision": "bf16 and fp16 of GRPOConfig decide about mixed precision",
    "offload_embedding": "embeddings stay on the device; the result is the same",
    "unsloth_tiled_mlp": "micro-batches bound the memory of activations; the result is the same",
    "fix_tokenizer": "the tokenizer is taken as it is saved",
    "use_exact_model_name": "names are always taken as they are",
    "text_only": "only language models are loaded in any case",
    "random_state": "loading draws no random numbers; get_peft_model has its own random_state",
}
"""Arguments of from_pretrained that change no result -> why not."""

LOADING_REFUSED: dict[str, str] = {
    "load_in_fp8": "weights in 8-bit floating point are not part of this version; load_in_8bit=True has 8-bit integers",
    "float8_kv_cache": "the cache has the precision of the model",
    "rope_scaling": "contexts are not stretched in this version; max_seq_length may be as long as the model's own",
    "qat_scheme": "quantisation-aware training is not part of this version",
    "resize_model_vocab": "call model.resize_token_embeddings after adding tokens, before get_peft_model",
    "auto_model": "models are loaded by AutoModelForCausalLM",
    "return_logits": "call the model itself for logits",
    "auto_config": "the configuration is that of the saved model",
}
"""Arguments of from_pretrained that would make another model -> what to do instead."""

LOADING_PASSED_ON = ("attn_implementation", "cache_dir", "subfolder", "variant", "torch_dtype")
"""Arguments of from_pretrained that transformers gets as they are."""

ADAPTER_WITHOUT_EFFECT: dict[str, str] = {
    "max_seq_length": "it was set when the model was loaded",
    "temporary_location": "nothing is written to disk",
    "finetune_vision_layers": "language models have none",
    "finetune_audio_layers": "language models have none",
}
"""Arguments of get_peft_model that change no result -> why not."""

ADAPTER_REFUSED: dict[str, str] = {
    "loftq_config": "LoftQ is not part of this version; leave it out for LoRA's own start",
    "qat_scheme": "quantisation-aware training is not part of this version",
}
"""Arguments of get_peft_model that would make another adapter -> what to do instead."""

ADAPTER_PASSED_ON = (
    *("use_dora", "target_parameters", "exclude_modules", "rank_pattern", "alpha_pattern", "lora_bias"),
    "trainable_token_indices",
)
"""Arguments of get_peft_model that peft's LoraConfig gets as they are."""


def resolve_kwargs(
    where: str,
    given: Mapping[str, Any],
    *,
    without_effect: Mapping[str, str],
    refused: Mapping[str, str],
    passed_on: Iterable[str],
) -> dict[str, Any]:
    """What is passed on of the further arguments of a function; the others get one line together, or an error.

    Raises:
        UnsupportedError: one would change the result, and cannot.
        ConfigError: one is not known.
    """
    for name, value in given.items():
        if name in refused and value:
            raise UnsupportedError(f"{where}: {name}={value!r} is not supported: {refused[name]}.")
        if name not in (*without_effect, *refused, *passed_on):
            known = (*without_effect, *refused, *passed_on)
            raise ConfigError(
                f"{where} has no argument {name!r}.{did_you_mean(name, known)} docs/unsloth.md lists every argument."
            )
    idle = [name for name in given if name in without_effect]
    if idle:
        reasons = "; ".join(f"{name} ({without_effect[name]})" for name in idle)
        logger.warning("%s: without effect here: %s.", where, reasons)
    return {name: value for name, value in given.items() if name in passed_on}
