"""Reward functions: the contract runner, and rewards for answers, format and length. Nothing here imports torch."""

from grupo.rewards.answers import (
    Extraction,
    completion_text,
    extract_answer,
    extract_boxed,
    gold_number,
    last_number,
)
from grupo.rewards.format import tag_format, think_format_reward
from grupo.rewards.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_length,
)
from grupo.rewards.math import (
    MathVerifier,
    NumberVerifier,
    accuracy_reward,
    math_accuracy,
    number_match,
    reasoning_accuracy_reward,
)
from grupo.rewards.registry import REWARDS, make_reward
from grupo.rewards.results import RewardFailure, RewardTable
from grupo.rewards.runner import RewardRunner, check_column_names, reward_name
from grupo.rewards.verifiers import Verdict, Verifier, reward_from

__all__ = [
    "REWARDS",
    "Extraction",
    "MathVerifier",
    "NumberVerifier",
    "RewardFailure",
    "RewardRunner",
    "RewardTable",
    "Verdict",
    "Verifier",
    "accuracy_reward",
    "check_column_names",
    "completion_text",
    "extract_answer",
    "extract_boxed",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "gold_number",
    "last_number",
    "make_reward",
    "math_accuracy",
    "number_match",
    "reasoning_accuracy_reward",
    "reward_from",
    "reward_name",
    "tag_format",
    "think_format_reward",
    "token_length",
]
