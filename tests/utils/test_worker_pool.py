"""The worker pool: limits hold, nothing is left behind, and it works from wherever it is called."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import worker_functions as functions
from grupo.errors import ConfigError, RewardError
from grupo.utils import worker_pool as workers
from grupo.utils.worker_pool import MEMORY_IS_LIMITED, WorkerPool

LIMIT = 0.5


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(functions.behave, timeout=LIMIT, memory_mb=256, workers=2) as pool:
        yield pool


reads_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes in /proc")


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def children() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(path.parent.name))
    return found


def test_results_come_in_the_order_of_the_items() -> None:
    with WorkerPool(functions.double, timeout=5.0, workers=2) as pool:
        assert [result.value for result in pool.map(range(200))] == [2 * item for item in range(200)]
        assert pool.map([]) == []
        (big,) = pool.map(["x" * 10**6])
        assert big.status == "done" and len(big.value) == 2 * 10**6


@pytest.mark.parametrize(
    ("item", "status", "message"),
    [
        (("raise", "no"), "error", "ValueError: no"),
        (("exit", 3), "error", "SystemExit: 3"),
        (("unpicklable", 0), "error", "pickle"),
        (("nest", 0), "error", "RecursionError"),
        (("sleep", 30), "timeout", "stopped after 0.5 s"),
        (("spin", 9), "timeout", "stopped after 0.5 s"),
        (("crash", 0), "died", "exit status -11"),
    ],
)
def test_what_goes_wrong_is_named_and_the_next_item_is_served(
    pool: WorkerPool, item: Any, status: str, message: str
) -> None:
    pool.map([("return", 0)])  # the start of a worker does not count
    started = time.monotonic()
    (result,) = pool.map([item])
    assert time.monotonic() - started < LIMIT + 1
    assert result.status == status and message in result.message and result.value is None
    assert [result.value for result in pool.map([("return", 1), ("return", 2)])] == [1, 2]


@pytest.mark.skipif(not MEMORY_IS_LIMITED, reason="this platform limits no memory")
def test_the_memory_limit_holds(pool: WorkerPool) -> None:
    too_much, fits = pool.map([("allocate", 300), ("allocate", 50)])
    assert too_much.status == "memory" and too_much.value is None
    assert fits.value == 50 * 2**20


def test_one_item_over_the_limit_costs_no_other_item() -> None:
    with WorkerPool(functions.behave, timeout=LIMIT, workers=2) as pool:
        items = [("return", 1), ("sleep", 30), ("return", 2), ("crash", 0), *[("return", 3)] * 20]
        statuses = [result.status for result in pool.map(items)]
        assert statuses == ["done", "timeout", "done", "died", *["done"] * 20]


def test_the_start_of_a_worker_does_not_count_and_prepare_runs_once() -> None:
    with WorkerPool(functions.prepared, prepare=functions.prepare_slowly, timeout=0.2, workers=1) as pool:
        first, second = pool.map([0, 0])
        assert len(first.value) == 1 and first.value == second.value != [os.getpid()]


def test_a_worker_that_cannot_start_is_an_error() -> None:
    with WorkerPool(functions.double, prepare=functions.refuse, timeout=1.0) as pool:
        for _ in range(3):
            with pytest.raises(RewardError, match="no such library here"):
                pool.map([1])


@pytest.mark.parametrize("limits", [{"timeout": 0}, {"timeout": float("nan")}, {"memory_mb": 0}, {"workers": 0}])
def test_limits_that_cannot_be_met_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        WorkerPool(functions.double, **{"timeout": 1.0, **limits})


def test_functions_that_a_worker_cannot_import_are_refused() -> None:
    with pytest.raises(ConfigError, match="give a function of a module"):
        WorkerPool(lambda item: item, timeout=1.0)
    program = (
        "from grupo.utils.worker_pool import WorkerPool\ndef f(item): return item\n"
        "try: WorkerPool(f, timeout=1.0)\nexcept ValueError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert "defined in the main module of the program" in result.stdout


def test_calls_from_many_threads_share_the_workers() -> None:
    with WorkerPool(functions.process_id, timeout=5.0, workers=2) as pool:
        found: list[int] = []
        run_in_threads([lambda: found.extend(result.value for result in pool.map(range(4)))] * 6)
        assert len(found) == 24 and len(set(found)) <= 2


def run_in_threads(calls: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def map_in_child(pool: WorkerPool, connection: Any) -> None:
    connection.send([result.value for result in pool.map([1, 2, 3])])


@reads_proc
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_same_from_thread_event_loop_and_daemonic_fork() -> None:
    with WorkerPool(functions.double, timeout=5.0, workers=2) as pool:
        expected = [result.value for result in pool.map([1, 2, 3])]
        assert expected == [2, 4, 6]

        async def on_loop() -> list[Any]:
            return [result.value for result in pool.map([1, 2, 3])]

        assert asyncio.run(on_loop()) == expected
        from_thread: list[Any] = []
        run_in_threads([lambda: from_thread.extend(result.value for result in pool.map([1, 2, 3]))])
        assert from_thread == expected
        before = children()
        ours, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork").Process(target=map_in_child, args=(pool, theirs), daemon=True)
        fork.start()
        assert ours.poll(20) and ours.recv() == expected
        fork.join(10)
        assert fork.exitcode == 0
        assert children() == before, "the fork left its parent's workers alone"
        assert [result.value for result in pool.map([1, 2, 3])] == expected
        with pickle.loads(pickle.dumps(pool)) as copy:
            assert [result.value for result in copy.map([1, 2, 3])] == expected


@reads_proc
def test_workers_are_replaced_in_time_and_do_not_pile_up() -> None:
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    with WorkerPool(functions.process_id, timeout=5.0, workers=1, items_per_worker=2) as pool:
        ids = [result.value for result in pool.map(range(6))]
        assert len(set(ids)) == 3 and ids[0] == ids[1] != ids[2]
        assert len(children() - before) <= 1
    assert children() <= before and len(os.listdir("/proc/self/fd")) == descriptors


@reads_proc
def test_thousands_of_items_leave_nothing_behind() -> None:
    with WorkerPool(functions.double, timeout=5.0, workers=2) as pool:
        pool.map(range(10))
        gc.collect()
        processes, descriptors, threads = children(), len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            assert len(pool.map(range(1000))) == 1000
        assert children() == processes
        assert len(os.listdir("/proc/self/fd")) == descriptors and threading.active_count() == threads


@reads_proc
def test_close_ends_workers_also_busy_ones_and_the_next_call_starts_new_ones(tmp_path: Path) -> None:
    before = children()
    pool = WorkerPool(functions.behave, timeout=30.0, workers=1)
    outcome: list[Any] = []
    busy = threading.Thread(target=lambda: outcome.append(pool.map([("mark and sleep", str(tmp_path / "busy"))])))
    busy.start()
    assert eventually((tmp_path / "busy").exists, 20)
    pool.close()
    pool.close()
    busy.join(5)
    assert not busy.is_alive() and outcome[0][0].status == "died"
    assert children() <= before
    assert pool.map([("return", 1)])[0].value == 1
    pool.close()
    assert children() <= before


@reads_proc
def test_a_dropped_pool_ends_its_workers() -> None:
    before = children()
    pool = WorkerPool(functions.double, timeout=5.0, workers=1)
    pool.map([1])
    assert children() - before
    del pool
    gc.collect()
    assert children() <= before


def test_an_interrupted_call_leaves_a_pool_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(functions.behave, timeout=20.0, workers=1) as pool:
        pool.map([("return", 0)])
        with monkeypatch.context() as patch:
            patch.setattr(workers, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.map([("sleep", 1)])
        assert pool.map([("return", 5)])[0].value == 5, "and never the answer to the interrupted item"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    with WorkerPool(functions.process_id, timeout=5.0, workers=1) as pool:
        (first,) = pool.map([0])
        os.kill(first.value, signal.SIGKILL)
        time.sleep(0.1)
        (second,) = pool.map([0])
        assert second.status == "done" and second.value != first.value


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


PARENT = """
import os, sys, threading
from grupo.utils.worker_pool import WorkerPool
from worker_functions import write_and_hang
pool = WorkerPool(write_and_hang, timeout=float(sys.argv[4]), workers=1)
call = lambda: pool.map([(sys.argv[1], sys.argv[2])])
thread = threading.Thread(target=call, daemon=True)
thread.start()
while not os.path.exists(sys.argv[1]):
    pass
if sys.argv[3] == "exit":
    sys.exit(0)
if sys.argv[3] == "raise":
    raise ValueError
if sys.argv[3] == "kill":
    os.kill(os.getpid(), 9)
os._exit(1)
"""


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    """All parents at once, as each takes a second to start."""
    cases = {}
    for how in ("sleep", "python", "c"):
        for end in ("exit", "raise", "kill", "abandon"):
            path, limit = tmp_path / f"{how}-{end}", 1.0 if how == "c" else 600.0
            command = [sys.executable, "-c", PARENT, str(path), how, end, str(limit)]
            cases[path] = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    for parent in cases.values():
        parent.wait(30)
    # Code that holds the interpreter lock ends by its own alarm, a second after its limit.
    alive = {int(path.read_text()): path.name for path in cases}
    assert eventually(lambda: not any(map(is_alive, alive)), 1.0 + workers.ALARM_GRACE + 1.0), alive


def test_an_idle_worker_does_not_outlive_its_parent() -> None:
    program = (
        "import os; from grupo.utils.worker_pool import WorkerPool; from worker_functions import process_id\n"
        "pool = WorkerPool(process_id, timeout=5.0, workers=1); print(pool.map([0])[0].value, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert eventually(lambda: not is_alive(int(result.stdout)), 2.0)
