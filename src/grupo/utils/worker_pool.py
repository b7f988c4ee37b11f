"""A pool of processes for functions that may run for ever, use all memory, or crash.

Workers are fresh interpreters, started by `subprocess` and not by `multiprocessing`: so they can be started from any
thread, event loop or daemonic process, and the program's main module is not run again. A worker that exceeds a limit is
killed and replaced. No worker outlives the program:

- When the program ends, or the pool is closed or dropped, workers are killed.
- However the program ends, an idle worker sees its connection close, and a busy one notices within half a second that
  its parent is gone. Code that never lets another thread run (one huge power of Python integers) is ended by an alarm,
  a second after its time limit.

The memory limit is the address space of the worker (`RLIMIT_AS`), interpreter and libraries included. Linux enforces
it; macOS does not, and there only the time limit holds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from grupo.errors import ConfigError, RewardError

START_LIMIT = 60.0
"""Seconds that a worker may take to start and to import its function; they do not count for its first item."""
ALARM_GRACE = 1.0
"""Seconds after the time limit at which a worker that nobody watches any more ends itself."""
PARENT_CHECK = 0.5
"""Seconds between two checks of a worker that its parent is alive."""

MEMORY_IS_LIMITED = sys.platform.startswith("linux")
"""Whether this platform enforces `memory_mb`."""


@dataclass(frozen=True)
class WorkerResult:
    """How one item ended."""

    status: Literal["done", "error", "timeout", "memory", "died"]
    """`error`: the function raised; `died`: the worker ended without an answer, as after a crash of C code."""
    value: Any = None
    """Return value of the function."""
    message: str = ""
    """Reason why there is no value."""


class WorkerPool:
    """Calls a function with each of many items, in processes with a time limit and a memory limit for each item.

    Workers start with the first items and stay until `close()`. Calls from several threads share them. A copy, made by
    pickling or by a fork of the process, has workers of its own.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        timeout: float,
        memory_mb: int = 1024,
        workers: int | None = None,
        prepare: Callable[[], Any] | None = None,
        items_per_worker: int = 5000,
    ) -> None:
        """
        Args:
            function: of one argument, importable by name. Items and results are pickled.
            timeout: wall-clock seconds for one item.
            memory_mb: MiB of address space of a worker (see the head of this module).
            workers: maximum number of processes; None for one per CPU that this process may use, 4 at most.
            prepare: called once in each new worker, for imports and caches that should not count for the first item.
            items_per_worker: number of items after which a worker is replaced, because caches of libraries may grow.

        Raises:
            ConfigError: a limit that is not above 0, or a function that a worker cannot import.
        """
        for name, value in (("timeout", timeout), ("memory_mb", memory_mb), ("items_per_worker", items_per_worker)):
            if not 0 < value < threading.TIMEOUT_MAX:
                raise ConfigError(f"{name}={value} is not a limit that a worker can meet: set a number above 0.")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} leaves no process to work: set 1 or more, or None for one per CPU.")
        self._workers = workers or min(4, available_cpus())
        self._items_per_worker = items_per_worker
        self._timeout = timeout
        self._setup = pickle.dumps((_pickled(function, prepare), timeout, memory_mb))
        self._reset()

    def map(self, items: Iterable[Any]) -> list[WorkerResult]:
        """The results for all items, in their order.

        Raises:
            RewardError: a worker cannot start.
        """
        messages = deque(enumerate(pickle.dumps(item) for item in items))
        if self._process != os.getpid():  # this is a fork: the workers belong to the parent
            self._reset()
        results: list[WorkerResult] = [WorkerResult("died")] * len(messages)
        busy: dict[Connection, _Worker] = {}
        try:
            while messages or busy:
                while messages and (worker := self._take(block=not busy)):
                    busy[worker.connection] = worker
                    worker.begin(*messages.popleft())
                patience = min(worker.deadline for worker in busy.values()) - time.monotonic()
                answered = wait(list(busy), max(patience, 0.0))
                for worker in list(busy.values()):
                    result = worker.result(worker.connection in answered)
                    if result is not None:
                        results[worker.index] = result
                        self._give_back(busy.pop(worker.connection), reuse=result.status in ("done", "error"))
        finally:
            for worker in busy.values():
                self._give_back(worker, reuse=False)
        return results

    def close(self) -> None:
        """Kill all workers. The items that they are working on are lost; later calls start new workers."""
        if self._process != os.getpid():
            return
        live = list(self._live)
        self._live.clear()
        for worker in live:  # one that is busy is ended by the thread that waits for it
            worker.kill()
        while self._idle:
            self._idle.pop().end()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("_workers", "_items_per_worker", "_timeout", "_setup")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def _reset(self) -> None:
        """Begin without any worker, in the current process."""
        self._process = os.getpid()
        self._live: set[_Worker] = set()
        self._idle: deque[_Worker] = deque()
        """Workers that can be taken: from the right; those that are still starting are on the left."""
        self._slots = threading.BoundedSemaphore(self._workers)
        weakref.finalize(self, _end_all, self._live, self._process)

    def _take(self, block: bool) -> _Worker | None:
        """An idle worker, or a new one; None if all are in use and `block` is False."""
        if not self._slots.acquire(blocking=block):
            return None
        try:
            with contextlib.suppress(IndexError):
                while worker := self._idle.pop():
                    if not (worker.ready and worker.connection.poll()):
                        return worker
                    self._end(worker)  # it has nothing to say while it is idle: it has died
            return self._start()
        except BaseException:
            self._slots.release()
            raise

    def _give_back(self, worker: _Worker, reuse: bool) -> None:
        """Take a worker back; one that is not used again is replaced at once, so that the next call finds one."""
        try:
            is_wanted = worker in self._live  # else the pool was closed
            if reuse and is_wanted and worker.items < self._items_per_worker:
                self._idle.append(worker)
            else:
                self._end(worker)
                if is_wanted and worker.ready:
                    self._idle.appendleft(self._start())
        finally:
            self._slots.release()

    def _start(self) -> _Worker:
        worker = _Worker(self._setup, self._timeout)
        self._live.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        self._live.discard(worker)
        worker.end()


class _Worker:
    """One process and the connection to it, used by one thread at a time."""

    def __init__(self, setup: bytes, timeout: float) -> None:
        self.connection, theirs = Pipe()
        try:
            # A session of its own: Ctrl-C in the terminal is for the program, which decides about its workers.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), str(os.getpid()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.connection.send_bytes(setup)
        self.timeout = timeout
        self.ready = False
        self.items = 0
        self.index = 0
        self.deadline = 0.0
        self._message = b""

    def begin(self, index: int, message: bytes) -> None:
        self.index, self._message = index, message
        self.items += 1
        self.deadline = time.monotonic() + START_LIMIT
        if self.ready:
            self._send()

    def result(self, has_answered: bool) -> WorkerResult | None:
        """The result of the current item; None while there is none."""
        if not has_answered:
            if time.monotonic() < self.deadline:
                return None
            if not self.ready:
                raise RewardError(f"A worker did not start within {START_LIMIT:g} s.")
            return WorkerResult("timeout", message=f"stopped after {self.timeout:g} s")
        try:
            reply = self.connection.recv()
        except (EOFError, OSError):
            status = self.end()
            if not self.ready:
                raise RewardError(f"A worker ended while it was starting (exit status {status}).") from None
            return WorkerResult("died", message=f"the worker ended with exit status {status}")
        if self.ready:
            return WorkerResult(*reply)
        if reply:
            raise RewardError(f"A worker cannot start:\n{reply}")
        self.ready = True
        self._send()
        return None

    def kill(self) -> None:
        """Kill the process and its children; whoever waits for it sees its connection close."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:  # until then the id is ours, even if the process has ended
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        self.kill()
        self.connection.close()
        return self.process.wait()

    def _send(self) -> None:
        self.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # it has died, which `result` will find
            self.connection.send_bytes(self._message)


def available_cpus() -> int:
    """Number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pickled(function: Callable[[Any], Any], prepare: Callable[[], Any] | None) -> bytes:
    try:
        functions = pickle.dumps((function, prepare))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"A worker cannot import {function!r:.80} ({error}); give a function of a module.") from None
    if b"__main__" in functions:
        raise ConfigError(
            f"A worker cannot import {function!r:.80}: it is defined in the main module of the program, which workers "
            "do not run again. Move it to a module of its own."
        )
    return functions


def _end_all(workers: set[_Worker], process: int) -> None:
    if process == os.getpid():  # a fork must leave its parent's workers alone
        for worker in list(workers):
            worker.end()


# In the worker -------------------------------------------------------------------------------------------------------

_BOOTSTRAP = (
    "import sys; descriptor, parent = map(int, sys.argv[1:3]); sys.path[:] = sys.argv[3:]; sys.argv[1:] = []; "
    "from grupo.utils.worker_pool import serve; serve(descriptor, parent)"
)


def serve(descriptor: int, parent: int) -> None:
    """The main loop of a worker: read an item, call the function, answer, until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # without a handler in Python, the alarm ends the process at once
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        functions, timeout, memory_mb = pickle.loads(connection.recv_bytes())
        try:
            if MEMORY_IS_LIMITED:
                import resource

                resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
            function, prepare = pickle.loads(functions)
            if prepare is not None:
                prepare()
        except BaseException:
            connection.send(traceback.format_exc())
            return
        connection.send("")
        status = "done"
        while status != "memory":  # a failed allocation leaves things half done, which are not to be trusted
            message = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_REAL, timeout + ALARM_GRACE)
            status, reply = _call(function, message)
            connection.send_bytes(reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (EOFError, OSError):
        return  # the program has ended


def _call(function: Callable[[Any], Any], message: bytes) -> tuple[str, bytes]:
    """The fence around the function: its status and the pickled reply."""
    try:
        return "done", pickle.dumps(("done", function(pickle.loads(message)), ""))
    except MemoryError:
        return "memory", pickle.dumps(("memory", None, "the memory limit was reached"))
    except BaseException as error:  # also SystemExit, and results that cannot be pickled
        return "error", pickle.dumps(("error", None, f"{type(error).__name__}: {error}"[:1000]))


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    os._exit(1)
