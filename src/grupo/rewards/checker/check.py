"""Finds faults of a set of rewards before training: `check_rewards`.

Each reward is called on gold answers in many forms, on corrupted ones, on empty, very long and odd texts, and on
sampled completions if there are any. Its scores are compared with what a reward must and should do; `FAULTS` in
`report.py` lists everything that is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from grupo.errors import ConfigError, DataError, RewardError
from grupo.rewards.checker.diagnostics import check_combined, check_one, disagreements, measure
from grupo.rewards.checker.probes import answer_forms, columns_of, gold_text
from grupo.rewards.checker.probing import ProbeSuite, RewardUnderTest
from grupo.rewards.checker.report import FAULTS, RewardReport
from grupo.rewards.execution.runner import RewardRunner
from grupo.rewards.library.format import TagReward
from grupo.rewards.library.reward_model import RewardFunctions, wrap_reward_models
from grupo.rewards.verifiers.base import AnswerVerifier, reward_from
from grupo.utils.messages import pluralize


def check_rewards(
    rewards: RewardFunctions,
    samples: Sequence[Mapping[str, Any]],
    *,
    weights: Sequence[float] | None = None,
    gold_column: str | None = None,
    gold_form: str | None = None,
    verifiers: Sequence[Callable[..., Any]] = (),
    timeout: float = 10.0,
    seconds_per_completion: float = 0.05,
) -> RewardReport:
    """Find faults of rewards that are used together.

    Args:
        rewards: reward functions, as for `GRPOTrainer`.
        samples: dataset rows with `prompt` and the columns that the rewards need. Rows may hold sampled completions:
            `completion`, a string, or `completions`, several. With 16 or more, saturation is measured on them.
        weights: weights of the rewards in the sum; 1 each by default.
        gold_column: column with the right answers; by default that of the library's rewards, else `answer` or
            `solution`.
        gold_form: template of a right completion, with `{answer}` and optionally `{reasoning}`. By default the form, of
            some 40, that the rewards pay most for.
        verifiers: verifiers of the library (`MathVerify`, `NumericCheck`), or reward functions (your own verifiers as
            `reward_from(...)`), that are not part of the sum. Those that tell right from wrong are compared with each
            other and with the rewards that do.
        timeout: seconds that one call may take.
        seconds_per_completion: time per completion above which a reward is reported as slow.

    Raises:
        ConfigError: no reward, or not as many weights as rewards.
        DataError: no sample, or one without `prompt`.
    """
    functions = wrap_reward_models(rewards)
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"weights has {pluralize(len(weights), 'number')} for {pluralize(len(functions), 'reward')}; give one for "
            "each."
        )
    if weights is not None and not all(isinstance(weight, Real) and math.isfinite(weight) for weight in weights):
        raise ConfigError(f"weights={list(weights)!r:.80} are not finite numbers; give one for each reward.")
    if not samples:
        raise DataError("There are no samples: give at least one row with a prompt.")
    for index, row in enumerate(samples):
        if "prompt" not in row:
            raise DataError(f"Sample {index} has no 'prompt'; it has {', '.join(map(str, row)) or 'nothing'}.")
    vocabulary: dict[str, int] = {}
    all_weights = [float(weight) for weight in weights or [1.0] * len(functions)]
    # Verifiers return verdicts; wrapped, they return numbers.
    extra = [reward_from(one, right=1.0, wrong=0.0) if isinstance(one, AnswerVerifier) else one for one in verifiers]
    all_functions: list[Any] = [*functions, *extra]
    names = RewardRunner(all_functions).names
    tested = [
        _reward_under_test(function, name, weight, timeout, vocabulary)
        for function, name, weight in zip(all_functions, names, [*all_weights, *[0.0] * len(extra)], strict=True)
    ]
    column = gold_column or _gold_column(all_functions, samples)
    if gold_column is not None and gold_column not in samples[0]:
        raise DataError(f"gold_column={gold_column!r} is not a column of the samples: {', '.join(samples[0])}.")
    for reward in tested:
        _check_columns(reward, samples)
    expected = [function.delimiters for function in all_functions if isinstance(function, TagReward)]
    suite = ProbeSuite(tested, samples, column, seconds_per_completion)
    form = suite.find_form(answer_forms(expected), gold_form)
    suite.score_all(form)
    for reward in tested:
        check_one(suite, reward)
    faults = [fault for reward in tested for fault in reward.faults.values()]
    summed = tested[: len(functions)]
    unreliable = [reward.name for reward in summed if not reward.is_reliable()]
    if unreliable:
        suite.skipped.append(f"the sum of the rewards, because {', '.join(unreliable)} cannot be relied on")
    else:
        faults += check_combined(suite, summed)
    faults += disagreements(suite, [reward for reward in tested if reward.is_reliable()])
    return RewardReport(
        tuple(faults),
        {reward.name: measure(suite, reward, summed) for reward in tested},
        form.template,
        tuple(suite.skipped),
    )


def _reward_under_test(
    function: Any, name: str, weight: float, timeout: float, vocabulary: dict[str, int]
) -> RewardUnderTest:
    runner = RewardRunner([function], timeout=timeout)
    declared = getattr(function, "value_range", None)
    is_range = isinstance(declared, Sequence) and len(declared) == 2 and all(isinstance(one, Real) for one in declared)
    if declared is not None and not is_range:
        raise ConfigError(f"{name} declares value_range={declared!r:.80}; give the lowest and the highest value.")
    return RewardUnderTest(
        runner,
        name,
        weight,
        # A reward that takes the tokens is about their number or repetition.
        is_about_length="completion_ids" in runner.functions[0].named,
        value_range=(float(declared[0]), float(declared[1])) if declared is not None else None,
        vocabulary=vocabulary,
    )


def _gold_column(functions: Sequence[Any], samples: Sequence[Mapping[str, Any]]) -> str | None:
    wanted = [getattr(function, "gold_column", None) for function in functions]
    for name in (*wanted, "answer", "solution"):
        if isinstance(name, str) and any(gold_text(row.get(name)) is not None for row in samples):
            return name
    return None


def _check_columns(reward: RewardUnderTest, samples: Sequence[Mapping[str, Any]]) -> None:
    try:
        reward.runner.check_columns(columns_of(samples))
    except (RewardError, DataError) as error:
        reward.broken = True
        reward.add_fault("missing-column", str(error).removesuffix(" " + FAULTS["missing-column"]))
