"""Runs reward functions under TRL's contract: every failure is named, counted and kept apart from scores.

A reward function is called once per batch with the keywords `prompts`, `completions`, `completion_ids`, every dataset
column (a list with one entry per completion), `trainer_state`, `log_extra(column, values)` and `log_metric(name,
value)`, and returns one number, or None to abstain, per completion. n = completions of the call, K = reward functions.

Mistakes of a function have one of two consequences:
- A value that can never be right (wrong count, wrong type, nothing returned) raises `RewardError` at once, before any
  update. A `RewardError` or `ConfigError` that the function raises itself passes through as well.
- An exception, a time-out or a non-finite number may be caused by a single completion: the status of these completions
  is FAILED. A failed completion has no score; it is never a zero.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from grupo.errors import ConfigError, DataError, RewardError
from grupo.rewards.execution.calls import (
    CallLog,
    CallResult,
    ResultQueue,
    RewardCall,
    RewardFunction,
    call_in_this_thread,
    call_on_loop,
    collect_results,
    quoted,
    start_in_thread,
)
from grupo.rewards.execution.fingerprint import fingerprint
from grupo.rewards.execution.results import RewardTable, make_table

logger = logging.getLogger("grupo")

_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "prompt_texts")
RESERVED_NAMES = frozenset({*_KEYWORDS, "environments"})
"""Keywords that grupo passes to reward functions; a dataset column of the same name would be ambiguous."""

LOOP_GRACE = 2.0
"""Seconds beyond the time-out after which an event loop that does not react at all is abandoned."""


@runtime_checkable
class NeedsDevice(Protocol):
    """A reward function that is loaded or moved to the training device before its first call."""

    def prepare_on_device(self, device: Any) -> None: ...


class RewardRunner:
    """Calls reward functions and turns what they return, raise or fail to return into a `RewardTable`.

    Each function gets copies of all lists and dictionaries, down to the messages: changing them changes nothing for
    other functions or for the caller.

    All functions of a batch run at the same time; their results are combined in the order of the functions, whichever
    finishes first. A synchronous function runs in a daemon thread of its own, because a function that hangs cannot be
    stopped, only abandoned. Consequences: `signal.alarm` does not work in it (Python allows signals in the main thread
    only), thread-local state such as the current CUDA device has to be set inside, and functions that share something
    (a file, the state of `random`) use it concurrently, unless marked with `exclusive`. With `timeout=None`
    synchronous functions run in the calling thread instead, one after the other and without a limit. Asynchronous
    functions run on one event loop in a thread of its own, which lives as long as the runner. Reward models run in the
    calling thread, which otherwise only waits.
    """

    def __init__(
        self, reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]], *, timeout: float | None = 60.0
    ) -> None:
        """
        Args:
            reward_funcs: one function or several; functions, partials, or objects with `__call__`, each sync or async.
            timeout: seconds that one call of one function may take, counted by its share of the time while several
                compute at once; None for no limit.

        Raises:
            ConfigError: no function, something that is not one, or a time-out that is not above 0.
        """
        functions = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs)
        if not functions:
            raise ConfigError("reward_funcs is empty: give at least one reward function.")
        if timeout is not None and not 0 < timeout <= threading.TIMEOUT_MAX:
            raise ConfigError(f"reward timeout={timeout} cannot be met: give seconds above 0, or None for no limit.")
        for function in functions:
            _check_is_function(function)
        self.names = _unique_names([reward_name(function) for function in functions])
        self.timeout = timeout
        self.functions = [RewardFunction.of(call, name) for call, name in zip(functions, self.names, strict=True)]
        self.fingerprints = {function.name: fingerprint(function.call) for function in self.functions}
        """Function name -> short hash of its code and settings, taken before its first call."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def check_columns(self, available: Iterable[str]) -> None:
        """Check, before training, that functions can be called with the columns `available` (all but `prompt`).

        Raises:
            RewardError: a function requires a keyword that is neither a dataset column nor one of grupo's.
            DataError: a column has a reserved name.
        """
        columns = set(available)
        check_column_names(columns)
        for function in self.functions:
            missing = [name for name in function.required if name not in columns.union(_KEYWORDS)]
            if missing:
                raise RewardError(
                    f"Reward function '{function.name}' requires {quoted(missing)}, which the dataset does not have. "
                    f"Its columns are {quoted(sorted(columns)) or 'none but the prompt'}. Rename the column or the "
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
        while_waiting: Callable[[], None] | None = None,
    ) -> RewardTable:
        """Score n completions.

        Args:
            prompts: (n,) strings or lists of messages.
            completions: (n,) strings or lists of messages.
            completion_ids: (n,) token ids, the stop token included.
            columns: dataset column -> n values.
            prompt_texts: (n,) prompts as the model saw them, after the chat template; only for functions whose
                signature names `prompt_texts`.
            trainer_state: passed on unchanged.
            while_waiting: called once, in the calling thread, when only functions that overlap with log-probs may
                still run.

        Raises:
            RewardError: a function returned the wrong number or type of values, logged something unusable, requires a
                missing column, or raised a RewardError itself.
            DataError: a dataset column has a reserved name.
        """
        count = len(completions)
        if count == 0:  # a rank with nothing to score has no columns either
            if while_waiting is not None:
                while_waiting()
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

        calls = []
        for function in self.functions:
            log = CallLog(function.name, count)
            keywords = function.select(
                shared | {"trainer_state": trainer_state, "log_extra": log.extra, "log_metric": log.metric}
            )
            calls.append(RewardCall(function, keywords, log))
        for call in calls:
            if call.function.is_exclusive:
                self._run_together([call], None)
        self._run_together([call for call in calls if not call.function.is_exclusive], while_waiting)
        return make_table(self.names, calls, count)

    def prepare(self, device: Any) -> None:
        """Let reward functions that need it (reward models) load and move to `device`.

        Raises:
            ConfigError: a reward model cannot be used.
        """
        for function in self.functions:
            if isinstance(function.call, NeedsDevice):
                function.call.prepare_on_device(device)

    @property
    def overlaps_logprobs(self) -> bool:
        """Whether a function may still run when `while_waiting` is called."""
        return any(function.overlaps_logprobs and self._runs_on_loop(function) for function in self.functions)

    def _runs_on_loop(self, function: RewardFunction) -> bool:
        return function.is_async or (function.overlaps_logprobs and self.timeout is not None)

    def _run_together(self, calls: Sequence[RewardCall], while_waiting: Callable[[], None] | None) -> None:
        on_loop = [call for call in calls if self._runs_on_loop(call.function)]
        synchronous = [call for call in calls if call not in on_loop]
        here = [call for call in synchronous if self.timeout is None or call.function.runs_in_calling_thread]
        threads = [call for call in synchronous if call not in here]
        started = time.monotonic()
        futures = self._start_on_loop(on_loop)
        try:
            results: ResultQueue = queue.SimpleQueue()
            for call in threads:
                start_in_thread(call, results.put)
            for call in here:
                call.result = call_in_this_thread(call)
            if self.timeout is not None:
                collect_results(threads, results, self.timeout, started)
            if while_waiting is not None:
                while_waiting()
            self._await(on_loop, futures, started)
        finally:
            for future in futures:
                future.cancel()

    def _start_on_loop(self, calls: Sequence[RewardCall]) -> list[concurrent.futures.Future[CallResult]]:
        if not calls:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="grupo-async-rewards", daemon=True).start()
        return [asyncio.run_coroutine_threadsafe(call_on_loop(call, self.timeout), self._loop) for call in calls]

    def _await(
        self, calls: Sequence[RewardCall], futures: Sequence[concurrent.futures.Future[CallResult]], started: float
    ) -> None:
        for call, future in zip(calls, futures, strict=True):
            limit = None if self.timeout is None else started + self.timeout + LOOP_GRACE - time.monotonic()
            try:
                call.result = future.result(None if limit is None else max(limit, 0.0))
            except concurrent.futures.TimeoutError:
                # A function blocks the loop itself. It cannot be stopped: the next call gets a new loop.
                call.result = CallResult(timed_out=self.timeout)
                self._loop = None


def exclusive(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward function that must not run while others of the batch do; usable as a decorator.

    For functions that share something which is not thread-safe. They run before the others, in their order. A class of
    reward functions sets `is_exclusive = True` instead. A function that ran out of time and was abandoned may still be
    running.
    """
    function.is_exclusive = True  # type: ignore[attr-defined]
    return function


def overlap_with_logprobs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a synchronous reward function that may run while the trainer computes log-probs; usable as a decorator.

    For functions that wait for a server or for other processes, and that do not use the trained model, whose attention
    and weights are temporarily replaced meanwhile. Asynchronous functions overlap without a mark, unless marked with
    `exclusive`. A class of reward functions sets `overlaps_logprobs = True` instead.
    """
    function.overlaps_logprobs = True  # type: ignore[attr-defined]
    return function


def run_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The earlier name of `exclusive`."""
    logger.warning("grupo.rewards.run_alone is now called exclusive.")
    return exclusive(function)


def run_beside_scoring(function: Callable[..., Any]) -> Callable[..., Any]:
    """The earlier name of `overlap_with_logprobs`."""
    logger.warning("grupo.rewards.run_beside_scoring is now called overlap_with_logprobs.")
    return overlap_with_logprobs(function)


def check_column_names(columns: Iterable[str]) -> None:
    """Raise `DataError` if a dataset column has the name of a keyword that grupo passes to reward functions."""
    clashes = sorted(RESERVED_NAMES.intersection(columns))
    if clashes:
        raise DataError(
            f"Dataset column {quoted(clashes)} cannot be passed to reward functions: the trainer passes a keyword of "
            "this name. Rename or remove the column."
        )


def reward_name(function: Callable[..., Any]) -> str:
    """The metric name of a reward function: its `__name__`, a partial's inner name, or an object's class name."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    name = name if isinstance(name, str) else type(function).__name__
    return "lambda" if name == "<lambda>" else name


def is_model(function: Any) -> bool:
    """A model id, or a torch module, recognised by its classes so that torch need not be imported."""
    classes = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(function).__mro__}
    return isinstance(function, str) or "torch.Module" in classes


def _check_is_function(function: Any) -> None:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isclass(function):
        raise ConfigError(f"reward_funcs holds the class {function.__name__}; give an instance of it.")
    if is_model(function):
        raise ConfigError(
            f"reward_funcs holds {function!r:.80}, which is a model and not a function: wrap it as "
            "grupo.rewards.reward_model(...). GRPOTrainer and check_rewards do that themselves."
        )
    if not callable(function):
        raise ConfigError(f"reward_funcs holds {function!r:.80}, which cannot be called; give functions.")


def _unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names with `_2`, `_3`, ... appended where they would repeat, never equal to the name of another function."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return tuple(unique)
