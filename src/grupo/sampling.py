"""`SamplingSpec`, which every engine reads, and vLLM's `SamplingParams`. Imports neither torch nor vLLM."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from grupo.errors import ConfigError, UnsupportedError
from grupo.utils.messages import did_you_mean

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings that GRPOConfig, `SamplingSpec` and `SamplingParams` have in common."""


@dataclass(frozen=True)
class SamplingSpec:
    """Resolved sampling settings of one rollout. Raises ConfigError for a value outside its range."""

    temperature: float = 1.0
    """Divisor of the logits; 0: greedy decoding, for evaluation but not for training."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens to keep, in (0, 1]; 1: all tokens."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0: all tokens."""
    min_p: float | None = None
    """Minimum probability relative to the most likely token, in [0, 1]; None: all tokens."""
    repetition_penalty: float = 1.0
    """Divisor of positive and factor of negative logits of tokens already in the sequence; 1: no penalty."""
    max_new_tokens: int = 512
    """Maximum length of a completion in tokens, including the stop token."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to the end-of-sequence ids of the model."""

    def __post_init__(self) -> None:
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            f"temperature={self.temperature!r}: it divides the logits and must be a finite number, at least 0",
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            f"top_p={self.top_p!r}: the cumulative probability to keep must be above 0 and at most 1 (1 keeps all "
            "tokens)",
        )
        _require(
            _is_count(self.top_k) and self.top_k >= 0,
            f"top_k={self.top_k!r}: the number of tokens to keep must be a whole number, at least 0 (0 keeps all "
            "tokens)",
        )
        _require(
            self.min_p is None or (_is_number(self.min_p) and 0 <= self.min_p <= 1),
            f"min_p={self.min_p!r}: a share of the largest probability must be between 0 and 1 (None keeps all tokens)",
        )
        _require(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty={self.repetition_penalty!r}: it divides logits and must be above 0 (1 is no penalty)",
        )
        _require(
            _is_count(self.max_new_tokens) and self.max_new_tokens >= 1,
            f"max_new_tokens={self.max_new_tokens!r}: a completion needs at least 1 token",
        )
        _require(
            isinstance(self.stop_token_ids, tuple) and all(_is_count(i) and i >= 0 for i in self.stop_token_ids),
            f"stop_token_ids={self.stop_token_ids!r}: expected a tuple of token ids",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence + ".")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclass(init=False)
class SamplingParams:
    """Sampling parameters with vLLM's names and defaults, for scripts that would import them from vLLM.

    The fields can be set by keyword. vLLM's other parameters are accepted only with a value that has no effect.

    Raises:
        UnsupportedError: another parameter of vLLM is set.
        ConfigError: neither vLLM nor grupo has this parameter.
    """

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """Divisor of the logits; 0: greedy decoding."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens to keep, in (0, 1]."""
    top_k: int = -1
    """Number of most likely tokens to keep; -1 and 0: all."""
    min_p: float = 0.0
    """Minimum probability relative to the most likely token; 0: all tokens."""
    repetition_penalty: float = 1.0
    """Penalty on the logits of tokens already in the sequence; 1: none."""
    max_tokens: int | None = 16
    """Maximum length of a completion in tokens, including the stop token."""
    seed: int | None = None
    """Seed of the random numbers; None: drawn from torch's generator."""
    stop: str | list[str] | None = None
    """Strings that end a completion; each must be one token of the tokenizer."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a completion, in addition to those of the model."""
    include_stop_str_in_output: bool = False
    """No effect: token ids always include the stop token, and the text never includes special tokens."""
    skip_special_tokens: bool = True
    """No effect: special tokens are always skipped."""
    detokenize: bool = True
    """No effect: there is always a text."""

    def __init__(self, **settings: Any) -> None:
        names = [field.name for field in fields(self)]
        _check_others({name: value for name, value in settings.items() if name not in names})
        for name in names:
            setattr(self, name, settings.get(name, getattr(type(self), name)))


vLLMSamplingParams = SamplingParams
"""Name in scripts for Unsloth."""


@dataclass(frozen=True)
class SamplingOverrides:
    """The sampling parameters that were set, without those at their default."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Values of `SAMPLING_FIELDS`, with the meaning that they have in `SamplingSpec`."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_tokens_given: bool = False
    """Whether max_tokens was set; None then means up to the context length."""


_SUPPORTED = (*SAMPLING_FIELDS, "stop", "stop_token_ids", "seed", "n", "max_tokens")
_HARMLESS = (
    *("include_stop_str_in_output", "skip_special_tokens", "detokenize", "spaces_between_special_tokens"),
    *("output_kind", "output_text_buffer_length", "skip_clone", "stream_interval", "skip_reading_prefix_cache"),
    *("flat_logprobs", "routed_experts_prompt_start"),
)
"""vLLM parameters about the output format; the completions are the same."""
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
"""Other parameters of vLLM (0.32, and some of earlier versions) -> the value without effect, besides None."""


def _check_others(settings: Mapping[str, Any]) -> None:
    """Checks parameters that the in-process engine does not have.

    Raises:
        UnsupportedError: one has a value with an effect.
        ConfigError: vLLM does not have one either.
    """
    known = (*_SUPPORTED, *_HARMLESS, *_ABSENT)
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(
                f"There is no sampling parameter {name!r}.{did_you_mean(name, known)} The in-process engine supports "
                f"{', '.join(_SUPPORTED)}."
            )
        if name in _ABSENT and not (value is None or _equal(value, _ABSENT[name])):
            raise UnsupportedError(
                f"Sampling parameter {name}={value!r}: the in-process engine does not support it. It supports "
                f"{', '.join(_SUPPORTED)}. Leave it out."
            )


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except ValueError:  # an array
        return False


def sampling_overrides(params: Any) -> SamplingOverrides:
    """Reads `SamplingParams` of grupo or of vLLM, which need not be installed, or a dict with such keys.

    Raises:
        UnsupportedError: a parameter is set that the in-process engine does not have.
        ConfigError: another kind of object, an unknown parameter, or n below 1.
    """
    changed = _changed(params)
    _check_others({name: value for name, value in changed.items() if name not in _SUPPORTED})
    if changed.get("n", 1) is not None and changed.get("n", 1) < 1:
        raise ConfigError(f"n={changed['n']!r}: the number of completions per prompt must be at least 1.")
    settings = {name: changed[name] for name in SAMPLING_FIELDS if name in changed}
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
    """Parameters with a value other than their default."""
    if isinstance(params, Mapping):
        return dict(params)
    # vLLM has msgspec structs, grupo a dataclass.
    names = getattr(params, "__struct_fields__", None) or getattr(params, "__dataclass_fields__", None)
    if names is None or not {"temperature", "top_p", "max_tokens"} <= set(names):
        raise ConfigError(
            f"Sampling parameters are {type(params).__name__}; they must be SamplingParams of grupo or of vLLM, or a "
            'dict such as {"temperature": 0.8, "max_tokens": 64}.'
        )
    default = type(params)()
    public = [name for name in names if not name.startswith("_")]
    pairs = {name: (getattr(params, name), getattr(default, name)) for name in public}
    return {name: value for name, (value, usual) in pairs.items() if not _equal(value, usual)}
