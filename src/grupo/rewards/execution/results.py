"""What reward functions returned, as scores and statuses. n = completions of the call, K = reward functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grupo.errors import RewardError
from grupo.rewards.execution.calls import Job, as_number
from grupo.types import RewardStatus
from grupo.utils.messages import pluralize

FailureKind = Literal["exception", "timeout", "non_finite"]


@dataclass(frozen=True)
class RewardFailure:
    """One way in which one reward function failed in one call."""

    name: str
    kind: FailureKind
    rows: tuple[int, ...]
    """The completions concerned."""
    message: str
    traceback: str = ""
    """Of an exception: where it was raised."""


@dataclass(frozen=True)
class RewardTable:
    """What K reward functions said about n completions."""

    names: tuple[str, ...]
    """(K,)"""
    scores: list[tuple[float | None, ...]]
    """(n, K); None where the status is not SCORED."""
    statuses: list[tuple[RewardStatus, ...]]
    """(n, K)"""
    failures: tuple[RewardFailure, ...]
    extras: dict[str, list[Any]]
    """What functions logged per completion: column -> n values."""
    metrics: dict[str, list[float]]
    """What functions logged as numbers: name -> values."""


def score_table(names: tuple[str, ...], jobs: Sequence[Job], count: int) -> RewardTable:
    """The scores of all functions.

    Raises:
        RewardError: a function raised one, or returned what can never be right.
    """
    every_row = tuple(range(count))
    scores: list[list[float | None]] = []
    statuses: list[list[RewardStatus]] = []
    failures: list[RewardFailure] = []
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    for job in jobs:
        name, outcome = job.function.name, job.outcome
        if outcome.stop is not None:
            raise outcome.stop
        if outcome.timed_out is not None:
            message = f"'{name}' did not return within {outcome.timed_out:g} s and was left behind"
            failures.append(RewardFailure(name, "timeout", every_row, message))
        elif outcome.error:
            message = f"'{name}' raised {outcome.error}"
            failures.append(RewardFailure(name, "exception", every_row, message, outcome.trace))
        if outcome.timed_out is not None or outcome.error:
            scores.append([None] * count)
            statuses.append([RewardStatus.FAILED] * count)
            continue
        values = _returned_values(outcome.value, count, name)
        not_finite = [row for row, value in enumerate(values) if value is not None and not math.isfinite(value)]
        if not_finite:
            first = not_finite[0]
            message = (
                f"'{name}' returned {values[first]} for completion {first}, and no finite number for "
                f"{len(not_finite)} of {count}; return None to abstain"
            )
            failures.append(RewardFailure(name, "non_finite", tuple(not_finite), message))
        statuses.append([_status(value) for value in values])
        scores.append([value if _status(value) is RewardStatus.SCORED else None for value in values])
        for column, logged in job.log.extras.items():
            extras[f"{name}/{column}" if column in extras else column] = logged
        for metric, numbers in job.log.metrics.items():
            metrics.setdefault(metric, []).extend(numbers)
    return RewardTable(
        names,
        scores=list(zip(*scores, strict=True)),
        statuses=list(zip(*statuses, strict=True)),
        failures=tuple(failures),
        extras=extras,
        metrics=metrics,
    )


def _status(value: float | None) -> RewardStatus:
    if value is None:
        return RewardStatus.ABSTAINED
    return RewardStatus.SCORED if math.isfinite(value) else RewardStatus.FAILED


def _returned_values(returned: Any, count: int, name: str) -> list[float | None]:
    """The n numbers or Nones that a function returned, not necessarily finite."""
    expected = f"a list of {pluralize(count, 'number')}, one per completion (None abstains)"
    if returned is None:
        raise RewardError(f"Reward function '{name}' returned None instead of {expected}. Does it lack a return?")
    if isinstance(returned, Awaitable):
        if inspect.iscoroutine(returned):
            returned.close()
        raise RewardError(
            f"Reward function '{name}' returned something to await instead of {expected}: define it with 'async def'."
        )
    values = _listed(returned, count, name, expected)
    if len(values) != count:
        raise RewardError(
            f"Reward function '{name}' returned {pluralize(len(values), 'reward')} for "
            f"{pluralize(count, 'completion')}; it must return "
            f"{expected}."
        )
    numbers: list[float | None] = []
    for row, value in enumerate(values):
        number = None if value is None else as_number(value)
        if number is None and value is not None:
            raise RewardError(
                f"Reward function '{name}' returned a {type(value).__name__} ({value!r:.60}) as reward {row}; it must "
                f"return {expected}."
            )
        numbers.append(number)
    return numbers


def _listed(returned: Any, count: int, name: str, expected: str) -> list[Any]:
    if isinstance(returned, (list, tuple)):
        return list(returned)
    shape = getattr(returned, "shape", None)
    if shape is not None and hasattr(returned, "tolist"):  # a numpy array or torch tensor, without importing either
        shape = tuple(shape)
        if len(shape) == 1:
            # A tensor that requires grad leaves its graph here.
            return list((returned.detach() if hasattr(returned, "detach") else returned).tolist())
        way_out = " Return it with .squeeze(1)." if len(shape) == 2 and shape[1] == 1 else ""
        raise RewardError(
            f"Reward function '{name}' returned an array of shape {shape}; it must return one of shape ({count},), or "
            f"{expected}.{way_out}"
        )
    raise RewardError(f"Reward function '{name}' returned a {type(returned).__name__}; it must return {expected}.")
