"""How tokens are drawn: the resolved sampling settings that every engine reads. Imports no torch."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from grupo.errors import ConfigError


@dataclass(frozen=True)
class SamplingSpec:
    """One way of drawing completions. Raises ConfigError where a number is outside its range."""

    temperature: float = 1.0
    """Divides the logits. 0 is greedy decoding: for evaluation, never for training."""
    top_p: float = 1.0
    """Share of probability that is kept, in (0, 1]; 1 keeps every token."""
    top_k: int = 0
    """Number of most likely tokens that are kept; 0 keeps every token."""
    min_p: float | None = None
    """Smallest probability that is kept, as a share of the most likely token's, in [0, 1]; None keeps every token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already seen; 1 changes nothing."""
    max_new_tokens: int = 512
    """Tokens of a completion at most, the stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, besides the model's own end-of-sequence ids."""

    def __post_init__(self) -> None:
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            f"temperature={self.temperature!r}: it divides the logits and must be a finite number of at least 0",
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            f"top_p={self.top_p!r}: the share of probability to keep must be above 0 and at most 1 (1 keeps all)",
        )
        _require(
            _is_count(self.top_k) and self.top_k >= 0,
            f"top_k={self.top_k!r}: the number of tokens to keep must be a whole number of at least 0 (0 keeps all)",
        )
        _require(
            self.min_p is None or (_is_number(self.min_p) and 0 <= self.min_p <= 1),
            f"min_p={self.min_p!r}: a share of the largest probability must be between 0 and 1 (None keeps all)",
        )
        _require(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty={self.repetition_penalty!r}: it divides logits and must be above 0 (1: no penalty)",
        )
        _require(
            _is_count(self.max_new_tokens) and self.max_new_tokens >= 1,
            f"max_new_tokens={self.max_new_tokens!r}: a completion needs room for at least 1 token",
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
