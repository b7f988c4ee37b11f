"""Reward functions: the contract runner, and rewards for answers, format and length. Nothing here imports torch."""

from grupo.rewards.answers import completion_text, extract_answer, extract_boxed, gold_number, last_number
from grupo.rewards.cheating import no_cheating
from grupo.rewards.code import code_reward, extract_code
from grupo.rewards.format import tag_format
from grupo.rewards.judge import llm_judge
from grupo.rewards.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_length,
)
from grupo.rewards.math import accuracy_reward, math_accuracy, number_match
from grupo.rewards.model import reward_model
from grupo.rewards.registry import REWARDS, make_reward
from grupo.rewards.results import RewardFailure, RewardTable
from grupo.rewards.runner import RewardRunner, check_column_names, reward_name, run_alone

__all__ = [
    "REWARDS",
    "RewardFailure",
    "RewardRunner",
    "RewardTable",
    "accuracy_reward",
    "check_column_names",
    "code_reward",
    "completion_text",
    "extract_answer",
    "extract_boxed",
    "extract_code",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "gold_number",
    "last_number",
    "llm_judge",
    "make_reward",
    "math_accuracy",
    "no_cheating",
    "number_match",
    "reward_model",
    "reward_name",
    "run_alone",
    "tag_format",
    "token_length",
]
