"""Fields of Unsloth's GRPOConfig that several fields here say together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from grupo.errors import ConfigError
from grupo.sampling_params import requested_sampling

logger = logging.getLogger("grupo")


def translate_compound(name: str, value: Any, fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Sets in `fields`, the keywords of GRPOConfig, what `name` means; says so in one line.

    Raises:
        ConfigError: it contradicts another keyword, or asks for what the engine does not have.
    """
    if name == "max_seq_length":
        _prompt_budget(value, fields, defaults)
    else:
        assert name == "vllm_sampling_params"
        _sampling(value, fields, defaults)


def _prompt_budget(total: Any, fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Tokens of prompt and completion together."""
    if isinstance(total, bool) or not isinstance(total, int):
        raise ConfigError(f"max_seq_length={total!r}: expected a number of tokens, prompt and completion together.")
    completion = fields.get("max_completion_length", defaults["max_completion_length"])
    prompt = fields.get("max_prompt_length")
    room = total - completion
    if room < 1:
        raise ConfigError(
            f"max_seq_length={total} leaves no room for a prompt beside max_completion_length={completion}. Set "
            f"max_seq_length above {completion}, or max_completion_length lower."
        )
    if prompt is not None and prompt > room:
        raise ConfigError(
            f"max_seq_length={total} is less than max_prompt_length={prompt} and max_completion_length={completion} "
            f"together. Set max_prompt_length={room}, or remove max_seq_length."
        )
    if prompt is None:
        fields["max_prompt_length"] = room
    logger.warning(
        "max_seq_length=%d: prompt and completion together; max_prompt_length=%d beside max_completion_length=%d.",
        total,
        fields["max_prompt_length"],
        completion,
    )


def _sampling(params: Any, fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    requested = requested_sampling(params)
    for own, name, value in (
        ("n", "num_generations", requested.n),
        ("max_tokens", "max_completion_length", requested.max_tokens),
    ):
        current = fields.get(name, defaults[name])
        if value is not None and value != current:
            raise ConfigError(
                f"vllm_sampling_params has {own}={value}, and {name}={current} says the same here. Set {name}={value}, "
                f"and leave {own} out."
            )
    for name, value in requested.settings.items():
        _set(name, value, fields, defaults)
    more = {"stop": list(requested.stop), "stop_token_ids": list(requested.stop_token_ids)}
    more = {key: value for key, value in more.items() if value}
    if more:
        given = fields.get("generation_kwargs") or {}
        if not isinstance(given, Mapping) or any(given.get(key, value) != value for key, value in more.items()):
            raise ConfigError(
                f"vllm_sampling_params has {more}, and generation_kwargs={given!r} was set beside it. Put both into "
                "generation_kwargs, a dict, and leave vllm_sampling_params out."
            )
        fields["generation_kwargs"] = {**given, **more}
    set_here = ", ".join(f"{key}={value!r}" for key, value in {**requested.settings, **more}.items()) or "nothing"
    seed = "" if requested.seed is None else " Its seed is not used: each completion has one of its own, from seed."
    logger.warning("vllm_sampling_params: taken over as %s.%s", set_here, seed)


def _set(name: str, value: Any, fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    current = fields.get(name, defaults[name])
    if current not in (defaults[name], value):
        raise ConfigError(
            f"{name}={current!r} and vllm_sampling_params with {name}={value!r} contradict each other: set one of them."
        )
    fields[name] = value
