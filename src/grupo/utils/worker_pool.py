"""A pool of processes for functions that may run for ever, take all memory, or crash.

Workers are fresh interpreters (never forks), started by `subprocess` and not by `multiprocessing`: so they can be
started from any thread, from an event loop and from a daemonic process, and the program's main module is not run again.
A worker that exceeds a limit is killed and replaced. Nothing outlives the program:

- At its end, or when the pool is closed or dropped, workers are killed.
- However it ends, an idle worker sees its connection close, and a busy one sees within half a second that its parent
  is gone. Code that never lets another thread run (one huge power of Python integers) is ended by an alarm of its own,
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
"""Seconds beyond the time limit after which a worker that nobody watches any more ends itself."""
PARENT_CHECK = 0.5
"""Seconds between two looks of a worker at whether its parent is alive."""

MEMORY_IS_LIMITED = sys.platform.startswith("linux")
"""Whether this platform enforces `memory_mb`."""


@dataclass(frozen=True)
class WorkerResult:
    """What became of one item."""

    status: Literal["done", "error", "timeout", "memory", "died"]
    """`error`: the function raised; `died`: the worker ended without an answer, as after a crash of C code."""
    value: Any = None
    """What the function returned."""
    message: str = ""
    """Why there is no value."""


class WorkerPool:
    """Runs a function for each of many items, in processes with a time limit and a memory limit for each item.

    Workers start with the first items and stay until `close()`. Calls from several threads share them. A process that
    was forked off this one gets workers of its own.
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
            workers: processes at most; None for one per CPU that this process may use, 4 at most.
            prepare: called once in each new worker, for imports and caches that should not count for the first item.
            items_per_worker: a worker is replaced after so many items, because caches of libraries may grow.

        Raises:
            ConfigError: a limit that is not above 0, or a function that a worker cannot import.
        """
        for name, value in (("timeout", timeout), ("memory_mb", memory_mb), ("items_per_worker", items_per_worker)):
            if not 0 < value < threading.TIMEOUT_MAX:
                raise ConfigError(f"{name}={value} cannot be met by a worker: give a number above 0.")
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} can do nothing: give 1 or more, or None for one per CPU.")
        self.timeout = timeout
        self.workers = workers or min(4, available_cpus())
        self._items_per_worker = items_per_worker
        self._setup = _pickled_functions(function, prepare, timeout, memory_mb)
        self._own()

    def map(self, items: Iterable[Any]) -> list[WorkerResult]:
        """The results for all items, in their order.

        Raises:
            RewardError: a worker cannot start, or the pool is closed.
        """
        messages = deque(enumerate(pickle.dumps(item) for item in items))
        if self._process != os.getpid():  # we are a fork: the workers belong to the parent
            self._own()
        results: list[WorkerResult] = [WorkerResult("died")] * len(messages)
        busy: dict[Connection, _Worker] = {}
        try:
            while messages or busy:
                while messages and (worker := self._take(block=not busy)):
                    busy[worker.connection] = worker
                    worker.begin(*messages.popleft(), self.timeout)
                patience = min(worker.deadline for worker in busy.values()) - time.monotonic()
                answered = wait(list(busy), max(patience, 0.0))
                for worker in list(busy.values()):
                    if worker.connection in answered:
                        result = worker.receive(self.timeout)
                    elif time.monotonic() >= worker.deadline:
                        result = worker.expired(self.timeout)
                    else:
                        result = None
                    if result is not None:
                        results[worker.index] = result
                        self._give(busy.pop(worker.connection), reuse=result.status in ("done", "error"))
        finally:
            for worker in busy.values():
                self._give(worker, reuse=False)
        return results

    def close(self) -> None:
        """Kill all workers. Calls that are waiting for one raise a RewardError."""
        if self._process != os.getpid():
            return
        self._closed = True
        with self._change:
            idle = [worker for worker in self._free if worker]
            self._free[:] = [None] * len(self._free)
            self._change.notify_all()
        for worker in idle:
            self._end(worker)
        for worker in list(self._live):  # busy for another thread, which cleans up when it sees the end
            worker.stop()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self) -> None:
        """Start without any worker, as the process that runs now."""
        self._process = os.getpid()
        self._closed = False
        self._live: set[_Worker] = set()
        self._free: list[_Worker | None] = [None] * self.workers
        """Workers that nobody uses; None for each that has not been started."""
        self._change = threading.Condition()
        weakref.finalize(self, _stop_all, self._live, self._process)

    def _take(self, block: bool) -> _Worker | None:
        """A worker that nobody uses, started if need be; None if there is none and `block` is False."""
        with self._change:
            while not self._free:
                if not block:
                    return None
                self._change.wait()
            worker = max(self._free, key=lambda worker: 0 if worker is None else 1 + worker.ready)
            self._free.remove(worker)
        try:
            if worker is not None and worker.ready and worker.connection.poll():  # it has nothing to say: it has died
                self._end(worker)
                worker = None
            return worker or self._start()
        except BaseException:
            self._put(None)
            raise

    def _give(self, worker: _Worker, reuse: bool) -> None:
        """Take a worker back; one that is not to be used again is replaced at once, so that the next call finds one."""
        if reuse and worker.items < self._items_per_worker and not self._closed:
            self._put(worker)
            return
        self._end(worker)
        try:
            replacement = None if self._closed or not worker.ready else self._start()
        except BaseException:
            self._put(None)
            raise
        self._put(replacement)

    def _put(self, worker: _Worker | None) -> None:
        with self._change:
            self._free.append(worker)
            self._change.notify()

    def _start(self) -> _Worker:
        if self._closed:
            raise RewardError("The worker pool is closed.")
        worker = _Worker(self._setup)
        self._live.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        self._live.discard(worker)
        worker.end()


class _Worker:
    """One process and the connection to it, used by one thread at a time."""

    def __init__(self, setup: bytes) -> None:
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
        self.ready = False
        self.items = 0
        self.index = 0
        self.deadline = 0.0
        self._message = b""

    def begin(self, index: int, message: bytes, timeout: float) -> None:
        self.index, self._message = index, message
        self.items += 1
        self.deadline = time.monotonic() + START_LIMIT
        if self.ready:
            self._send(timeout)

    def receive(self, timeout: float) -> WorkerResult | None:
        """The result that has arrived; None if the worker has only become ready for its first item."""
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
        self._send(timeout)
        return None

    def expired(self, timeout: float) -> WorkerResult:
        if not self.ready:
            raise RewardError(f"A worker did not start within {START_LIMIT:g} s.")
        return WorkerResult("timeout", message=f"stopped after {timeout:g} s")

    def stop(self) -> None:
        """Kill the process and what it has started; the one who waits for it sees its connection close."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:  # until then the id is ours, even if the process has ended
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        self.stop()
        self.connection.close()
        return self.process.wait()

    def _send(self, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):  # it has died, which `receive` will find
            self.connection.send_bytes(self._message)


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pickled_functions(
    function: Callable[[Any], Any], prepare: Callable[[], Any] | None, timeout: float, memory_mb: int
) -> bytes:
    try:
        setup = pickle.dumps((function, prepare))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"A worker cannot import {function!r:.80} ({error}); give a function of a module.") from None
    if b"__main__" in setup:
        raise ConfigError(
            f"A worker cannot import {function!r:.80}: it belongs to the program that is run, which workers do not run "
            "again. Move it to a module of its own."
        )
    return pickle.dumps((setup, timeout, memory_mb))


def _stop_all(workers: set[_Worker], process: int) -> None:
    if process == os.getpid():  # a fork must leave its parent's workers alone
        for worker in list(workers):
            worker.end()


# In the worker -------------------------------------------------------------------------------------------------------

_BOOTSTRAP = (
    "import sys; descriptor, parent = map(int, sys.argv[1:3]); sys.path[:] = sys.argv[3:]; sys.argv[1:] = []; "
    "from grupo.utils.worker_pool import serve; serve(descriptor, parent)"
)


def serve(descriptor: int, parent: int) -> None:
    """The life of a worker: read an item, run the function, answer, until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # without a handler in Python, the alarm ends the process at once
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        functions, timeout, memory_mb = pickle.loads(connection.recv_bytes())
        try:
            _limit_memory(memory_mb)
            function, prepare = pickle.loads(functions)
            if prepare is not None:
                prepare()
        except BaseException:
            connection.send(traceback.format_exc())
            return
        connection.send("")
        status = "done"
        while status != "memory":  # what a failed allocation has left half done is not to be trusted
            message = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_REAL, timeout + ALARM_GRACE)
            status, reply = _answer(function, message)
            connection.send_bytes(reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (EOFError, OSError):
        return  # the program has ended


def _answer(function: Callable[[Any], Any], message: bytes) -> tuple[str, bytes]:
    """The fence around the function: its status and the pickled reply."""
    try:
        return "done", pickle.dumps(("done", function(pickle.loads(message)), ""))
    except MemoryError:
        return "memory", pickle.dumps(("memory", None, "the memory limit was reached"))
    except BaseException as error:  # also SystemExit, and results that cannot be pickled
        return "error", pickle.dumps(("error", None, f"{type(error).__name__}: {error}"[:1000]))


def _limit_memory(memory_mb: int) -> None:
    if MEMORY_IS_LIMITED:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    os._exit(1)
