"""Reward functions: the contract runner, and rewards for answers, format and length. Nothing here imports torch."""

from grupo.rewards.agreement import Disagreement, disagreement
from grupo.rewards.answers import completion_text, extract_answer, extract_boxed, gold_number, last_number
from grupo.rewards.format import tag_format
from grupo.rewards.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_length,
)
from grupo.rewards.math import accuracy_reward, math_accuracy, number_match
from grupo.rewards.numeric import NumericCheck
from grupo.rewards.registry import REWARDS, make_reward
from grupo.rewards.results import RewardFailure, RewardTable
from grupo.rewards.runner import RewardRunner, check_column_names, reward_name
from grupo.rewards.symbolic import MathVerify

__all__ = [
    "Disagreement",
    "MathVerify",
    "NumericCheck",
    "REWARDS",
    "RewardFailure",
    "RewardRunner",
    "RewardTable",
    "accuracy_reward",
    "check_column_names",
    "completion_text",
    "disagreement",
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
    "reward_name",
    "tag_format",
    "token_length",
]
