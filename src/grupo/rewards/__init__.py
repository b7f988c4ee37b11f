"""Rewards and verifiers, the runner that calls them, and the checker that finds their faults.

Importing this package does not import torch.
"""

from grupo.rewards.answers.extraction import (
    Extraction,
    completion_text,
    extract_answer,
    extract_boxed,
    gold_number,
    last_number,
)
from grupo.rewards.checker.check import check_rewards
from grupo.rewards.checker.report import FAULTS, Fault, RewardReport
from grupo.rewards.code.reward import code_reward, extract_code
from grupo.rewards.code.static_checks import no_cheating
from grupo.rewards.execution.results import RewardFailure, RewardTable
from grupo.rewards.execution.runner import (
    RewardRunner,
    check_column_names,
    exclusive,
    overlap_with_logprobs,
    reward_name,
    run_alone,
    run_beside_scoring,
)
from grupo.rewards.judge.reward import llm_judge
from grupo.rewards.library.format import tag_count, tag_format, think_format_reward
from grupo.rewards.library.gsm8k import (
    gsm8k_correctness,
    gsm8k_integer,
    gsm8k_soft_format,
    gsm8k_strict_format,
    gsm8k_tag_count,
)
from grupo.rewards.library.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_length,
)
from grupo.rewards.library.numeric import banded_answer, number_present, number_score, proximity
from grupo.rewards.library.reward_model import reward_model
from grupo.rewards.library.rubric import Check, rubric
from grupo.rewards.registry import REWARDS, make_reward
from grupo.rewards.verifiers.agreement import Disagreement, disagreement
from grupo.rewards.verifiers.base import Verdict, Verifier, reward_from
from grupo.rewards.verifiers.math import (
    MathVerifier,
    NumberVerifier,
    accuracy_reward,
    boxed_accuracy,
    math_accuracy,
    number_match,
    reasoning_accuracy_reward,
)
from grupo.rewards.verifiers.math_verify import MathVerify, NumericCheck
from grupo.rewards.verifiers.puzzles import countdown, number_list, reasoning_gym

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
    "exclusive",
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
    "last_number",
    "llm_judge",
    "make_reward",
    "math_accuracy",
    "no_cheating",
    "number_list",
    "number_match",
    "number_present",
    "number_score",
    "overlap_with_logprobs",
    "proximity",
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
