"""GRPOConfig: every setting of a run, checked on construction, before any model is loaded.

The fields keep the values that the user set. What follows from several of them is a method or a `resolved_` property
here (loss, advantages, sampling), or a StepPlan (batches).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils.import_utils import is_bitsandbytes_available, is_torch_bf16_gpu_available

from grupo.algo.advantages import AdvantageSettings
from grupo.algo.terms import LossSettings
from grupo.chat_templates import check_template_name
from grupo.config import constraints, generation, validation
from grupo.config.batch_plan import StepPlan
from grupo.config.field_support import defaults_of
from grupo.config.fields import GRPOFields
from grupo.config.optimizer import check_optimizer_arguments, check_schedule
from grupo.config.renames import translate_old_names
from grupo.config.validation import logger
from grupo.errors import ConfigError
from grupo.sampling import SamplingSpec

_BITSANDBYTES_ADAMW = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")

Settings = TypeVar("Settings", LossSettings, AdvantageSettings)
ConfigClass = TypeVar("ConfigClass", bound="type[GRPOFields]")


def accept_renamed_fields(config_class: ConfigClass) -> ConfigClass:
    """Wraps the generated __init__ so that it translates old names and remembers which fields were passed."""
    generated = config_class.__init__

    @functools.wraps(generated)
    def __init__(self: GRPOConfig, output_dir: str | None = None, **keywords: Any) -> None:
        defaults = defaults_of(GRPOConfig)
        passed = {"output_dir": output_dir, **keywords} if output_dir is not None else keywords
        translated = translate_old_names(passed, defaults)
        # dataclasses.replace, HfArgumentParser and to_dict() pass every field: then only changed values are explicit.
        passes_all = defaults.keys() - {"output_dir"} <= translated.keys()
        self._explicit_fields = frozenset(
            name for name, value in translated.items() if not passes_all or value != defaults[name]
        )
        generated(self, **translated)

    config_class.__init__ = __init__  # type: ignore[method-assign, assignment]
    return config_class


@accept_renamed_fields
@dataclass
class GRPOConfig(GRPOFields):
    """Settings of a GRPO run; the fields are those of `GRPOFields`.

    Raises ConfigError for settings and combinations that cannot work or have no effect, and UnsupportedError (a
    ConfigError) for those without an implementation in this version. Names of older versions are translated, with one
    log line each.
    """

    def __post_init__(self) -> None:
        self._normalise()
        constraints.check_choices(vars(self))
        validation.check_unsupported_fields(self)
        validation.check_launcher()
        types = constraints.simple_field_types(type(self))
        constraints.check_types(vars(self), types)
        check_template_name(self.chat_template)
        constraints.check_ranges(vars(self), types)
        validation.check_reward_weights(self.reward_weights)
        validation.check_unused_fields(self)
        validation.check_conflicts(self, self.explicit_fields)
        self._resolve_checkpointing()
        self._resolve_precision()
        self._resolve_optimizer()
        self._resolve_best_metric()
        pin_memory = self.dataloader_pin_memory
        try:
            super().__post_init__()  # type: ignore[no-untyped-call]
        except (ValueError, ImportError) as error:  # the checks of the base class, with its messages
            raise ConfigError(" ".join(str(error).split())) from error
        # The base class changes it on the CPU, and a copy of this config would refuse the changed value.
        self.dataloader_pin_memory = pin_memory
        validation.check_accelerator_config(vars(self.accelerator_config), vars(AcceleratorConfig()))
        validation.check_trackers(self.report_to or [])
        check_schedule(self)
        check_optimizer_arguments(self)
        if self.sampling_spec().is_greedy:
            raise ConfigError(
                "generation_kwargs: temperature 0 is greedy decoding, so all completions would be the same."
            )
        validation.check_trained_subset(self, StepPlan.from_config(self, num_prompts=None))
        validation.warn_unusual(self)

    @property
    def explicit_fields(self) -> frozenset[str]:
        """Names of the fields that the user set."""
        return self._explicit_fields

    # ---- settings that follow from several fields ----

    def sampling_spec(self) -> SamplingSpec:
        """Sampling settings of training: the sampling fields, updated by generation_kwargs."""
        return SamplingSpec(max_new_tokens=self.max_completion_length, **generation.sampling_settings(self))

    def loss_settings(self) -> LossSettings:
        return self._slice(LossSettings)

    def advantage_settings(self) -> AdvantageSettings:
        return self._slice(AdvantageSettings)

    def _slice(self, settings_class: type[Settings]) -> Settings:
        """The fields of this config that `settings_class` has."""
        return settings_class(**{field.name: getattr(self, field.name) for field in dataclasses.fields(settings_class)})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a completion, in addition to the stop token ids and the end tokens of the model."""
        return generation.stop_strings(self)

    @property
    def training_temperature(self) -> float:
        """Divisor of the logits when log-probs are computed: the temperature of sampling."""
        return self.sampling_spec().temperature

    @property
    def resolved_num_generations_eval(self) -> int:
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval

    @property
    def resolved_pad_to_multiple_of(self) -> int | None:
        """Multiple of tokens to pad to; None: batches are padded to their longest row."""
        if self.pad_to_multiple_of == "auto":
            # Neuron compiles once per shape.
            return 128 if self.device.type == "neuron" else None
        return None if self.pad_to_multiple_of is None else int(self.pad_to_multiple_of)

    @property
    def resolved_data_seed(self) -> int:
        """Seed of the prompt order."""
        return self.seed if self.data_seed is None else self.data_seed

    # ---- steps of __post_init__ ----

    def _normalise(self) -> None:
        if "_explicit_fields" not in self.__dict__:  # a derived dataclass has an __init__ of its own
            defaults = defaults_of(type(self))
            self._explicit_fields = frozenset(name for name in defaults if getattr(self, name) != defaults[name])
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"
        weights: Any = self.reward_weights
        if hasattr(weights, "tolist"):  # an array or a tensor
            self.reward_weights = weights.tolist()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of != "auto":
            self.pad_to_multiple_of = _parse_multiple(self.pad_to_multiple_of)
        if isinstance(self.pad_to_multiple_of, int) and self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of={self.pad_to_multiple_of}: must be at least 1, None, or 'auto'.")

    def _resolve_checkpointing(self) -> None:
        """Gives both names one value; the base class would silently prefer the newer name."""
        for old, new in (
            ("gradient_checkpointing", "activation_checkpointing"),
            ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        ):
            values = [value for value in (getattr(self, old), getattr(self, new)) if value is not None]
            if len(values) == 2 and values[0] != values[1]:
                raise ConfigError(
                    f"{old}={values[0]!r} and {new}={values[1]!r} are two names of one setting: set only one of them, "
                    "or both to the same value."
                )
            value = values[0] if values else (None if old.endswith("kwargs") else True)
            setattr(self, old, value)
            setattr(self, new, value)

    def _resolve_precision(self) -> None:
        on_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.fp16 and on_cpu:
            raise ConfigError(
                "fp16=True needs an accelerator, but this run uses the CPU. Leave fp16 and bf16 unset for float32, or "
                "set bf16=True and use_cpu=True."
            )
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not on_cpu and is_torch_bf16_gpu_available()
            if not self.bf16 and not self.fp16 and not on_cpu:
                logger.warning(
                    "This accelerator does not support bfloat16: training in float32. Alternatively, set fp16=True."
                )
        elif self.bf16 and on_cpu and not self.use_cpu:
            logger.warning(
                "bf16=True: no accelerator was found, so this run uses float32. For bfloat16 on the CPU, also set "
                "use_cpu=True."
            )
            self.bf16 = False

    def _resolve_optimizer(self) -> None:
        """8-bit AdamW needs bitsandbytes; the base class would check for it only in train()."""
        name = str(getattr(self.optim, "value", self.optim))
        if name.endswith("_layerwise") or name in ("lomo", "adalomo"):
            raise ConfigError(
                f"optim={name!r} updates weights during the backward pass, so gradients can be neither accumulated nor "
                "skipped when they are not finite. Choose an optimizer that updates after the backward pass."
            )
        if name in _BITSANDBYTES_ADAMW and not is_bitsandbytes_available():
            logger.warning(
                "optim=%r needs bitsandbytes, which is not installed: using 32-bit AdamW (%s) instead. For 8 bits, pip "
                "install bitsandbytes.",
                name,
                TrainingArguments.default_optim,
            )
            self.optim = TrainingArguments.default_optim

    def _resolve_best_metric(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            logger.warning(
                "load_best_model_at_end: metric_for_best_model is not set, so the best checkpoint is the one with the "
                "highest evaluation reward."
            )
            self.metric_for_best_model = "reward"


def _parse_multiple(text: str) -> int | None:
    if text.lower() in ("none", "null"):
        return None
    if not text.isdigit():
        raise ConfigError(f"pad_to_multiple_of={text!r}: expected a number of tokens, None, or 'auto'.")
    return int(text)
