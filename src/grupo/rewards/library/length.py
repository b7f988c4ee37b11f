"""Rewards for the number or repetition of tokens. The stop token counts: it is sampled and trained."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.value_range import checked_range
from grupo.rewards.verifiers.base import keyword_signature
from grupo.rewards.verifiers.math import TRL_EXTRACTION, MathVerifier

TokenIds = Sequence[Sequence[int]]


class TokenLength:
    """See `token_length`."""

    def __init__(self, target: int, scale: float) -> None:
        if target < 0 or not (math.isfinite(scale) and scale > 0):
            raise ConfigError(
                f"token_length(target={target}, scale={scale}) has no optimum: set target, a number of tokens, to 0 "
                "or more, and scale, the reward lost for each token too many or too few, above 0."
            )
        self.__name__ = "token_length"
        self.value_range = (-math.inf, 0.0)
        self.target = target
        self.scale = scale

    def __call__(self, completion_ids: TokenIds, **columns: Any) -> list[float]:
        return [-self.scale * abs(self.target - len(ids)) + 0.0 for ids in completion_ids]


class SoftOverlongPunishment:
    """See `get_soft_overlong_punishment`."""

    def __init__(self, max_completion_len: int, soft_punish_cache: int) -> None:
        if max_completion_len <= 0 or not 0 <= soft_punish_cache <= max_completion_len:
            raise ConfigError(
                f"max_completion_len={max_completion_len}, soft_punish_cache={soft_punish_cache} describe no interval: "
                "the cache is the last part of the maximum, so set 0 <= soft_punish_cache <= max_completion_len."
            )
        self.__name__ = "soft_overlong_punishment_reward"
        self.value_range = (-1.0, 0.0)
        self.max_completion_len = max_completion_len
        self.soft_punish_cache = soft_punish_cache

    def __call__(self, completion_ids: TokenIds, **columns: Any) -> list[float]:
        return [self.punishment(len(ids)) for ids in completion_ids]

    def punishment(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return -1.0 if length > self.max_completion_len else (free - length) / self.soft_punish_cache


class CosineScaled:
    """See `get_cosine_scaled_reward`."""

    def __init__(
        self,
        max_len: int,
        min_value_wrong: float,
        max_value_wrong: float,
        min_value_correct: float,
        max_value_correct: float,
        gold_column: str,
    ) -> None:
        if max_len <= 0:
            raise ConfigError(f"max_len={max_len} leaves no schedule: set the length, in tokens, at which it ends.")
        self.__name__ = "cosine_scaled_reward"
        self.value_range = checked_range(
            self.__name__,
            min_value_wrong=min_value_wrong,
            max_value_wrong=max_value_wrong,
            min_value_correct=min_value_correct,
            max_value_correct=max_value_correct,
        )
        self.max_len = max_len
        # Rewards (at length 0, at max_len): short is best when right, and worst when wrong.
        self.right = (max_value_correct, min_value_correct)
        self.wrong = (min_value_wrong, max_value_wrong)
        self.verifier = MathVerifier(gold_column, TRL_EXTRACTION, name=self.__name__)
        named = keyword_signature("completions", gold_column, "completion_ids").parameters.values()
        self.__signature__ = inspect.Signature(
            [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in named]
        )

    def __call__(self, *arguments: Any, **columns: Any) -> list[float | None]:
        """Takes completions, gold answers and token ids by keyword or, as in TRL, in this order."""
        given = self.__signature__.bind(*arguments, **columns).arguments
        gold_column = self.verifier.gold_column
        verdicts = self.verifier(given["completions"], **{gold_column: given[gold_column]})
        scores: list[float | None] = []
        for verdict, ids in zip(verdicts, given["completion_ids"], strict=True):
            undecided = verdict.decision == "undecided"
            scores.append(None if undecided else self.scaled(verdict.decision == "right", len(ids)))
        return scores

    def scaled(self, is_correct: bool, length: int) -> float:
        start, end = self.right if is_correct else self.wrong
        progress = min(length / self.max_len, 1.0)
        return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress))


class RepetitionPenalty:
    """See `get_repetition_penalty_reward`."""

    def __init__(self, ngram_size: int, max_penalty: float) -> None:
        if ngram_size < 1 or not -math.inf < max_penalty <= 0:
            raise ConfigError(
                f"ngram_size={ngram_size}, max_penalty={max_penalty} penalise nothing: set ngram_size to at least 1 "
                "token and max_penalty to 0 or below."
            )
        self.__name__ = "repetition_penalty_reward"
        self.value_range = (float(max_penalty), 0.0)
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty

    def __call__(self, completion_ids: TokenIds, **columns: Any) -> list[float]:
        return [self.penalty(tuple(ids)) for ids in completion_ids]

    def penalty(self, ids: tuple[int, ...]) -> float:
        total = len(ids) - self.ngram_size + 1
        if total <= 0:
            return 0.0
        different = len({ids[start : start + self.ngram_size] for start in range(total)})
        return (1 - different / total) * self.max_penalty + 0.0


def token_length(target: int, scale: float = 1.0) -> TokenLength:
    """-scale · |target - tokens of the completion|, the stop token included; best 0 at exactly `target` tokens."""
    return TokenLength(target, scale)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """Equation 13 of the DAPO paper (arXiv 2503.14476): 0 up to max_completion_len - soft_punish_cache tokens, falling
    linearly to -1 at max_completion_len, -1 beyond."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    gold_column: str = "solution",
) -> CosineScaled:
    """Accuracy shaped by length (arXiv 2502.03373, appendix C.1): right answers fall from `max_value_correct` at
    length 0 to `min_value_correct` at `max_len` tokens and beyond, wrong ones rise from `min_value_wrong` to
    `max_value_wrong`.

    Right and wrong are as in `accuracy_reward`; it abstains if the gold answer cannot be read.
    """
    return CosineScaled(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct, gold_column)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """max_penalty · share of repeated token n-grams (arXiv 2502.03373, appendix C.2); 0 below `ngram_size` tokens."""
    return RepetitionPenalty(ngram_size, max_penalty)
