"""`FastLanguageModel`: models loaded and given adapters under Unsloth's names, arguments and defaults.

Nothing is patched: a model keeps its class, and gets the methods that scripts call on it as attributes of its own.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from grupo.errors import ConfigError, UnsupportedError
from grupo.models.inspect import base_model, context_length
from grupo.models.load import device_dtype, load_tokenizer, parse_dtype, supports_bfloat16
from grupo.models.load_options import LoadOptions, load_options, set_load_options
from grupo.models.peft_io import find_adapter, load_named
from grupo.models.peft_setup import add_adapter, lora_config
from grupo.models.quantization import quantization_config
from grupo.runs.latest import resolve_latest
from grupo.unsloth import arguments, generation, saving
from grupo.utils.messages import pluralize
from grupo.utils.quantized_layers import set_evaluation_mode

logger = logging.getLogger("grupo")

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
METHODS: dict[str, Callable[..., Any]] = {
    "fast_generate": generation.fast_generate,
    "load_lora": generation.load_lora,
    "save_lora": saving.save_lora,
    "save_pretrained_merged": saving.save_pretrained_merged,
    "push_to_hub_merged": saving.push_to_hub_merged,
    "save_pretrained_gguf": saving.save_pretrained_gguf,
    "push_to_hub_gguf": saving.push_to_hub_gguf,
}
"""What scripts call on a model -> the function that gets the model first."""


class FastLanguageModel:
    """Loads causal language models for training, and gives them LoRA adapters."""

    @staticmethod
    def from_pretrained(
        model_name: str | os.PathLike[str],
        max_seq_length: int | None = 2048,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool | None = None,
        load_in_8bit: bool = False,
        load_in_16bit: bool = False,
        full_finetuning: bool = False,
        token: str | None = None,
        device_map: Any = "sequential",
        trust_remote_code: bool = False,
        use_gradient_checkpointing: bool | str = "unsloth",
        fast_inference: bool = False,
        revision: str | None = None,
        **more: Any,
    ) -> tuple[Any, Any]:
        """The model, and its tokenizer.

        Args:
            model_name: name on the Hub, or folder; of a model, or of an adapter, with which training then goes on.
            max_seq_length: tokens of prompt and completion together; training and fast_generate keep to it.
            dtype: of weights that are not quantised, and of the arithmetic of those that are; None: bfloat16 or else
                float16 on an accelerator, float32 on the CPU and with full_finetuning.
            load_in_4bit: NF4 with double quantisation; unset, True unless another precision or full_finetuning is.
            load_in_8bit: LLM.int8().
            load_in_16bit: weights in `dtype`, for LoRA.
            full_finetuning: all weights are trained; without get_peft_model.
            token: for the Hub.
            device_map: only one device.
            trust_remote_code: allows code from the Hub.
            use_gradient_checkpointing: until get_peft_model says otherwise; see there.
            fast_inference: accepted; completions are sampled in this process either way.
            revision: on the Hub.
            more: see docs/unsloth.md for each.

        Raises:
            ConfigError: arguments that contradict each other or are not known, a model that cannot be loaded,
                bitsandbytes missing.
            UnsupportedError: an argument that would give another model, and is not part of this version.
        """
        if not isinstance(model_name, str | os.PathLike):
            raise ConfigError(f"model_name={model_name!r}: use the name of a model on the Hub, or a folder.")
        model_name = resolve_latest(os.fspath(model_name))
        passed_on = arguments.resolve_kwargs(
            "from_pretrained",
            more,
            without_effect=arguments.LOADING_WITHOUT_EFFECT,
            refused=arguments.LOADING_REFUSED,
            passed_on=arguments.LOADING_PASSED_ON,
        )
        if device_map not in ("sequential", "auto", None):
            raise UnsupportedError(f"device_map={device_map!r} is not supported: a model is on one device.")
        if fast_inference:
            logger.warning(
                "fast_inference=True: completions are sampled in this process; vLLM is not part of this version."
            )
        kind = _precision(load_in_4bit, load_in_8bit, load_in_16bit, full_finetuning)
        wanted = passed_on.pop("torch_dtype", None) if dtype is None else dtype
        if wanted is None:
            wanted = torch.float32 if full_finetuning else device_dtype()
        dtype = parse_dtype(wanted)
        quantization = None
        if kind in ("nf4", "int8"):
            asked = "load_in_8bit=True" if kind == "int8" else f"load_in_4bit={load_in_4bit or 'True, the default,'}"
            quantization = quantization_config(kind, dtype, asked=asked)
        where = {name: value for name, value in (("token", token), ("revision", revision)) if value is not None}
        settings = {**where, **passed_on, "dtype": dtype}
        model, tokenizer = load_named(
            model_name,
            find_adapter(model_name, settings),
            settings,
            trust_remote_code=trust_remote_code,
            quantization_config=quantization,
        )
        if tokenizer is None:
            tokenizer = load_tokenizer(model, settings, trust_remote_code=trust_remote_code)
        tokenizer.padding_side = "left"
        _check_length(max_seq_length, context_length(model))
        if quantization is None and torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        checkpointing, offload = _checkpointing(use_gradient_checkpointing)
        options = LoadOptions(tokenizer, max_seq_length, checkpointing, offload, full_finetuning)
        set_load_options(model, options)
        return _with_methods(model), tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: str | Sequence[str] = (*ATTENTION_MODULES, *MLP_MODULES),
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        bias: Any = "none",
        layers_to_transform: Sequence[int] | int | None = None,
        use_gradient_checkpointing: bool | str = "unsloth",
        random_state: int = 3407,
        use_rslora: bool = False,
        modules_to_save: str | Sequence[str] | None = None,
        init_lora_weights: Any = True,
        finetune_last_n_layers: int | None = None,
        finetune_language_layers: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        **more: Any,
    ) -> Any:
        """The model with a fresh LoRA adapter; the same again for a model that has this adapter already.

        Args:
            model: from from_pretrained, or any causal language model of transformers.
            use_gradient_checkpointing: False; True: layers are computed again in backward; "unsloth": and their inputs
                wait in host memory until then. GRPOTrainer does so, unless its configuration says otherwise.
            random_state: seed of the adapter's first weights.
            finetune_last_n_layers: only the last so many layers get the adapter.
            more: use_dora and others of peft.LoraConfig; see docs/unsloth.md.

        Raises:
            ConfigError: the model has another adapter already, or none of its modules is named in target_modules.
        """
        _check_is_model(model, "get_peft_model")
        passed_on = arguments.resolve_kwargs(
            "get_peft_model",
            more,
            without_effect=arguments.ADAPTER_WITHOUT_EFFECT,
            refused=arguments.ADAPTER_REFUSED,
            passed_on=arguments.ADAPTER_PASSED_ON,
        )
        options = load_options(model)
        checkpointing, offload = _checkpointing(use_gradient_checkpointing)
        options = replace(options, checkpointing=checkpointing, offload=offload)
        if options.full_finetuning:
            logger.warning("get_peft_model: the model was loaded with full_finetuning=True and gets no adapter.")
            set_load_options(model, options)
            return model
        if isinstance(random_state, bool) or not isinstance(random_state, int):
            raise ConfigError(f"random_state={random_state!r}: the seed of the adapter must be a whole number.")
        if isinstance(modules_to_save, str):
            modules_to_save = [modules_to_save]
        if not finetune_language_layers:
            raise ConfigError("finetune_language_layers=False leaves nothing to train in a language model.")
        config = lora_config(
            r=r,
            target_modules=_modules(target_modules, attention=finetune_attention_modules, mlp=finetune_mlp_modules),
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            bias=bias,
            layers_to_transform=_layers(model, layers_to_transform, finetune_last_n_layers),
            use_rslora=use_rslora,
            modules_to_save=None if modules_to_save is None else list(modules_to_save),
            init_lora_weights=init_lora_weights,
            **passed_on,
        )
        if getattr(model, "peft_config", None):
            _check_same(model, config)
        else:
            if lora_dropout:
                logger.warning(
                    "lora_dropout=%s: dropout is off in rollouts and scoring, unless logprob_dropout=True is set in "
                    "GRPOConfig.",
                    lora_dropout,
                )
            # The numbers of the rest of the script stay what they are.
            with torch.random.fork_rng():
                torch.manual_seed(random_state)
                model = add_adapter(model, config)
        set_load_options(model, options)
        return _with_methods(model)

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Dropout and checkpointing off, for `model.generate`. `model.fast_generate` does not need it."""
        _check_is_model(model, "for_inference")
        set_evaluation_mode(model)
        return model

    @staticmethod
    def for_training(model: Any, use_gradient_checkpointing: bool | str = True) -> Any:
        """Undoes `for_inference`. GRPOTrainer does not need it."""
        _check_is_model(model, "for_training")
        options = load_options(model)
        checkpointing, offload = _checkpointing(use_gradient_checkpointing)
        offload = offload or (checkpointing and options.offload)
        set_load_options(model, replace(options, checkpointing=checkpointing, offload=offload))
        model.train()
        return model


def PatchFastRL(algorithm: str | None = None, FastLanguageModel: Any = None) -> None:
    """For scripts that call it: grupo patches nothing."""
    logger.warning("PatchFastRL: nothing is patched; import GRPOConfig and GRPOTrainer from grupo.")


def is_bfloat16_supported() -> bool:
    """Whether bfloat16 can be computed with; on the CPU it can, and GRPOConfig(bf16=True) says what it does there."""
    return supports_bfloat16()


def _with_methods(model: Any) -> Any:
    for name, function in METHODS.items():
        setattr(model, name, functools.partial(function, model))
    return model


def _precision(in_4bit: bool | None, in_8bit: bool, in_16bit: bool, full: bool) -> str:
    chosen = {"load_in_4bit": in_4bit, "load_in_8bit": in_8bit, "load_in_16bit": in_16bit, "full_finetuning": full}
    names = [name for name, value in chosen.items() if value]
    if len(names) > 1 and names != ["load_in_16bit", "full_finetuning"]:
        raise ConfigError(f"{' and '.join(f'{name}=True' for name in names)} exclude each other: set one of them.")
    if in_4bit or (in_4bit is None and not names):
        return "nf4"
    return "int8" if in_8bit else "dense"


def _check_length(wanted: int | None, context: int | None) -> None:
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 2):
        raise ConfigError(f"max_seq_length={wanted!r}: expected a number of tokens, prompt and completion together.")
    if wanted is not None and context is not None and wanted > context:
        raise UnsupportedError(
            f"max_seq_length={wanted} is more than the {context} tokens that the model was made for, and contexts are "
            f"not stretched in this version. Set it to {context} at most."
        )


def _checkpointing(wanted: bool | str | None) -> tuple[bool, bool]:
    """Whether layers are computed again, and whether their inputs wait in host memory."""
    if wanted not in (True, False, None, "unsloth", "true", "false"):
        raise ConfigError(f"use_gradient_checkpointing={wanted!r}: use 'unsloth', True or False.")
    return wanted not in (False, None, "false"), wanted == "unsloth"


def _modules(wanted: str | Sequence[str], *, attention: bool, mlp: bool) -> str | list[str]:
    left_out = (*(() if attention else ATTENTION_MODULES), *(() if mlp else MLP_MODULES))
    if isinstance(wanted, str):
        if left_out and wanted == "all-linear":
            wanted = [*ATTENTION_MODULES, *MLP_MODULES]
        elif left_out:
            raise ConfigError(
                "target_modules is a pattern, and finetune_attention_modules or finetune_mlp_modules is False beside "
                "it. Name the modules in target_modules instead."
            )
        else:
            return wanted
    modules = [name for name in wanted if name not in left_out]
    if not modules:
        raise ConfigError("finetune_attention_modules and finetune_mlp_modules leave nothing in target_modules.")
    return modules


def _layers(model: Any, wanted: Sequence[int] | int | None, last: int | None) -> list[int] | int | None:
    if last is None:
        return list(wanted) if isinstance(wanted, Sequence) else wanted
    if wanted is not None:
        raise ConfigError("layers_to_transform and finetune_last_n_layers say the same: set one of them.")
    count = base_model(model).config.get_text_config().num_hidden_layers
    if not 1 <= last <= count:
        raise ConfigError(f"finetune_last_n_layers={last}: the model has {pluralize(count, 'layer')}.")
    return list(range(count - last, count))


_COMPARED = (
    *("r", "target_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "modules_to_save"),
    *("layers_to_transform", "exclude_modules"),
)


def _check_same(model: Any, config: Any) -> None:
    """The adapter that the model has must be the one that is asked for.

    Raises:
        ConfigError: it is another one.
    """
    present = model.peft_config[model.active_adapter]
    differing = []
    for name in _COMPARED:
        has, wanted = (_plain(getattr(one, name, None)) for one in (present, config))
        if has != wanted and not (name == "target_modules" and isinstance(wanted, str)):
            differing.append(f"{name}={has!r}, not {wanted!r}")
    if differing:
        raise ConfigError(
            f"The model has an adapter already, with {'; '.join(differing)}. To train on with it, leave get_peft_model "
            "out, or call it with the same arguments; for another adapter, load the base model again, or merge this "
            "one by model.merge_and_unload()."
        )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | list | tuple) else value


def _check_is_model(model: Any, where: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{where} got {type(model).__name__}; pass the model, not the tokenizer.")
