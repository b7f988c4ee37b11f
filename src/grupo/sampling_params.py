"""vLLM's sampling parameters, as scripts write them, in the terms of `SamplingSpec`. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from grupo.errors import ConfigError, UnsupportedError
from grupo.utils.messages import did_you_mean


@dataclass(init=False)
class SamplingParams:
    """How completions are drawn, under vLLM's names and defaults, for scripts that would import it from there.

    What is here can be set, by name. The in-process engine has no other of vLLM's parameters: they may be there, with
    the values that ask for nothing.

    Raises:
        UnsupportedError: another of vLLM's parameters is set.
        ConfigError: there is no such parameter.
    """

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Share of probability that is kept, in (0, 1]."""
    top_k: int = -1
    """Number of most likely tokens that are kept; -1 and 0: all."""
    min_p: float = 0.0
    """Smallest probability that is kept, as a share of the largest; 0: all."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens already seen; 1: no penalty."""
    max_tokens: int | None = 16
    """Tokens of a completion at most, the stop token included."""
    seed: int | None = None
    """Of the random numbers; None: drawn from torch's generator."""
    stop: str | list[str] | None = None
    """Texts that end a completion; each must be one token of the tokenizer."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a completion, besides the model's own."""
    include_stop_str_in_output: bool = False
    """Without effect: the stop token is always among the token ids, and special tokens never in the text."""
    skip_special_tokens: bool = True
    """Without effect: as above."""
    detokenize: bool = True
    """Without effect: there is always a text."""

    def __init__(self, **settings: Any) -> None:
        names = [field.name for field in fields(self)]
        _check_others({name: value for name, value in settings.items() if name not in names})
        for name in names:
            setattr(self, name, settings.get(name, getattr(type(self), name)))


vLLMSamplingParams = SamplingParams
"""The name that scripts written for Unsloth use."""


@dataclass(frozen=True)
class SamplingOverrides:
    """What somebody set, and nothing that they left at its default."""

    settings: dict[str, Any] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty, in the terms of SamplingSpec."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_tokens_given: bool = False
    """Whether max_tokens was set; None then means as many as there is room for."""


_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_READ = (*_SETTINGS, "stop", "stop_token_ids", "seed", "n", "max_tokens")
_HARMLESS = (
    *("include_stop_str_in_output", "skip_special_tokens", "detokenize", "spaces_between_special_tokens"),
    *("output_kind", "output_text_buffer_length", "skip_clone", "stream_interval", "skip_reading_prefix_cache"),
    *("flat_logprobs", "routed_experts_prompt_start"),
)
"""About how vLLM hands completions over; the completions are the same."""
_ABSENT: dict[str, Any] = {
    name: nothing
    for nothing, names in (
        (0, ("presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")),
        ([], ("bad_words", "logits_processors", "allowed_token_ids", "trace_decode_token_ids")),
        ({}, ("logit_bias", "extra_args")),
        (None, ("logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")),
        (None, ("logprob_token_ids", "structured_outputs", "guided_decoding", "truncate_prompt_tokens")),
        (None, ("thinking_token_budget", "repetition_detection", "watermarking", "best_of")),
    )
    for name in names
}
"""vLLM's other parameters (0.32, and some of earlier versions) -> the value that asks for nothing, as None does."""


def _check_others(settings: Mapping[str, Any]) -> None:
    """Of parameters that are not read.

    Raises:
        UnsupportedError: one asks for something.
        ConfigError: neither vLLM nor the in-process engine has it.
    """
    known = (*_READ, *_HARMLESS, *_ABSENT)
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(
                f"There is no sampling parameter {name!r}.{did_you_mean(name, known)} The in-process engine has "
                f"{', '.join(_READ)}."
            )
        if name in _ABSENT and not (value is None or _equal(value, _ABSENT[name])):
            raise UnsupportedError(
                f"Sampling parameter {name}={value!r}: the in-process engine does not have it. It has "
                f"{', '.join(_READ)}. Leave it out."
            )


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except ValueError:  # an array
        return False


def requested_sampling(params: Any) -> SamplingOverrides:
    """Reads `SamplingParams` of ours or of vLLM, which need not be installed, or a dict with such keys.

    Raises:
        UnsupportedError: something is set that the in-process engine does not have.
        ConfigError: this is no such object, or has a parameter that nobody knows.
    """
    changed = _changed(params)
    _check_others({name: value for name, value in changed.items() if name not in _READ})
    if changed.get("n", 1) is not None and changed.get("n", 1) < 1:
        raise ConfigError(f"n={changed['n']!r}: at least 1 completion of each prompt can be asked for.")
    settings = {name: changed[name] for name in _SETTINGS if name in changed}
    if settings.get("top_k") == -1:
        settings["top_k"] = 0
    stop = changed.get("stop") or ()
    return SamplingOverrides(
        settings=settings,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(changed.get("stop_token_ids") or ()),
        seed=changed.get("seed"),
        n=changed.get("n"),
        max_tokens=changed.get("max_tokens"),
        max_tokens_given="max_tokens" in changed,
    )


def _changed(params: Any) -> dict[str, Any]:
    """What is set away from its default."""
    if isinstance(params, Mapping):
        return dict(params)
    # vLLM's are structs of msgspec, ours a dataclass.
    names = getattr(params, "__struct_fields__", None) or getattr(params, "__dataclass_fields__", None)
    if names is None or not {"temperature", "top_p", "max_tokens"} <= set(names):
        raise ConfigError(
            f"Sampling parameters are {type(params).__name__}; they must be a SamplingParams, of grupo or of vLLM, or "
            'a dict such as {"temperature": 0.8, "max_tokens": 64}.'
        )
    default = type(params)()
    public = [name for name in names if not name.startswith("_")]
    pairs = {name: (getattr(params, name), getattr(default, name)) for name in public}
    return {name: value for name, (value, usual) in pairs.items() if not _equal(value, usual)}
