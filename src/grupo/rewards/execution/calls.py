"""One call of a reward function: what it takes, how long it may take, and how it ended.

n = completions of the call.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from grupo.errors import ConfigError, RewardError
from grupo.utils.messages import pluralize


@dataclass(frozen=True)
class Function:
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
    runs_alone: bool = False
    """No other function of the batch may run at the same time."""
    runs_in_calling_thread: bool = False
    """Without a limit, while others run in threads of their own."""
    runs_beside_scoring: bool = False
    """It waits for something else, and does not use the model that is trained."""

    @staticmethod
    def of(call: Callable[..., Any], name: str) -> Function:
        inner: Any = call
        bound: set[str] = set()
        layers = [inner]
        while isinstance(inner, functools.partial):
            bound.update(inner.keywords)
            inner = inner.func
            layers.append(inner)
        is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        alone, in_caller, beside = (
            any(getattr(layer, mark, False) for layer in layers)
            for mark in ("runs_alone", "runs_in_calling_thread", "runs_beside_scoring")
        )
        marks = (alone, in_caller, (is_async or beside) and not alone)
        try:
            parameters = inspect.signature(call).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature: let the call itself decide
            return Function(call, name, is_async, None, frozenset(), (), frozenset(bound), *marks)
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if positional:
            raise RewardError(
                f"Reward function '{name}' takes {quoted(positional)} by position only; reward functions are called "
                "with keywords. Remove the '/' from its signature."
            )
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = frozenset(parameter.name for parameter in named)
        required = tuple(p.name for p in named if p.default is p.empty and p.name not in bound)
        accepted = None if takes_any else names
        return Function(call, name, is_async, accepted, names, required, frozenset(bound), *marks)

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
class Outcome:
    """How one call ended: with a value, an error or a time-out."""

    value: Any = None
    error: str = ""
    """Type and message of the exception."""
    trace: str = ""
    stop: RewardError | ConfigError | None = None
    """An error that ends the run instead of failing the rows."""
    timed_out: float | None = None
    """The limit in seconds that was exceeded."""


@dataclass(eq=False)
class Job:
    function: Function
    keywords: dict[str, Any]
    log: CallLog
    outcome: Outcome = field(default_factory=Outcome)


class CallLog:
    """Takes `log_extra` and `log_metric` of one call. One per call, so that an abandoned one logs into the void."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Any) -> None:
        self._check_name("log_extra", column)
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise RewardError(
                f"Reward function '{self.name}' called log_extra('{column}', ...) with a {type(values).__name__}; it "
                f"takes a list of {pluralize(self.count, 'value')}, one per completion."
            )
        values = list(values.tolist() if hasattr(values, "tolist") else values)
        if len(values) != self.count:
            raise RewardError(
                f"Reward function '{self.name}' called log_extra('{column}', ...) with "
                f"{pluralize(len(values), 'value')} for {pluralize(self.count, 'completion')}; it takes one per "
                "completion."
            )
        self.extras[column] = values

    def metric(self, name: str, value: Any) -> None:
        self._check_name("log_metric", name)
        number = as_number(value)
        if number is None:
            raise RewardError(
                f"Reward function '{self.name}' called log_metric('{name}', ...) with {value!r:.80}, not a number."
            )
        self.metrics.setdefault(name, []).append(number)

    def _check_name(self, call: str, name: Any) -> None:
        if not isinstance(name, str):
            raise RewardError(f"Reward function '{self.name}' called {call}({name!r:.60}, ...); a name is a text.")


Done = queue.SimpleQueue[tuple["Job", Outcome]]
"""Where threads leave the outcomes of their jobs."""


def start_in_thread(job: Job, tell: Callable[[tuple[Job, Outcome]], Any]) -> None:
    """Run a synchronous function in a daemon thread of its own, which can be left behind."""
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome = Outcome(context.run(job.function.call, **job.keywords))
        except BaseException as error:  # user code: even exit() in checked code must not end the run
            outcome = _failed(error)
        tell((job, outcome))

    threading.Thread(target=work, name=f"grupo-reward-{job.function.name}", daemon=True).start()


def collect(jobs: Sequence[Job], done: Done, timeout: float, started: float) -> None:
    """Give jobs that were started together, at `started` on the monotonic clock, their outcomes.

    Functions that compute take turns under the interpreter's lock, so each is charged its share of the time: a second
    with n of them still running counts 1/n second for each. What fits the limit when it runs by itself therefore fits
    in company too, and the wait is never longer than that for the same functions one after the other.
    """
    running = list(jobs)
    charged = 0.0
    while running:
        # Waiting for a queue with a limit, unlike joining a pool, lets Ctrl-C through to the main thread.
        limit = (timeout - charged) * len(running) - (time.monotonic() - started)
        try:
            job, outcome = done.get(timeout=min(max(limit, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            break
        now = time.monotonic()
        charged += (now - started) / len(running)
        started = now
        job.outcome = outcome
        running.remove(job)
    for job in running:
        job.outcome = Outcome(timed_out=timeout)


def call_here(job: Job) -> Outcome:
    try:
        return Outcome(job.function.call(**job.keywords))
    except (Exception, SystemExit) as error:  # user code; Ctrl-C passes
        return _failed(error)


async def call_and_wait(job: Job, timeout: float | None) -> Outcome:
    """On an event loop; a synchronous function runs in a thread of its own, which the loop waits for."""

    async def call() -> Outcome:
        if not job.function.is_async:
            return await _in_thread(job)
        try:
            return Outcome(await job.function.call(**job.keywords))
        except BaseException as error:  # user code: it would end the loop's thread otherwise
            return _failed(error)

    task = asyncio.ensure_future(call())
    # Not wait_for: that waits on for a task that ignores its cancellation, and its error looks like the function's own.
    await asyncio.wait({task}, timeout=timeout)
    if task.done():
        return task.result()
    task.cancel()
    return Outcome(timed_out=timeout)


async def _in_thread(job: Job) -> Outcome:
    # Not in the executor of the loop, whose threads have to end before the program does.
    loop, done = asyncio.get_running_loop(), asyncio.Queue[tuple[Job, Outcome]]()
    start_in_thread(job, lambda told: loop.call_soon_threadsafe(done.put_nowait, told))
    return (await done.get())[1]


def _failed(error: BaseException) -> Outcome:
    """The outcome of an exception, as text: keeping the exception would keep every frame's variables alive."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of the fence
    message = f"{type(error).__name__}: {_said(error)}".removesuffix(": ")
    if "signal only works in main thread" in message:
        message += (
            " (rewards run in a thread of their own because of the time-out; use a checker without signals, or set the "
            "reward timeout to None)"
        )
    return Outcome(
        error=message,
        trace="".join(traceback.format_exception(type(error), error, frames)),
        stop=error if isinstance(error, (RewardError, ConfigError)) else None,
    )


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # user code, too: a thread that dies of it would be taken for a function that hangs
        return "its message cannot be shown"


def as_number(value: Any) -> float | None:
    """A Python, numpy or zero-dimensional torch number as a float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (Real, Decimal)):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):  # an integer beyond the floats, a signalling NaN of Decimal
        return math.nan


def _copied(value: Any) -> Any:
    """Lists, tuples and dictionaries copied all the way down; everything else (images, states) is shared."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if type(value) is tuple:
        return tuple(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def quoted(names: Iterable[str]) -> str:
    """Names as messages list them."""
    return ", ".join(f"'{name}'" for name in names)
