"""The fence around reward functions: TRL's contract, with every failure named, counted and kept apart from a score.

A reward function is called once per batch with the keywords `prompts`, `completions`, `completion_ids`, every dataset
column (a list with one entry per completion), `trainer_state`, `log_extra(column, values)` and `log_metric(name,
value)`, and returns one number, or None to abstain, per completion. n = completions of the call, K = reward functions.

What it does wrong has one of two consequences:
- A value that can never be right (wrong count, wrong type, nothing returned) is a mistake in the function:
  `RewardError` at once, before any update. A `RewardError` or `ConfigError` that the function raises itself passes
  through as well.
- An exception, a time-out or a number that is not finite may be the fault of one completion: those rows are FAILED.
  A failed row has no score; it is never a zero.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grupo.errors import ConfigError, DataError, RewardError
from grupo.rewards.execution.calls import (
    CallLog,
    Done,
    Function,
    Job,
    Outcome,
    call_and_wait,
    call_here,
    collect,
    quoted,
    start_in_thread,
)
from grupo.rewards.execution.fingerprint import identity
from grupo.rewards.execution.results import RewardTable, score_table
from grupo.rewards.library.reward_model import RewardModel, with_reward_models

RewardFunctions = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]

_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "prompt_texts")
RESERVED_NAMES = frozenset({*_KEYWORDS, "environments"})
"""Keywords that reward functions get from us; a dataset column of such a name could not be told apart."""

LOOP_GRACE = 2.0
"""Seconds beyond the time-out until an event loop that does not react at all is given up."""


class RewardRunner:
    """Calls reward functions and turns what they return, raise or fail to return into a `RewardTable`.

    Functions never see each other's arguments: each gets copies of all lists and dictionaries, down to the messages, so
    one that changes them changes nothing for the next one or for the caller.

    All functions of a batch run at the same time, and what they say is put together in the order in which they were
    given, whichever finishes first. A synchronous function runs in a daemon thread of its own, because a function that
    hangs cannot be stopped, only left behind. Consequences: `signal.alarm` does not work in it (Python allows signals
    in the main thread only), thread-local state such as the current CUDA device has to be set inside, and functions
    that share something (a file, the state of `random`) share it at the same time, unless marked with `run_alone`.
    `timeout=None` runs synchronous functions in the calling thread instead, one after the other and without a limit.
    Asynchronous functions run together on one event loop, which lives as long as the runner; it is not the caller's
    loop, which may be running. Reward models run in the calling thread, while it would wait for the others. What the
    caller has to do `meanwhile`, it does when only asynchronous functions, and those marked with `run_beside_scoring`,
    are still running.
    """

    def __init__(self, reward_funcs: RewardFunctions, *, timeout: float | None = 60.0) -> None:
        """
        Args:
            reward_funcs: one function or several; functions, partials, objects with `__call__`, each sync or async; or
                reward models: a transformers sequence-classification model, or the id of one (see `reward_model`).
            timeout: seconds that one call of one function may take, by its share of the time where several compute at
                once; None for no limit.

        Raises:
            ConfigError: no function, something that is not one, or a time-out that is not above 0.
        """
        functions = with_reward_models(reward_funcs)
        if not functions:
            raise ConfigError("reward_funcs is empty: give at least one reward function.")
        if timeout is not None and not 0 < timeout <= threading.TIMEOUT_MAX:
            raise ConfigError(f"reward timeout={timeout} cannot be met: give seconds above 0, or None for no limit.")
        for function in functions:
            _check_is_function(function)
        self.names = _unique_names([reward_name(function) for function in functions])
        self.timeout = timeout
        self._functions = [Function.of(function, name) for function, name in zip(functions, self.names, strict=True)]
        self.identities = {name: identity(function) for name, function in zip(self.names, functions, strict=True)}
        """name -> short hash of what the function is, before its first call."""
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
        meanwhile: Callable[[], None] | None = None,
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
            meanwhile: called once, in the calling thread, when only functions that run beside scoring may still run.

        Raises:
            RewardError: a function returned the wrong number or type of values, logged something unusable, requires a
                column that is not there, or raised a RewardError itself.
            DataError: a dataset column has a reserved name.
        """
        count = len(completions)
        if count == 0:  # a rank with nothing to score has no columns either
            if meanwhile is not None:
                meanwhile()
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
            log = CallLog(function.name, count)
            keywords = function.select(
                shared | {"trainer_state": trainer_state, "log_extra": log.extra, "log_metric": log.metric}
            )
            jobs.append(Job(function, keywords, log))
        self._run(jobs, meanwhile)
        return score_table(self.names, jobs, count)

    def prepare(self, device: Any) -> None:
        """Load reward models that were given by id, and move reward models to `device`.

        Raises:
            ConfigError: a reward model cannot be used.
        """
        for function in self._functions:
            if isinstance(function.call, RewardModel):
                function.call.prepare(device)

    @property
    def some_run_beside_scoring(self) -> bool:
        """Whether a function may still run when `meanwhile` is called."""
        return any(function.runs_beside_scoring and self._runs_on_loop(function) for function in self._functions)

    def _run(self, jobs: Sequence[Job], meanwhile: Callable[[], None] | None) -> None:
        for job in jobs:
            if job.function.runs_alone:
                self._run_together([job], None)
        self._run_together([job for job in jobs if not job.function.runs_alone], meanwhile)

    def _runs_on_loop(self, function: Function) -> bool:
        return function.is_async or (function.runs_beside_scoring and self.timeout is not None)

    def _run_together(self, jobs: Sequence[Job], meanwhile: Callable[[], None] | None) -> None:
        waited_for = [job for job in jobs if self._runs_on_loop(job.function)]
        synchronous = [job for job in jobs if job not in waited_for]
        here = [job for job in synchronous if self.timeout is None or job.function.runs_in_calling_thread]
        threads = [job for job in synchronous if job not in here]
        started = time.monotonic()
        futures = self._start_on_loop(waited_for)
        try:
            done: Done = queue.SimpleQueue()
            for job in threads:
                start_in_thread(job, done.put)
            for job in here:
                job.outcome = call_here(job)
            if self.timeout is not None:
                collect(threads, done, self.timeout, started)
            if meanwhile is not None:
                meanwhile()
            self._await(waited_for, futures, started)
        finally:
            for future in futures:
                future.cancel()

    def _start_on_loop(self, jobs: Sequence[Job]) -> list[concurrent.futures.Future[Outcome]]:
        if not jobs:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="grupo-async-rewards", daemon=True).start()
        return [asyncio.run_coroutine_threadsafe(call_and_wait(job, self.timeout), self._loop) for job in jobs]

    def _await(
        self, jobs: Sequence[Job], futures: Sequence[concurrent.futures.Future[Outcome]], started: float
    ) -> None:
        for job, future in zip(jobs, futures, strict=True):
            limit = None if self.timeout is None else started + self.timeout + LOOP_GRACE - time.monotonic()
            try:
                job.outcome = future.result(None if limit is None else max(limit, 0.0))
            except concurrent.futures.TimeoutError:
                # A function blocks the loop itself. It cannot be stopped: the next call gets a new loop.
                job.outcome = Outcome(timed_out=self.timeout)
                self._loop = None


def run_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward function as one that must not run while others of the batch do; usable as a decorator.

    For functions that share something which is not safe to share between threads. They run before the others, in the
    order given. A class of reward functions says the same with `runs_alone = True`. A function that ran out of time and
    was left behind may still be running.
    """
    function.runs_alone = True  # type: ignore[attr-defined]
    return function


def run_beside_scoring(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a synchronous reward function as one that may still run while the trainer computes log-probs; usable as a
    decorator.

    For functions that wait for a server or for other processes, and that do not use the model that is trained: its
    attention and its weights are others meanwhile. Asynchronous functions do so without a mark; `run_alone` takes it
    from them. A class of reward functions says the same with `runs_beside_scoring = True`.
    """
    function.runs_beside_scoring = True  # type: ignore[attr-defined]
    return function


def check_column_names(columns: Iterable[str]) -> None:
    """Raise `DataError` if a dataset column has the name of a keyword that reward functions get from us."""
    clashes = sorted(RESERVED_NAMES.intersection(columns))
    if clashes:
        raise DataError(
            f"Dataset column {quoted(clashes)} cannot be handed to reward functions: they get a keyword of this name "
            "from the trainer. Rename or remove the column."
        )


def reward_name(function: Callable[..., Any]) -> str:
    """The metric name of a reward function: its `__name__`, a partial's inner name, or an object's class name."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    name = name if isinstance(name, str) else type(function).__name__
    return "lambda" if name == "<lambda>" else name


def _check_is_function(function: Any) -> None:
    while isinstance(function, functools.partial):
        function = function.func
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
