"""What reward functions returned, as scores and statuses. n = completions of the call, K = reward functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grupo.errors import RewardError
from grupo.rewards.execution.calls import RewardCall, as_number
from grupo.types import RewardStatus
from grupo.utils.messages import pluralize

FailureKind = Literal["exception", "timeout", "non_finite"]


@dataclass(frozen=True)
class RewardFailure:
    """One way in which one reward function failed in one call."""

    name: str
    kind: FailureKind
    indices: tuple[int, ...]
    """Indices of the failed completions."""
    message: str
    traceback: str = ""
    """Traceback of an exception."""


@dataclass(frozen=True)
class RewardTable:
    """Scores of K reward functions for n completions."""

    names: tuple[str, ...]
    """(K,)"""
    scores: list[tuple[float | None, ...]]
    """(n, K); None where the status is not SCORED."""
    statuses: list[tuple[RewardStatus, ...]]
    """(n, K)"""
    failures: tuple[RewardFailure, ...]
    extras: dict[str, list[Any]]
    """Values logged per completion: column -> n values."""
    metrics: dict[str, list[float]]
    """Numbers logged as metrics: name -> values."""


def make_table(names: tuple[str, ...], calls: Sequence[RewardCall], count: int) -> RewardTable:
    """The results of one call of each of K functions, in their order.

    Raises:
        RewardError: a function raised one, or returned what can never be right.
    """
    scores: list[list[float | None]] = []
    statuses: list[list[RewardStatus]] = []
    failures: list[RewardFailure] = []
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    for call in calls:
        name, result = call.function.name, call.result
        if result.stop is not None:
            raise result.stop
        if result.timed_out is not None or result.error:
            failures.append(_call_failure(call, count))
            scores.append([None] * count)
            statuses.append([RewardStatus.FAILED] * count)
            continue
        values = _returned_values(result.value, count, name)
        not_finite = [index for index, value in enumerate(values) if value is not None and not math.isfinite(value)]
        if not_finite:
            first = not_finite[0]
            message = (
                f"'{name}' returned {values[first]} for completion {first}, and no finite number for "
                f"{len(not_finite)} of {count}; return None to abstain"
            )
            failures.append(RewardFailure(name, "non_finite", tuple(not_finite), message))
        statuses.append([_status(value) for value in values])
        scores.append([value if _status(value) is RewardStatus.SCORED else None for value in values])
        for column, logged in call.log.extras.items():
            extras[f"{name}/{column}" if column in extras else column] = logged
        for metric, numbers in call.log.metrics.items():
            metrics.setdefault(metric, []).extend(numbers)
    return RewardTable(
        names,
        scores=list(zip(*scores, strict=True)),
        statuses=list(zip(*statuses, strict=True)),
        failures=tuple(failures),
        extras=extras,
        metrics=metrics,
    )


def _call_failure(call: RewardCall, count: int) -> RewardFailure:
    """The failure of a call that raised or ran out of time: all its completions failed."""
    name, result, indices = call.function.name, call.result, tuple(range(count))
    if result.timed_out is not None:
        message = f"'{name}' did not return within {result.timed_out:g} s and was abandoned"
        return RewardFailure(name, "timeout", indices, message)
    return RewardFailure(name, "exception", indices, f"'{name}' raised {result.error}", result.traceback)


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
            f"Reward function '{name}' returned an awaitable instead of {expected}: define it with 'async def'."
        )
    values = _as_list(returned, count, name, expected)
    if len(values) != count:
        raise RewardError(
            f"Reward function '{name}' returned {pluralize(len(values), 'reward')} for "
            f"{pluralize(count, 'completion')}; it must return {expected}."
        )
    numbers: list[float | None] = []
    for index, value in enumerate(values):
        number = None if value is None else as_number(value)
        if number is None and value is not None:
            raise RewardError(
                f"Reward function '{name}' returned a {type(value).__name__} ({value!r:.60}) as reward {index}; it "
                f"must return {expected}."
            )
        numbers.append(number)
    return numbers


def _as_list(returned: Any, count: int, name: str, expected: str) -> list[Any]:
    if isinstance(returned, (list, tuple)):
        return list(returned)
    shape = getattr(returned, "shape", None)
    if shape is not None and hasattr(returned, "tolist"):  # a numpy array or torch tensor, without importing either
        shape = tuple(shape)
        if len(shape) == 1:
            return list(returned.tolist())
        hint = " Return it with .squeeze(1)." if len(shape) == 2 and shape[1] == 1 else ""
        raise RewardError(
            f"Reward function '{name}' returned an array of shape {shape}; it must return one of shape ({count},), or "
            f"{expected}.{hint}"
        )
    raise RewardError(f"Reward function '{name}' returned a {type(returned).__name__}; it must return {expected}.")
