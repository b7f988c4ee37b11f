"""Loading the policy and its tokenizer, and checking that there is something to train."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import GENERATION_CONFIG_NAME

from grupo.errors import ConfigError, UnsupportedError, first_line
from grupo.hub import is_out_of_reach
from grupo.models.quantized import check_quantized, number_of_weights
from grupo.quantized_layers import keep_unpacked, set_evaluation_mode

logger = logging.getLogger("grupo")

WHERE = ("revision", "cache_dir", "token")
"""Keywords of from_pretrained that say where files are."""


def load_policy(
    name_or_path: str,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
) -> Any:
    """The causal language model in evaluation mode, in float32 unless `model_init_kwargs` names a dtype.

    Quantised layers are in training mode, so that the model computes what is trained (`set_evaluation_mode`).

    flash_attention_2 falls back to sdpa with one line where its package is not installed.
    """
    from transformers import AutoModelForCausalLM

    kwargs = dict(model_init_kwargs or {})
    kwargs.setdefault("dtype", kwargs.pop("torch_dtype", torch.float32))
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] != "auto":
        known = (*DTYPES, "float64")
        kwargs["dtype"] = dtype_named(kwargs["dtype"], setting="model_init_kwargs: dtype", known=known)
    wanted = kwargs.get("attn_implementation")
    if wanted == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        logger.warning("attn_implementation='flash_attention_2' needs the package flash-attn; 'sdpa' is used instead.")
        kwargs["attn_implementation"] = "sdpa"
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    loader: Any = AutoModelForCausalLM
    from_cache = is_out_of_reach(name_or_path)
    if from_cache:
        kwargs["local_files_only"] = True
        # The look for an adapter has keywords of its own.
        kwargs["adapter_kwargs"] = {**kwargs.get("adapter_kwargs", {}), "local_files_only": True}
    try:
        model, report = loader.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, output_loading_info=True, **kwargs
        )
    except (OSError, ValueError, SafetensorError) as error:
        if from_cache:
            raise ConfigError(_not_in_cache("model", name_or_path)) from error
        raise ConfigError(
            f"The model {name_or_path!r} cannot be loaded: {first_line(error)} Set `model` to a causal language "
            "model: a folder with a config.json and weights, or a name on the Hub."
        ) from error
    _check_head(model, name_or_path, report["missing_keys"])
    set_evaluation_mode(model)
    keep_unpacked(model)
    return model


def _check_head(model: Any, name: str, missing_keys: Iterable[str]) -> None:
    """The weights of a bare decoder load into a causal language model, with a head of random numbers."""
    head = model.get_output_embeddings()
    missing = set(missing_keys)
    for key, parameter in model.named_parameters():
        if key in missing and head is not None and parameter is getattr(head, "weight", None):
            raise ConfigError(
                f"The weights of {name!r} have no language model head ({key} is missing), so it would start from "
                "random numbers. Save the model from AutoModelForCausalLM, or take one that has its head."
            )


def check_causal(model: Any) -> None:
    """Only models that continue a text can be trained.

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


def _not_in_cache(what: str, name: str) -> str:
    return (
        f"The {what} {name!r} is no folder here, the Hub cannot be reached, and its cache on this machine does not "
        "have all files. Connect to the network, or give the path of a local folder."
    )


def device_dtype() -> torch.dtype:
    """What to compute in where nobody has said it: on an accelerator bfloat16 or else float16, on the CPU float32."""
    if not torch.accelerator.is_available():
        return torch.float32
    return torch.bfloat16 if supports_bfloat16() else torch.float16


def supports_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


DTYPES = ("float32", "bfloat16", "float16")


def dtype_named(dtype: str | torch.dtype, *, setting: str = "dtype", known: Sequence[str] = DTYPES) -> torch.dtype:
    """Raises a ConfigError where a dtype, given itself or by name, is none of the known ones."""
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise ConfigError(f"{setting}={dtype!r} is none of the dtypes here: use {', '.join(map(repr, known))}.")
    found: torch.dtype = getattr(torch, name)
    return found


def load_tokenizer(
    model: Any, model_init_kwargs: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The tokenizer that belongs to `model`, by the name that it was loaded from.

    Raises:
        ConfigError: the model does not know where it came from, or there is no tokenizer there.
    """
    from transformers import AutoTokenizer

    name = name_of(model)
    if not name:
        raise ConfigError(
            "The model does not say where it was loaded from, so its tokenizer cannot be found. Pass the tokenizer: "
            "GRPOTrainer(..., processing_class=tokenizer)."
        )
    where = {key: value for key, value in (model_init_kwargs or {}).items() if key in WHERE and value is not None}
    from_cache = is_out_of_reach(name)
    if from_cache:
        where["local_files_only"] = True
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    except (OSError, ValueError) as error:
        if from_cache:
            raise ConfigError(_not_in_cache("tokenizer", name)) from error
        raise ConfigError(
            f"The tokenizer of {name!r} cannot be loaded: {first_line(error)} Save the tokenizer beside the model, or "
            "pass it: GRPOTrainer(..., processing_class=tokenizer)."
        ) from error


def keep_savable(model: Any) -> None:
    """Takes a generation_config that contradicts itself for one that was read like this.

    Many models are published with a temperature and without do_sample. transformers saves that as long as nobody has
    changed anything, and training changes the special tokens: the first checkpoint would be an error.
    """
    base = base_model(model)
    config = getattr(base, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        with tempfile.TemporaryDirectory() as scratch:
            config.to_json_file(Path(scratch) / GENERATION_CONFIG_NAME)
            base.generation_config = type(config).from_pretrained(scratch)


def let_gradients_in(model: Any) -> None:
    """Re-entrant checkpointing sees no input that needs a gradient when only adapters are trained."""
    embeddings = model.get_input_embeddings()
    if hasattr(model, "enable_input_require_grads") and not any(p.requires_grad for p in embeddings.parameters()):
        model.enable_input_require_grads()


def base_model(model: Any) -> Any:
    """The model below the adapter, if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def name_of(model: Any) -> str:
    """Name or path that the model, or the base model of an adapter, was loaded from; empty if unknown."""
    return getattr(base_model(model).config, "_name_or_path", "") or ""


def quantization(model: Any) -> dict[str, Any] | None:
    """How the weights of the model, or of the base model of an adapter, are quantised; None where they are not."""
    config = getattr(base_model(model).config, "quantization_config", None)
    return config if config is None or isinstance(config, dict) else dict(config.to_dict())


def prepared_for_adapter(model: Any) -> Any:
    """A quantised model with its norms and embeddings in float32; any other as it is."""
    from peft import prepare_model_for_kbit_training

    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model


PROMPT_LEARNING = (
    "Prompt and prefix tuning put virtual tokens before the prompt, which this version of grupo would score at the "
    "wrong positions. Use LoRA or another adapter inside the layers."
)


def check_kind(peft_config: Any) -> None:
    """Adapters must be a function of each layer's input alone: rows are packed, and the sampler decodes a copy.

    Raises:
        UnsupportedError: it puts virtual tokens before the prompt, looks at the whole prompt, draws random numbers, or
            needs calls from the training loop.
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
    "alora_invocation_tokens": "acts only behind certain tokens of a prompt, which packed rows do not show to it",
    "arrow_config": "mixes adapters by what each token is, which is not supported here",
    "monteclora_config": "draws its weights anew in every forward, so the sampler would be another policy",
}
_UNSUPPORTED_TYPES = {
    "ADALORA": "its ranks are dealt out by calls from the training loop, which are not made here",
    "XLORA": "it mixes adapters by what the whole prompt is, which packed rows do not show to it",
    "ADAPTION_PROMPT": "it puts virtual tokens before the prompt",
}
_OTHER_ADAPTERS = "Use LoRA (also with use_rslora or use_dora) or another adapter inside the layers."


def check_trainable(model: Any) -> tuple[int, int]:
    """(trainable, all) parameter counts.

    Raises:
        ConfigError: nothing would be trained (TRL issue #6700), or quantised weights would.
        UnsupportedError: it has an adapter of a kind that is not supported.
    """
    for config in (getattr(model, "peft_config", None) or {}).values():
        check_kind(config)
    check_quantized(model)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(map(number_of_weights, model.parameters()))
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


def adapter_settings(model: Any) -> dict[str, Any]:
    """The configuration of the adapter in plain values, named as in `lora.r`, or that there is none."""
    configs = getattr(model, "peft_config", None) or {}
    settings: dict[str, Any] = {"adapter": "none" if not configs else type(next(iter(configs.values()))).__name__}
    for config in configs.values():
        kind = config.peft_type.value.lower()
        for name, value in config.to_dict().items():
            if name not in _NOT_ITS_FUNCTION:
                settings[f"{kind}.{name}"] = _plain(value)
    return settings


_NOT_ITS_FUNCTION = frozenset(
    {
        *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "task_type", "inference_mode"),
        *("init_lora_weights", "runtime_config", "peft_type"),
    }
)
"""Settings of an adapter that say where it came from, or how it began, and not what it computes."""


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def stop_token_ids(tokenizer: Any, model: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's EOS and all of the model's generation_config (TRL PR #7039)."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    many = configured if isinstance(configured, Sequence) else [configured]
    ids = {int(token) for token in [tokenizer.eos_token_id, *many] if token is not None}
    if not ids:
        logger.warning(
            "Neither the tokenizer nor the model's generation_config names an end-of-sequence token: every completion "
            "will run to max_completion_length and count as truncated."
        )
    return tuple(sorted(ids))


def ids_of_stop_texts(tokenizer: Any, texts: Sequence[str]) -> tuple[int, ...]:
    """The token of each text that is to end a completion.

    Raises:
        ConfigError: a text is not one token.
    """
    found = []
    vocabulary = tokenizer.get_vocab()
    for text in texts:
        ids = [vocabulary[text]] if text in vocabulary else tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"stop={text!r} is {len(ids)} tokens of this tokenizer, and the in-process engine ends completions at "
                "single tokens. Choose a text that is one token, such as a special one, or leave it out: what follows "
                "it in a completion can be cut off in the reward function."
            )
        found.append(int(ids[0]))
    return tuple(found)


def check_stop_token_ids(ids: Sequence[int], vocabulary_size: int | None) -> None:
    """Ids that the model has no token for would never stop anything.

    Raises:
        ConfigError: there are some.
    """
    outside = [token for token in ids if vocabulary_size is not None and token >= vocabulary_size]
    if outside:
        raise ConfigError(
            f"stop_token_ids has {outside}, and the model's tokens are 0 to {vocabulary_size - 1}: no completion could "  # type: ignore[operator]
            "end by them. Take the ids from tokenizer.convert_tokens_to_ids(...)."
        )


def context_length(model: Any) -> int | None:
    """Longest sequence in tokens that the model was made for, where its config says so."""
    config = base_model(model).config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "max_position_embeddings", None)


def vocabulary_size(model: Any) -> int | None:
    """Number of tokens that the model has embeddings for, where it says so."""
    # Not their num_embeddings, which layers of adapters do not have.
    weight = getattr(base_model(model).get_input_embeddings(), "weight", None)
    return None if weight is None else int(weight.shape[0])
