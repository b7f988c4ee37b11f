"""What is wrong with a set of rewards, found before training: `check_rewards` and its report.

Each reward is called on gold answers in many forms, on spoilt ones, on empty, very long and odd texts, and on sampled
completions where there are some. What it does there is compared with what a reward must and should do; `FAULTS` of
`report.py` has the names of all that is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from grupo.errors import ConfigError, DataError, RewardError
from grupo.rewards.checker.diagnostics import check_one, disagreements, faults_of_the_sum, measured
from grupo.rewards.checker.probes import columns_of, forms, written_gold
from grupo.rewards.checker.probing import Probing, Subject
from grupo.rewards.checker.report import FAULTS, RewardReport
from grupo.rewards.execution.runner import RewardRunner
from grupo.rewards.library.format import TagReward
from grupo.rewards.library.reward_model import RewardFunctions, wrap_reward_models
from grupo.rewards.verifiers.base import GoldVerifier, reward_from
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
    """Looks for faults in rewards that are to be used together.

    Args:
        rewards: reward functions, as for `GRPOTrainer`.
        samples: dataset rows with `prompt` and the columns that the rewards need. Rows may hold `completion`, a text,
            or `completions`, several, that a model has given: with 16 or more, saturation is measured on them.
        weights: of the rewards in the sum; 1 each by default.
        gold_column: column with the right answers; by default that of the library's rewards, else `answer` or
            `solution`.
        gold_form: how a right completion is written, with `{answer}` and perhaps `{reasoning}` in it. By default the
            form, of some 40, that the rewards pay most for.
        verifiers: verifiers of the library (`MathVerify`, `NumericCheck`), or more functions of the same kind (own
            verifiers as `reward_from(...)`), that are not part of the sum; those that tell right from wrong are
            compared with each other and with the rewards that do.
        timeout: seconds that one call may take.
        seconds_per_completion: more than this is reported as slow.

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
        raise ConfigError(f"weights={list(weights)!r:.80} are no finite numbers; give one for each reward.")
    if not samples:
        raise DataError("There are no samples: give at least one row with a prompt.")
    for place, row in enumerate(samples):
        if "prompt" not in row:
            raise DataError(f"Sample {place} has no 'prompt'; it has {', '.join(map(str, row)) or 'nothing'}.")
    vocabulary: dict[str, int] = {}
    given = [float(weight) for weight in weights or [1.0] * len(functions)]
    # What gives verdicts is made to give numbers.
    opinions = [reward_from(one, right=1.0, wrong=0.0) if isinstance(one, GoldVerifier) else one for one in verifiers]
    everyone: list[Any] = [*functions, *opinions]
    names = RewardRunner(everyone).names
    subjects = [
        _subject(function, name, weight, timeout, vocabulary)
        for function, name, weight in zip(everyone, names, [*given, *[0.0] * len(opinions)], strict=True)
    ]
    column = gold_column or _gold_column(everyone, samples)
    if gold_column is not None and gold_column not in samples[0]:
        raise DataError(f"gold_column={gold_column!r} is no column of the samples: {', '.join(samples[0])}.")
    for subject in subjects:
        _check_columns(subject, samples)
    expected = [function.delimiters for function in everyone if isinstance(function, TagReward)]
    probing = Probing(subjects, samples, column, seconds_per_completion)
    form = probing.find_form(forms(expected), gold_form)
    probing.score_all(form)
    for subject in subjects:
        check_one(probing, subject)
    faults = [fault for subject in subjects for fault in subject.faults.values()]
    summed = subjects[: len(functions)]
    unreliable = [subject.name for subject in summed if not subject.is_reliable()]
    if unreliable:
        probing.skipped.append(f"the sum of the rewards, as long as {', '.join(unreliable)} cannot be relied on")
    else:
        faults += faults_of_the_sum(probing, summed)
    faults += disagreements(probing, [subject for subject in subjects if subject.is_reliable()])
    return RewardReport(
        tuple(faults),
        {subject.name: measured(probing, subject, summed) for subject in subjects},
        form.template,
        tuple(probing.skipped),
    )


def _subject(function: Any, name: str, weight: float, timeout: float, vocabulary: dict[str, int]) -> Subject:
    runner = RewardRunner([function], timeout=timeout)
    declared = getattr(function, "value_range", None)
    is_range = isinstance(declared, Sequence) and len(declared) == 2 and all(isinstance(one, Real) for one in declared)
    if declared is not None and not is_range:
        raise ConfigError(f"{name} declares value_range={declared!r:.80}; it is the lowest and the highest value.")
    return Subject(
        runner,
        name,
        weight,
        # Whoever asks for the tokens means their number, or how they repeat.
        is_about_length="completion_ids" in runner.functions[0].named,
        value_range=(float(declared[0]), float(declared[1])) if declared is not None else None,
        vocabulary=vocabulary,
    )


def _gold_column(functions: Sequence[Any], samples: Sequence[Mapping[str, Any]]) -> str | None:
    wanted = [getattr(function, "gold_column", None) for function in functions]
    for name in (*wanted, "answer", "solution"):
        if isinstance(name, str) and any(written_gold(row.get(name)) is not None for row in samples):
            return name
    return None


def _check_columns(subject: Subject, samples: Sequence[Mapping[str, Any]]) -> None:
    try:
        subject.runner.check_columns(columns_of(samples))
    except (RewardError, DataError) as error:
        subject.broken = True
        subject.report("missing-column", str(error).removesuffix(" " + FAULTS["missing-column"]))
