"""Reward functions: the contract runner, and rewards for answers, format and length. Nothing here imports torch."""

from grupo.rewards.answers import completion_text, extract_answer, extract_boxed, gold_number, last_number
from grupo.rewards.format import tag_count, tag_format
from grupo.rewards.gsm8k import (
    gsm8k_correctness,
    gsm8k_integer,
    gsm8k_soft_format,
    gsm8k_strict_format,
    gsm8k_tag_count,
)
from grupo.rewards.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_length,
)
from grupo.rewards.math import accuracy_reward, boxed_accuracy, math_accuracy, number_match
from grupo.rewards.numeric import banded_answer, number_present, number_score, proximity
from grupo.rewards.prose import language_consistency, readability
from grupo.rewards.registry import REWARDS, make_reward
from grupo.rewards.results import RewardFailure, RewardTable
from grupo.rewards.rubric import Check, email_rubric, rubric
from grupo.rewards.runner import RewardRunner, check_column_names, reward_name

__all__ = [
    "REWARDS",
    "Check",
    "RewardFailure",
    "RewardRunner",
    "RewardTable",
    "accuracy_reward",
    "banded_answer",
    "boxed_accuracy",
    "check_column_names",
    "completion_text",
    "email_rubric",
    "extract_answer",
    "extract_boxed",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "gold_number",
    "gsm8k_correctness",
    "gsm8k_integer",
    "gsm8k_soft_format",
    "gsm8k_strict_format",
    "gsm8k_tag_count",
    "language_consistency",
    "last_number",
    "make_reward",
    "math_accuracy",
    "number_match",
    "number_present",
    "number_score",
    "proximity",
    "readability",
    "reward_name",
    "rubric",
    "tag_count",
    "tag_format",
    "token_length",
]
