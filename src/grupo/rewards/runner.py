"""The fence around reward functions: TRL's contract, with every failure named, counted and kept apart from a score.

A reward function is called once per batch with the keywords `prompts`, `completions`, `completion_ids`, every dataset
column (a list with one entry per completion), `trainer_state`, `log_extra(column, values)` and `log_metric(name,
value)`, and returns one number, or None to abstain, per completion. n = completions of the call, K = reward functions.

What it does wrong has one of two consequences:
- A value that can never be right (wrong count, wrong type, nothing returned) is a mistake in the function:
  `RewardError` at once, before any update. A `RewardError` that the function raises itself passes through as well.
- An exception, a time-out or a number that is not finite may be the fault of one completion: those rows are FAILED.
  A failed row has no score; it is never a zero.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import math
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

from grupo.errors import ConfigError, DataError, RewardError, UnsupportedError
from grupo.records import RewardStatus

_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "prompt_texts")
RESERVED_NAMES = frozenset({*_KEYWORDS, "environments"})
"""Keywords that reward functions get from us; a dataset column of such a name could not be told apart."""

LOOP_GRACE = 2.0
"""Seconds beyond the time-out until an event loop that does not react at all is given up."""

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


class RewardRunner:
    """Calls reward functions and turns what they return, raise or fail to return into a `RewardTable`.

    Functions never see each other's arguments: each gets copies of all lists and dictionaries, down to the messages, so
    one that changes them changes nothing for the next one or for the caller.

    A synchronous function runs in a daemon thread of its own, because a function that hangs cannot be stopped, only
    left behind. Consequences: `signal.alarm` does not work in it (Python allows signals in the main thread only), and
    thread-local state such as the current CUDA device has to be set inside. `timeout=None` runs functions in the
    calling thread instead, without a limit. Asynchronous functions run together on one event loop, which lives as long
    as the runner, so that clients may keep their connections; it is not the caller's loop, which may be running.
    """

    def __init__(
        self, reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]], *, timeout: float | None = 60.0
    ) -> None:
        """
        Args:
            reward_funcs: one function or several; functions, partials, objects with `__call__`, each sync or async.
            timeout: seconds that one call of one function may take; None for no limit.

        Raises:
            ConfigError: no function, something that is not one, or a time-out that is not above 0.
            UnsupportedError: a reward model or the id of one.
        """
        single = callable(reward_funcs) or isinstance(reward_funcs, str)
        functions: list[Callable[..., Any]] = [reward_funcs] if single else list(reward_funcs)  # type: ignore
        if not functions:
            raise ConfigError("reward_funcs is empty: give at least one reward function.")
        if timeout is not None and not 0 < timeout <= threading.TIMEOUT_MAX:
            raise ConfigError(f"reward timeout={timeout} cannot be met: give seconds above 0, or None for no limit.")
        for function in functions:
            _check_is_function(function)
        self.names = _unique_names([reward_name(function) for function in functions])
        self.timeout = timeout
        self._functions = [_Function.of(function, name) for function, name in zip(functions, self.names, strict=True)]
        self._loop: asyncio.AbstractEventLoop | None = None

    def check_columns(self, available: Iterable[str]) -> None:
        """Check, before training, that functions can be called with the columns `available` (those but `prompt`).

        Raises:
            RewardError: a function requires a keyword that is neither a dataset column nor one of ours.
            DataError: a column has a reserved name.
        """
        columns = set(available)
        check_column_names(columns)
        for function in self._functions:
            missing = [name for name in function.required if name not in columns.union(_KEYWORDS)]
            if missing:
                raise RewardError(
                    f"Reward function '{function.name}' requires {_quoted(missing)}, which the dataset does not have. "
                    f"Its columns are {_quoted(sorted(columns)) or 'none but the prompt'}. Rename the column or the "
                    "parameter, or give the parameter a default."
                )

    def score(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        prompt_texts: Sequence[str] | None = None,
        trainer_state: Any = None,
    ) -> RewardTable:
        """Score n completions.

        Args:
            prompts: (n,) texts or lists of messages.
            completions: (n,) texts or lists of messages.
            completion_ids: (n,) token ids, the stop token included.
            columns: dataset column -> n values.
            prompt_texts: (n,) prompts as the model saw them, after the chat template; only for functions whose
                signature names `prompt_texts`.
            trainer_state: handed on as it is.

        Raises:
            RewardError: a function returned the wrong number or type of values, logged something unusable, requires a
                column that is not there, or raised a RewardError itself.
            DataError: a dataset column has a reserved name.
        """
        count = len(completions)
        if count == 0:  # a rank with nothing to score has no columns either
            return RewardTable(self.names, [], [], (), {}, {})
        self.check_columns(columns)
        shared: dict[str, Sequence[Any]] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": [list(ids) for ids in completion_ids],
            **columns,
        }
        if prompt_texts is not None:
            shared["prompt_texts"] = prompt_texts
        for name, values in shared.items():
            assert len(values) == count, f"{name} has {len(values)} entries for {count} completions"

        jobs = []
        for function in self._functions:
            log = _Log(function.name, count)
            keywords = function.select(
                shared | {"trainer_state": trainer_state, "log_extra": log.extra, "log_metric": log.metric}
            )
            jobs.append(_Job(function, keywords, log))
        self._run(jobs)
        return _table(self.names, jobs, count)

    def _run(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if not job.function.is_async:
                job.outcome = _call_here(job) if self.timeout is None else _call_in_thread(job, self.timeout)
        together = [job for job in jobs if job.function.is_async]
        if together:
            self._await_together(together)

    def _await_together(self, jobs: Sequence[_Job]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="grupo-async-rewards", daemon=True).start()
        started = time.monotonic()
        futures = [asyncio.run_coroutine_threadsafe(_awaited(job, self.timeout), self._loop) for job in jobs]
        try:
            for job, future in zip(jobs, futures, strict=True):
                limit = None if self.timeout is None else started + self.timeout + LOOP_GRACE - time.monotonic()
                try:
                    job.outcome = future.result(None if limit is None else max(limit, 0.0))
                except concurrent.futures.TimeoutError:
                    # A function blocks the loop itself. It cannot be stopped: the next call gets a new loop.
                    job.outcome = _Outcome(timed_out=self.timeout)
                    self._loop = None
        finally:
            for future in futures:
                future.cancel()


def check_column_names(columns: Iterable[str]) -> None:
    """Raise `DataError` if a dataset column has the name of a keyword that reward functions get from us."""
    clashes = sorted(RESERVED_NAMES.intersection(columns))
    if clashes:
        raise DataError(
            f"Dataset column {_quoted(clashes)} cannot be handed to reward functions: they get a keyword of this name "
            "from the trainer. Rename or remove the column."
        )


def reward_name(function: Callable[..., Any]) -> str:
    """The metric name of a reward function: its `__name__`, a partial's inner name, or an object's class name."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    name = name if isinstance(name, str) else type(function).__name__
    return "lambda" if name == "<lambda>" else name


# Functions and calls -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """A reward function with what its signature says."""

    call: Callable[..., Any]
    name: str
    is_async: bool
    accepted: frozenset[str] | None
    """Keywords it takes; None for any."""
    named: frozenset[str]
    """Keywords that its signature spells out."""
    required: tuple[str, ...]
    bound: frozenset[str]
    """Keywords that a partial has fixed; a dataset column of that name must not replace them."""

    @staticmethod
    def of(call: Callable[..., Any], name: str) -> _Function:
        inner: Any = call
        bound: set[str] = set()
        while isinstance(inner, functools.partial):
            bound.update(inner.keywords)
            inner = inner.func
        is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        try:
            parameters = inspect.signature(call).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature: let the call itself decide
            return _Function(call, name, is_async, None, frozenset(), (), frozenset(bound))
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if positional:
            raise RewardError(
                f"Reward function '{name}' takes {_quoted(positional)} by position only; reward functions are called "
                "with keywords. Remove the '/' from its signature."
            )
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = frozenset(parameter.name for parameter in named)
        required = tuple(p.name for p in named if p.default is p.empty and p.name not in bound)
        return _Function(call, name, is_async, None if takes_any else names, names, required, frozenset(bound))

    def select(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the keywords that the function takes, lists and dictionaries copied."""
        return {
            name: _copied(value)
            for name, value in keywords.items()
            if name not in self.bound
            and (self.accepted is None or name in self.accepted)
            and (name != "prompt_texts" or name in self.named)
        }


@dataclass(frozen=True)
class _Outcome:
    """How one call ended: with a value, an error or a time-out."""

    value: Any = None
    error: str = ""
    """Type and message of the exception."""
    trace: str = ""
    stop: RewardError | None = None
    """An error that ends the run instead of failing the rows."""
    timed_out: float | None = None
    """The limit in seconds that was exceeded."""


@dataclass
class _Job:
    function: _Function
    keywords: dict[str, Any]
    log: _Log
    outcome: _Outcome = field(default_factory=_Outcome)


class _Log:
    """Takes `log_extra` and `log_metric` of one call. One per call, so that an abandoned one logs into the void."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Any) -> None:
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise RewardError(
                f"Reward function '{self.name}' called log_extra('{column}', ...) with a {type(values).__name__}; it "
                f"takes a list of {self.count} values, one per completion."
            )
        values = list(values.tolist() if hasattr(values, "tolist") else values)
        if len(values) != self.count:
            raise RewardError(
                f"Reward function '{self.name}' called log_extra('{column}', ...) with {len(values)} values for "
                f"{self.count} completions; it takes one per completion."
            )
        self.extras[column] = values

    def metric(self, name: str, value: Any) -> None:
        number = _as_number(value)
        if number is None:
            raise RewardError(
                f"Reward function '{self.name}' called log_metric('{name}', ...) with {value!r:.80}, not a number."
            )
        self.metrics.setdefault(name, []).append(number)


def _call_in_thread(job: _Job, timeout: float) -> _Outcome:
    """Run a synchronous function in a daemon thread; leave it behind when it takes too long."""
    outcomes: list[_Outcome] = []
    done = threading.Event()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcomes.append(_Outcome(context.run(job.function.call, **job.keywords)))
        except BaseException as error:  # user code: even exit() in checked code must not end the run
            outcomes.append(_failed(error))
        done.set()

    threading.Thread(target=work, name=f"grupo-reward-{job.function.name}", daemon=True).start()
    # Waiting for an event with a limit, unlike joining a pool, lets Ctrl-C through to the main thread.
    return outcomes[0] if done.wait(timeout) else _Outcome(timed_out=timeout)


def _call_here(job: _Job) -> _Outcome:
    try:
        return _Outcome(job.function.call(**job.keywords))
    except (Exception, SystemExit) as error:  # user code; Ctrl-C passes
        return _failed(error)


async def _awaited(job: _Job, timeout: float | None) -> _Outcome:
    async def call() -> _Outcome:
        try:
            return _Outcome(await job.function.call(**job.keywords))
        except BaseException as error:  # user code: it would end the loop's thread otherwise
            return _failed(error)

    task = asyncio.ensure_future(call())
    # Not wait_for: that waits on for a task that ignores its cancellation, and its error looks like the function's own.
    await asyncio.wait({task}, timeout=timeout)
    if task.done():
        return task.result()
    task.cancel()
    return _Outcome(timed_out=timeout)


def _failed(error: BaseException) -> _Outcome:
    """The outcome of an exception, as text: keeping the exception would keep every frame's variables alive."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of the fence
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if "signal only works in main thread" in message:
        message += (
            " (rewards run in a thread of their own because of the time-out; use a checker without signals, or set the "
            "reward timeout to None)"
        )
    return _Outcome(
        error=message,
        trace="".join(traceback.format_exception(type(error), error, frames)),
        stop=error if isinstance(error, RewardError) else None,
    )


# Results -------------------------------------------------------------------------------------------------------------


def _table(names: tuple[str, ...], jobs: Sequence[_Job], count: int) -> RewardTable:
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
    expected = f"a list of {count} numbers, one per completion (None abstains)"
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
            f"Reward function '{name}' returned {len(values)} rewards for {count} completions; it must return "
            f"{expected}."
        )
    numbers: list[float | None] = []
    for row, value in enumerate(values):
        number = None if value is None else _as_number(value)
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


def _as_number(value: Any) -> float | None:
    """A Python, numpy or zero-dimensional torch number as a float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (Real, Decimal)):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):  # an integer beyond the floats, a signalling NaN of Decimal
        return math.nan


# Helpers -------------------------------------------------------------------------------------------------------------


def _check_is_function(function: Any) -> None:
    classes = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(function).__mro__}
    if isinstance(function, str) or classes & {"transformers.PreTrainedModel", "torch.Module"}:
        what = f"'{function}'" if isinstance(function, str) else f"a {type(function).__name__}"
        raise UnsupportedError(
            f"reward_funcs holds {what}, a reward model; reward models are not supported yet. Wrap it in a function "
            "that takes prompts, completions and **kwargs and returns one number per completion."
        )
    if inspect.isclass(function):
        raise ConfigError(f"reward_funcs holds the class {function.__name__}; give an instance of it.")
    if not callable(function):
        raise ConfigError(f"reward_funcs holds {function!r:.80}, which cannot be called; give functions.")


def _unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names with `_2`, `_3`, ... appended where they would repeat, never hitting a name that another function has."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return tuple(unique)


def _copied(value: Any) -> Any:
    """Lists, tuples and dictionaries copied all the way down; everything else (images, states) is shared."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if type(value) is tuple:
        return tuple(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
