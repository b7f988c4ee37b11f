"""One call of a reward function: its arguments, its time limit, and its result. n = completions of the call."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
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

logger = logging.getLogger("grupo")

_OLD_MARKS = {"is_exclusive": "runs_alone", "overlaps_logprobs": "runs_beside_scoring"}
"""Attribute of a reward function -> its earlier name, which is still read."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and its properties, read from its signature and attributes."""

    call: Callable[..., Any]
    name: str
    is_async: bool
    accepted: frozenset[str] | None
    """Keywords it takes; None for any."""
    named: frozenset[str]
    """Keywords spelled out in its signature."""
    required: tuple[str, ...]
    """Keywords without a default."""
    bound: frozenset[str]
    """Keywords fixed by a partial; a dataset column of the same name must not replace them."""
    is_exclusive: bool = False
    """No other function of the batch may run at the same time."""
    runs_in_calling_thread: bool = False
    """It runs without a time limit in the calling thread, while others run in threads of their own."""
    overlaps_logprobs: bool = False
    """It only waits (for a server, for other processes) and does not use the trained model, so the trainer may compute
    log-probs meanwhile."""

    @staticmethod
    def of(call: Callable[..., Any], name: str) -> RewardFunction:
        """
        Raises:
            RewardError: it requires positional-only arguments.
        """
        inner: Any = call
        bound: set[str] = set()
        layers = [inner]
        while isinstance(inner, functools.partial):
            bound.update(inner.keywords)
            inner = inner.func
            layers.append(inner)
        is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        is_exclusive = _has_mark(layers, "is_exclusive", name)
        marks = (
            is_exclusive,
            _has_mark(layers, "runs_in_calling_thread", name),
            (is_async or _has_mark(layers, "overlaps_logprobs", name)) and not is_exclusive,
        )
        try:
            parameters = inspect.signature(call).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature: let the call itself decide
            return RewardFunction(call, name, is_async, None, frozenset(), (), frozenset(bound), *marks)
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
        return RewardFunction(call, name, is_async, accepted, names, required, frozenset(bound), *marks)

    def select(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that the function takes, with lists and dictionaries copied."""
        return {
            name: _copied(value)
            for name, value in keywords.items()
            if name not in self.bound
            and (self.accepted is None or name in self.accepted)
            and (name != "prompt_texts" or name in self.named)
        }


@dataclass(frozen=True)
class CallResult:
    """The result of one call: a value, an error or a time-out."""

    value: Any = None
    error: str = ""
    """Type and message of the exception."""
    traceback: str = ""
    stop: RewardError | ConfigError | None = None
    """An error that ends the run instead of failing the completions."""
    timed_out: float | None = None
    """The exceeded limit in seconds."""


@dataclass(eq=False)
class RewardCall:
    """One call of one reward function."""

    function: RewardFunction
    keywords: dict[str, Any]
    log: CallLog
    result: CallResult = field(default_factory=CallResult)


class CallLog:
    """Collects `log_extra` and `log_metric` of one call. An abandoned call logs into its own, which nobody reads."""

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
            raise RewardError(f"Reward function '{self.name}' called {call}({name!r:.60}, ...); a name is a string.")


ResultQueue = queue.SimpleQueue[tuple[RewardCall, CallResult]]
"""Results of calls that run in threads, in the order in which they finish."""


def start_in_thread(call: RewardCall, put: Callable[[tuple[RewardCall, CallResult]], Any]) -> None:
    """Run a synchronous function in a daemon thread of its own, which can be abandoned; `put` receives the result."""
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = CallResult(context.run(call.function.call, **call.keywords))
        except BaseException as error:  # user code: even exit() in checked code must not end the run
            result = _error_result(error)
        put((call, result))

    threading.Thread(target=work, name=f"grupo-reward-{call.function.name}", daemon=True).start()


def collect_results(calls: Sequence[RewardCall], results: ResultQueue, timeout: float, started: float) -> None:
    """Wait for calls that started together, at `started` on the monotonic clock, and store their results.

    Functions that compute take turns under the interpreter lock, so each is charged its share of the time: while n of
    them run, a second counts as 1/n second for each. A function that meets the limit by itself therefore meets it in
    company, and the wait is never longer than for the same functions one after the other.
    """
    pending = list(calls)
    charged = 0.0
    while pending:
        # Waiting for a queue with a limit, unlike joining a pool, lets Ctrl-C through to the main thread.
        limit = (timeout - charged) * len(pending) - (time.monotonic() - started)
        try:
            call, result = results.get(timeout=min(max(limit, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            break
        now = time.monotonic()
        charged += (now - started) / len(pending)
        started = now
        call.result = result
        pending.remove(call)
    for call in pending:
        call.result = CallResult(timed_out=timeout)


def call_in_this_thread(call: RewardCall) -> CallResult:
    try:
        return CallResult(call.function.call(**call.keywords))
    except (Exception, SystemExit) as error:  # user code; Ctrl-C passes
        return _error_result(error)


async def call_on_loop(call: RewardCall, timeout: float | None) -> CallResult:
    """The result on an event loop; a synchronous function runs in a thread of its own, which the loop waits for."""

    async def run() -> CallResult:
        if not call.function.is_async:
            return await _in_thread(call)
        try:
            return CallResult(await call.function.call(**call.keywords))
        except BaseException as error:  # user code: it would end the loop's thread otherwise
            return _error_result(error)

    task = asyncio.ensure_future(run())
    # Not wait_for: it keeps waiting for a task that ignores its cancellation, and its error looks like the function's.
    await asyncio.wait({task}, timeout=timeout)
    if task.done():
        return task.result()
    task.cancel()
    return CallResult(timed_out=timeout)


async def _in_thread(call: RewardCall) -> CallResult:
    # Not in the executor of the loop, whose threads have to end before the program does.
    loop, results = asyncio.get_running_loop(), asyncio.Queue[tuple[RewardCall, CallResult]]()
    start_in_thread(call, lambda result: loop.call_soon_threadsafe(results.put_nowait, result))
    return (await results.get())[1]


def _error_result(error: BaseException) -> CallResult:
    """The exception as text: keeping the exception itself would keep every frame's variables alive."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of this file
    try:
        text = str(error)
    except Exception:  # user code, too: a thread that dies of it would be taken for a function that hangs
        text = "its message cannot be shown"
    message = f"{type(error).__name__}: {text}".removesuffix(": ")
    if "signal only works in main thread" in message:
        message += (
            " (rewards run in a thread of their own because of the time-out; use a checker without signals, or set the "
            "reward timeout to None)"
        )
    return CallResult(
        error=message,
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        stop=error if isinstance(error, (RewardError, ConfigError)) else None,
    )


def _has_mark(layers: Sequence[Any], mark: str, name: str) -> bool:
    """True if a layer of a function and its partials has this attribute, under its present or earlier name."""
    old = _OLD_MARKS.get(mark, mark)
    if old != mark and any(getattr(layer, old, False) for layer in layers):
        logger.warning("Reward function '%s' has the attribute %s, which is now called %s.", name, old, mark)
        return True
    return any(getattr(layer, mark, False) for layer in layers)


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
    """`'a', 'b'`, for messages."""
    return ", ".join(f"'{name}'" for name in names)
