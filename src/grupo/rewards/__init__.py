"""Rewards and verifiers, the runner that calls them, and the check that finds faults in them.

Importing this does not import torch.
"""

from grupo.rewards.agreement import Disagreement, disagreement
from grupo.rewards.answers import Extraction, completion_text, extract_answer, extract_boxed, gold_number, last_number
from grupo.rewards.cheating import no_cheating
from grupo.rewards.check import check_rewards
from grupo.rewards.code import code_reward, extract_code
from grupo.rewards.format import tag_count, tag_format, think_format_reward
from grupo.rewards.gsm8k import (
    gsm8k_correctness,
    gsm8k_integer,
    gsm8k_soft_format,
    gsm8k_strict_format,
    gsm8k_tag_count,
)
from grupo.rewards.judge import llm_judge
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
    boxed_accuracy,
    math_accuracy,
    number_match,
    reasoning_accuracy_reward,
)
from grupo.rewards.model import reward_model
from grupo.rewards.numeric import banded_answer, number_present, number_score, proximity
from grupo.rewards.prose import language_consistency, readability
from grupo.rewards.puzzles import countdown, number_list, reasoning_gym
from grupo.rewards.registry import REWARDS, make_reward
from grupo.rewards.report import FAULTS, Fault, RewardReport
from grupo.rewards.results import RewardFailure, RewardTable
from grupo.rewards.rubric import Check, email_rubric, rubric
from grupo.rewards.runner import RewardRunner, check_column_names, reward_name, run_alone, run_beside_scoring
from grupo.rewards.symbolic import MathVerify
from grupo.rewards.values import NumericCheck
from grupo.rewards.verifiers import Verdict, Verifier, reward_from

__all__ = [
    "Check",
    "Disagreement",
    "Extraction",
    "FAULTS",
    "Fault",
    "MathVerifier",
    "MathVerify",
    "NumberVerifier",
    "NumericCheck",
    "REWARDS",
    "RewardFailure",
    "RewardReport",
    "RewardRunner",
    "RewardTable",
    "Verdict",
    "Verifier",
    "accuracy_reward",
    "banded_answer",
    "boxed_accuracy",
    "check_column_names",
    "check_rewards",
    "code_reward",
    "completion_text",
    "countdown",
    "disagreement",
    "email_rubric",
    "extract_answer",
    "extract_boxed",
    "extract_code",
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
    "llm_judge",
    "make_reward",
    "math_accuracy",
    "no_cheating",
    "number_list",
    "number_match",
    "number_present",
    "number_score",
    "proximity",
    "readability",
    "reasoning_accuracy_reward",
    "reasoning_gym",
    "reward_from",
    "reward_model",
    "reward_name",
    "rubric",
    "run_alone",
    "run_beside_scoring",
    "tag_count",
    "tag_format",
    "think_format_reward",
    "token_length",
]
