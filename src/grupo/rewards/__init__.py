"""Reward functions: the contract runner, and rewards for answers, format and length. Nothing here imports torch."""

from grupo.rewards.answers import (
    Extraction,
    completion_text,
    extract_answer,
    extract_boxed,
    gold_number,
    last_number,
)
from grupo.rewards.check import FAULTS, Fault, RewardReport, check_rewards
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
from grupo.rewards.puzzles import countdown, number_list, reasoning_gym
from grupo.rewards.registry import REWARDS, make_reward
from grupo.rewards.results import RewardFailure, RewardTable
from grupo.rewards.runner import RewardRunner, check_column_names, reward_name
from grupo.rewards.verifiers import Verdict, Verifier, reward_from

__all__ = [
    "FAULTS",
    "REWARDS",
    "Extraction",
    "Fault",
    "MathVerifier",
    "NumberVerifier",
    "RewardFailure",
    "RewardReport",
    "RewardRunner",
    "RewardTable",
    "Verdict",
    "Verifier",
    "accuracy_reward",
    "check_column_names",
    "check_rewards",
    "completion_text",
    "countdown",
    "extract_answer",
    "extract_boxed",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "gold_number",
    "last_number",
    "make_reward",
    "math_accuracy",
    "number_list",
    "number_match",
    "reasoning_gym",
    "reasoning_accuracy_reward",
    "reward_from",
    "reward_name",
    "tag_format",
    "think_format_reward",
    "token_length",
]
