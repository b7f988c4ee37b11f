"""Facts of a loaded model: its base, its sizes, its adapter, its stop tokens, and whether it can be trained."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from grupo.errors import ConfigError, UnsupportedError
from grupo.models.quantization import check_quantized, num_params

logger = logging.getLogger("grupo")


def check_causal(model: Any) -> None:
    """Accepts only models that continue a text.

    Raises:
        UnsupportedError: an encoder-decoder model.
        ConfigError: a model without a language model head.
    """
    base = base_model(model)
    name = type(base).__name__
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(
            f"The model is a {name}, which has an encoder and a decoder; this version of grupo trains models with a "
            "decoder alone. Use one that AutoModelForCausalLM loads."
        )
    if hasattr(base, "can_generate") and not base.can_generate():
        raise ConfigError(
            f"The model is a {name}, which has no language model head and cannot continue a text. Load it with "
            "AutoModelForCausalLM instead of AutoModel or another class."
        )


def base_model(model: Any) -> Any:
    """The model without its adapter, if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_name_or_path(model: Any) -> str:
    """Name or path from which the model, or the base model of its adapter, was loaded; empty if unknown."""
    return getattr(base_model(model).config, "_name_or_path", "") or ""


def quantization(model: Any) -> dict[str, Any] | None:
    """Quantisation settings of the model, or of the base model of its adapter; None if it is not quantised."""
    config = getattr(base_model(model).config, "quantization_config", None)
    return config if config is None or isinstance(config, dict) else dict(config.to_dict())


BYTES_PER_WEIGHT = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""NF4 with its scales: one byte for 64 weights, four for 256 of those (arXiv:2305.14314)."""


def weight_bytes(model: Any, quantization: str | None = None) -> dict[str, int]:
    """Memory of the weights, by the name of the dtype or quantisation that they are stored in.

    Args:
        quantization: "nf4" or "int8" where the model is still to be loaded in this form.
    """
    planned = {id(layer.weight) for layer in quantizable_layers(model)} if quantization else set()
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        name = str(parameter.dtype).removeprefix("torch.") if state is None else str(state.quant_type)
        if quantization is not None:
            name = quantization if id(parameter) in planned else "float32"
        scales = 4 * parameter.shape[0] if name == "int8" else 0
        per_weight = BYTES_PER_WEIGHT.get(name) or getattr(torch, name).itemsize
        sizes[name] += int(num_params(parameter) * per_weight) + scales
    return dict(sizes)


def quantizable_layers(model: Any) -> Iterator[nn.Linear]:
    """The layers that bitsandbytes replaces: the linear ones, without the head and without those of an adapter."""
    base = base_model(model)
    head = base.get_output_embeddings()
    for module in base.modules():
        if type(module) is nn.Linear and module is not head and not module.weight.requires_grad:
            yield module


PROMPT_LEARNING = (
    "Prompt and prefix tuning put virtual tokens before the prompt, and this version of grupo would compute log-probs "
    "at the wrong positions. Use LoRA or another adapter inside the layers."
)


def check_adapter_supported(peft_config: Any) -> None:
    """Accepts only adapters that depend on nothing but each layer's input: rows are packed, and a copy decodes.

    Raises:
        UnsupportedError: the adapter puts virtual tokens before the prompt, reads the whole prompt, draws random
            numbers, or needs calls from the training loop.
    """
    if getattr(peft_config, "is_prompt_learning", False):
        raise UnsupportedError(PROMPT_LEARNING)
    for name, reason in _UNSUPPORTED_KINDS.items():
        if getattr(peft_config, name, None):
            raise UnsupportedError(f"The adapter has {name} set, and {reason}. {_OTHER_ADAPTERS}")
    kind = getattr(peft_config.peft_type, "value", peft_config.peft_type)
    if kind in _UNSUPPORTED_TYPES:
        raise UnsupportedError(f"The adapter is of the type {kind}, and {_UNSUPPORTED_TYPES[kind]}. {_OTHER_ADAPTERS}")


_UNSUPPORTED_KINDS = {
    "alora_invocation_tokens": "acts only after certain tokens of a prompt, which it cannot see in packed rows",
    "arrow_config": "mixes adapters token by token, which is not supported",
    "monteclora_config": "draws new weights in every forward, so completions would come from another policy",
}


_UNSUPPORTED_TYPES = {
    "ADALORA": "its ranks are allocated by calls from the training loop, which grupo does not make",
    "XLORA": "it mixes adapters by the whole prompt, which it cannot see in packed rows",
    "ADAPTION_PROMPT": "it puts virtual tokens before the prompt",
}


_OTHER_ADAPTERS = "Use LoRA (also with use_rslora or use_dora) or another adapter inside the layers."


def check_trainable(model: Any) -> tuple[int, int]:
    """(trainable, all) parameter counts.

    Raises:
        ConfigError: no parameter is trainable (TRL issue #6700), or quantised weights would be trained.
        UnsupportedError: the model has an adapter of an unsupported kind.
    """
    for config in (getattr(model, "peft_config", None) or {}).values():
        check_adapter_supported(config)
    check_quantized(model)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(map(num_params, model.parameters()))
    if not trainable:
        hint = (
            "Load the adapter with PeftModel.from_pretrained(..., is_trainable=True)."
            if hasattr(model, "peft_config")
            else "Set requires_grad on the parameters to train, or pass a peft_config."
        )
        raise ConfigError(
            f"None of the model's {total:,} parameters is trainable: training would change nothing. {hint}"
        )
    return trainable, total


def describe_adapter(model: Any) -> dict[str, Any]:
    """Configuration of the adapter in plain values, with names such as `lora.r`; {"adapter": "none"} without one."""
    configs = getattr(model, "peft_config", None) or {}
    settings: dict[str, Any] = {"adapter": "none" if not configs else type(next(iter(configs.values()))).__name__}
    for config in configs.values():
        kind = config.peft_type.value.lower()
        for name, value in config.to_dict().items():
            if name not in _PROVENANCE_FIELDS:
                settings[f"{kind}.{name}"] = _plain(value)
    return settings


_PROVENANCE_FIELDS = frozenset(
    {
        *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "task_type", "inference_mode"),
        *("init_lora_weights", "runtime_config", "peft_type"),
    }
)
"""Settings of an adapter that record its origin or its initialisation and do not affect what it computes."""


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def stop_token_ids(tokenizer: Any, model: Any) -> tuple[int, ...]:
    """All ids that end a completion: the tokenizer's EOS and those of the generation_config (TRL PR #7039)."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    many = configured if isinstance(configured, Sequence) else [configured]
    ids = {int(token) for token in [tokenizer.eos_token_id, *many] if token is not None}
    if not ids:
        logger.warning(
            "Neither the tokenizer nor the model's generation_config names an end-of-sequence token: every completion "
            "will run to max_completion_length and count as truncated."
        )
    return tuple(sorted(ids))


def encode_stop_strings(tokenizer: Any, texts: Sequence[str]) -> tuple[int, ...]:
    """The token id of each stop string.

    Raises:
        ConfigError: a stop string is not a single token.
    """
    found = []
    vocabulary = tokenizer.get_vocab()
    for text in texts:
        ids = [vocabulary[text]] if text in vocabulary else tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"stop={text!r} is {len(ids)} tokens of this tokenizer, and the in-process engine ends completions at "
                "single tokens. Choose a string that is one token, such as a special token, or leave it out and let "
                "the reward function cut off what follows it."
            )
        found.append(int(ids[0]))
    return tuple(found)


def check_stop_token_ids(ids: Sequence[int], vocabulary_size: int | None) -> None:
    """Refuses stop tokens that the model cannot produce.

    Raises:
        ConfigError: an id is outside the vocabulary.
    """
    outside = [token for token in ids if vocabulary_size is not None and token >= vocabulary_size]
    if outside:
        raise ConfigError(
            f"stop_token_ids has {outside}, and the model's tokens are 0 to {vocabulary_size - 1}: no completion could "  # type: ignore[operator]
            "end with them. Take the ids from tokenizer.convert_tokens_to_ids(...)."
        )


def context_length(model: Any) -> int | None:
    """Longest sequence, in tokens, that the model was trained for; None if its configuration does not give it."""
    config = base_model(model).config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "max_position_embeddings", None)


def vocabulary_size(model: Any) -> int | None:
    """Number of tokens that the model has embeddings for; None if unknown."""
    # Not num_embeddings, which adapter layers do not have.
    weight = getattr(base_model(model).get_input_embeddings(), "weight", None)
    return None if weight is None else int(weight.shape[0])
