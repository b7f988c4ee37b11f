"""Names of earlier versions of TRL, transformers and grupo, and of Unsloth, translated to fields of GRPOConfig."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from grupo.config.field_support import refuse_unsupported
from grupo.errors import ConfigError, UnsupportedError
from grupo.sampling import sampling_overrides
from grupo.utils.messages import did_you_mean

logger = logging.getLogger("grupo")

RENAMED_FIELDS: dict[str, str] = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "scoring_dropout": "logprob_dropout",
}
"""Former name -> current name, with the same meaning of the value."""

IGNORED_FIELDS: dict[str, str] = {
    "overwrite_output_dir": "nothing in output_dir is deleted; train(resume_from_checkpoint=True) resumes a run",
    "logging_dir": "TensorBoard files are written to output_dir/runs, or to $TENSORBOARD_LOGGING_DIR",
    "save_safetensors": "weights are always saved as safetensors",
    "unsloth_num_chunks": "log-probs are always computed in chunks, with the same result",
    "unsloth_grpo_mini_batch": "gradients do not depend on micro-batches; micro_batch_tokens limits their memory",
    "unsloth_logit_chunk_multiplier": "log-probs are always computed in chunks, with the same result",
}
"""Former name -> what replaces it. Any value is accepted, with one log line."""

DROPPED_FIELDS: dict[str, str] = {
    "group_by_length": "prompts are drawn by the prompt stream, not by length",
    "vllm_device": "vLLM is not supported in this version",
    "vllm_dtype": "vLLM is not supported in this version",
    "vllm_enable_prefix_caching": "vLLM is not supported in this version",
}
"""Former name -> why setting it is an error. None, False and 0 are accepted with one log line."""


def translate_old_names(keywords: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of GRPOConfig under current names, with one log line per old name.

    Raises:
        ConfigError: the name never existed, or contradicts another keyword.
        UnsupportedError: the value of an old name asks for something that this version does not have.
    """
    translated = {name: value for name, value in keywords.items() if name in defaults}
    for name, value in keywords.items():
        if name in defaults:
            continue
        if name in RENAMED_FIELDS:
            _rename(name, value, translated, defaults)
        elif name in IGNORED_FIELDS:
            logger.warning("%s=%r no longer has an effect: %s.", name, value, IGNORED_FIELDS[name])
        elif name in DROPPED_FIELDS:
            if value:
                raise UnsupportedError(f"{name}={value!r} is not supported: {DROPPED_FIELDS[name]}.")
            logger.warning("%s=%r has no effect: %s.", name, value, DROPPED_FIELDS[name])
        elif name not in COMPOUND_FIELDS:
            hint = did_you_mean(name, defaults) or " docs/config.md lists all fields."
            raise ConfigError(f"GRPOConfig has no field {name!r}.{hint}")
    # Last, because they are compared with the fields.
    for name, expand in COMPOUND_FIELDS.items():
        if keywords.get(name) is not None:
            expand(keywords[name], translated, defaults)
    return translated


def _rename(old: str, value: Any, translated: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    new = RENAMED_FIELDS[old]
    if value is not None and value != defaults[new]:
        refuse_unsupported(new, value, defaults[new], label=f"{old} (now {new})")
    if old == "warmup_ratio" and isinstance(value, numbers.Real) and not 0 <= float(value) < 1:
        raise ConfigError(
            f"warmup_ratio={value!r}: a share of all optimizer steps must be at least 0 and below 1. For a number of "
            "steps, set warmup_steps."
        )
    if value is not None:
        current = translated.get(new, defaults[new])
        if current not in (defaults[new], value):
            raise ConfigError(
                f"{old}={value!r} and {new}={current!r} are the same setting: keep {new} and remove {old}."
            )
        translated[new] = value
    logger.warning("%s is now called %s: %s=%r.", old, new, new, translated.get(new, defaults[new]))


def _expand_max_seq_length(total: Any, fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Sets max_prompt_length from the tokens of prompt and completion together."""
    if isinstance(total, bool) or not isinstance(total, int):
        raise ConfigError(f"max_seq_length={total!r}: expected a number of tokens, prompt and completion together.")
    completion = fields.get("max_completion_length", defaults["max_completion_length"])
    prompt = fields.get("max_prompt_length")
    room = total - completion
    if room < 1:
        raise ConfigError(
            f"max_seq_length={total} leaves no room for a prompt with max_completion_length={completion}. Set "
            f"max_seq_length above {completion}, or reduce max_completion_length."
        )
    if prompt is not None and prompt > room:
        raise ConfigError(
            f"max_seq_length={total} is less than max_prompt_length={prompt} plus max_completion_length={completion}. "
            f"Set max_prompt_length={room}, or remove max_seq_length."
        )
    if prompt is None:
        fields["max_prompt_length"] = room
    logger.warning(
        "max_seq_length=%d is the length of prompt and completion together: max_prompt_length=%d with "
        "max_completion_length=%d.",
        total,
        fields["max_prompt_length"],
        completion,
    )


def _expand_sampling_params(params: Any, fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Sets the sampling fields from SamplingParams of vLLM or grupo."""
    overrides = sampling_overrides(params)
    for own, name, value in (
        ("n", "num_generations", overrides.n),
        ("max_tokens", "max_completion_length", overrides.max_tokens),
    ):
        current = fields.get(name, defaults[name])
        if value is not None and value != current:
            raise ConfigError(
                f"vllm_sampling_params has {own}={value}, but {name}={current} is that setting here. Set "
                f"{name}={value} and leave out {own}."
            )
    for name, value in overrides.settings.items():
        current = fields.get(name, defaults[name])
        if current not in (defaults[name], value):
            raise ConfigError(
                f"{name}={current!r} and vllm_sampling_params with {name}={value!r} contradict each other: set only "
                "one of them."
            )
        fields[name] = value
    stops = {"stop": list(overrides.stop), "stop_token_ids": list(overrides.stop_token_ids)}
    stops = {key: value for key, value in stops.items() if value}
    if stops:
        given = fields.get("generation_kwargs") or {}
        if not isinstance(given, Mapping) or any(given.get(key, value) != value for key, value in stops.items()):
            raise ConfigError(
                f"vllm_sampling_params has {stops}, but generation_kwargs={given!r} is also set. Put both into "
                "generation_kwargs, a dict, and leave out vllm_sampling_params."
            )
        fields["generation_kwargs"] = {**given, **stops}
    set_here = ", ".join(f"{key}={value!r}" for key, value in {**overrides.settings, **stops}.items()) or "nothing"
    seed = "" if overrides.seed is None else " Its seed is not used: the seed of each completion is derived from seed."
    logger.warning("vllm_sampling_params sets %s.%s", set_here, seed)


COMPOUND_FIELDS: dict[str, Callable[[Any, dict[str, Any], Mapping[str, Any]], None]] = {
    "vllm_sampling_params": _expand_sampling_params,
    "max_seq_length": _expand_max_seq_length,
}
"""Name in Unsloth -> the function that sets the fields with its meaning. Contradictions are errors."""
