"""The contract of reward functions: what they get, what they may return, and what becomes of everything else."""

from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from grupo.errors import ConfigError, DataError, RewardError
from grupo.rewards import (
    RewardRunner,
    RewardTable,
    check_column_names,
    exclusive,
    overlap_with_logprobs,
    run_alone,
    run_beside_scoring,
)
from grupo.rewards.execution import runner
from grupo.types import RewardStatus

SCORED, ABSTAINED, FAILED = RewardStatus.SCORED, RewardStatus.ABSTAINED, RewardStatus.FAILED


def run(
    functions: Any,
    count: int = 8,
    columns: dict[str, list[Any]] | None = None,
    timeout: float | None = 20.0,
    **rest: Any,
) -> RewardTable:
    return RewardRunner(functions, timeout=timeout).score(
        prompts=[f"p{row}" for row in range(count)],
        completions=[f"c{row}" for row in range(count)],
        completion_ids=[[row] for row in range(count)],
        columns=columns or {},
        **rest,
    )


def score_one(rewards: RewardRunner) -> RewardTable:
    return rewards.score(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={})


def returning(value: Any) -> Callable[..., Any]:
    def graded(**columns: Any) -> Any:
        return value

    return graded


# What may be returned: TRL issue 6533

PLAIN = [0.0, 1.0, 0.5, -2.0, 0.25, 3.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        PLAIN,
        tuple(PLAIN),
        [np.float32(v) for v in PLAIN],
        [np.array(v) for v in PLAIN],
        [torch.tensor(v) for v in PLAIN],
        [Fraction(v) for v in PLAIN],
        [Decimal(str(v)) for v in PLAIN],
        np.array(PLAIN, dtype=np.float32),
        np.array(PLAIN, dtype=object),
        torch.tensor(PLAIN),
        torch.tensor(PLAIN, dtype=torch.bfloat16),
        torch.tensor(PLAIN, requires_grad=True) * 1.0,
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', type(value[0]).__name__)}",
)
def test_valid_forms_are_the_plain_list(value: Any) -> None:
    table = run(returning(value))
    assert table.scores == [(v,) for v in PLAIN]
    assert all(type(score) is float for (score,) in table.scores)
    assert table.statuses == [(SCORED,)] * 8
    assert table.failures == ()


@pytest.mark.parametrize(
    "value", [[1, 0, 1], [True, False, True], np.array([1, 0, 1]), torch.tensor([True, False, True])]
)
def test_integers_and_booleans_are_numbers(value: Any) -> None:
    assert run(returning(value), count=3).scores == [(1.0,), (0.0,), (1.0,)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "returned 1 reward for 8 completions"),
        ([1.0] * 7, "returned 7 rewards for 8"),
        ([1.0] * 9, "returned 9 rewards for 8"),
        ([], "returned 0 rewards for 8"),
        (np.ones(7), "returned 7 rewards for 8"),
        (1.0, "returned a float; it must return a list of 8"),
        (np.float32(1.0), r"array of shape \(\)"),
        (torch.tensor(1.0), r"array of shape \(\)"),
        (torch.ones(8, 1), r"shape \(8, 1\).*shape \(8,\).*\.squeeze\(1\)"),
        (np.ones((8, 1)), r"\.squeeze\(1\)"),
        (np.ones((1, 8)), r"shape \(1, 8\)"),
        ([[1.0]] * 8, r"returned a list \(\[1.0\]\) as reward 0"),
        ([torch.ones(1)] * 8, "returned a Tensor .* as reward 0"),
        ([1.0] * 7 + ["1.0"], r"returned a str \('1.0'\) as reward 7"),
        ([1.0] * 7 + [1j], "returned a complex .* as reward 7"),
        (np.ones(8, dtype=complex), "returned a complex .* as reward 0"),
        ("11111111", "returned a str; it must"),
        (dict.fromkeys(range(8), 1.0), "returned a dict; it must"),
        ((1.0 for _ in range(8)), "returned a generator; it must"),
        (None, "returned None instead of a list of 8.*lack a return"),
    ],
)
def test_what_can_never_be_right_names_function_and_counts(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"Reward function 'graded' {message}|Reward function 'graded'.*{message}"):
        run([returning(PLAIN), returning(value)][1:])


def test_a_plain_function_that_returns_a_coroutine_is_told_about_async() -> None:
    async def judge(**columns: Any) -> list[float]:
        return [1.0] * 8

    with pytest.raises(RewardError, match="async def"):
        run(lambda **columns: judge(**columns))


# Abstentions and numbers that are not finite: ms-swift issue 8123, TRL PR 3079


def test_nothing_to_score_needs_no_columns() -> None:
    """As on a rank without completions in an evaluation of fewer prompts than ranks."""

    def needs(completions: list[str], answer: list[int]) -> list[float]:
        raise AssertionError

    seen: list[int] = []
    table = run(needs, count=0, while_waiting=lambda: seen.append(1))
    assert table.scores == [] == table.statuses and table.failures == () and table.names == ("needs",) and seen


def test_none_abstains_and_is_no_failure() -> None:
    table = run([returning([1.0, None, 0.0, 1.0]), returning([0.0, 0.5, 0.5, None])], count=4)
    assert table.scores == [(1.0, 0.0), (None, 0.5), (0.0, 0.5), (1.0, None)]
    assert table.statuses == [(SCORED, SCORED), (ABSTAINED, SCORED), (SCORED, SCORED), (SCORED, ABSTAINED)]
    assert table.failures == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, Decimal("sNaN")])
def test_no_finite_number_fails_its_row_only_and_is_named(value: Any) -> None:
    table = run(returning([1.0, value, 0.0]), count=3)
    assert table.scores == [(1.0,), (None,), (0.0,)]
    assert table.statuses == [(SCORED,), (FAILED,), (SCORED,)]
    (failure,) = table.failures
    assert (failure.name, failure.kind, failure.indices) == ("graded", "non_finite", (1,))
    assert "completion 1," in failure.message and "1 of 3" in failure.message


# Exceptions and time-outs


def test_an_exception_fails_the_function_and_not_the_others() -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise KeyError("gold")

    table = run([broken, returning([1.0, 0.0])], count=2)
    assert table.scores == [(None, 1.0), (None, 0.0)] and table.statuses == [(FAILED, SCORED)] * 2
    (failure,) = table.failures
    assert (failure.name, failure.kind, failure.indices) == ("broken", "exception", (0, 1))
    assert "KeyError: 'gold'" in failure.message
    assert 'raise KeyError("gold")' in failure.traceback and "execution/calls.py" not in failure.traceback


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_any_exception_is_a_failure_and_not_the_end_of_the_run(timeout: float | None) -> None:
    """A thread that died of an exception would be waited for, and be called a time-out."""

    def exits(**columns: Any) -> None:
        sys.exit(3)

    def raises(**columns: Any) -> Any:
        raise Unspeakable

    exit_, unspeakable = run([exits, raises], timeout=timeout).failures
    assert exit_.kind == unspeakable.kind == "exception" and "SystemExit: 3" in exit_.message
    assert "Unspeakable: its message cannot be shown" in unspeakable.message


def test_a_function_that_does_not_return_is_left_behind_and_named() -> None:
    release = threading.Event()

    def hangs(log_metric: Any, **columns: Any) -> list[float]:
        release.wait(20)
        log_metric("late", 1.0)
        return [1.0, 1.0]

    started = time.monotonic()
    table = run([hangs, returning([1.0, 0.0])], count=2, timeout=0.2)
    release.set()
    assert time.monotonic() - started < 5
    assert table.scores == [(None, 1.0), (None, 0.0)]
    (failure,) = table.failures
    assert (failure.name, failure.kind, failure.indices) == ("hangs", "timeout", (0, 1))
    assert "0.2 s" in failure.message
    assert table.metrics == {}


def test_asynchronous_time_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOP_GRACE", 0.3)
    release = threading.Event()
    calls: list[int] = []

    async def slow(**columns: Any) -> list[float]:
        await asyncio.sleep(20)
        return [1.0]

    async def own_timeout(**columns: Any) -> list[float]:
        await asyncio.wait_for(asyncio.sleep(20), timeout=0.01)
        return [1.0]

    async def good(**columns: Any) -> list[float]:
        return [1.0]

    async def blocks_once(**columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 1:
            release.wait(20)
        return [1.0]

    table = run([slow, own_timeout, good], count=1, timeout=0.3)
    assert table.statuses == [(FAILED, FAILED, SCORED)]
    assert [(one.name, one.kind) for one in table.failures] == [("slow", "timeout"), ("own_timeout", "exception")]
    blocked = RewardRunner([blocks_once], timeout=0.2)
    assert score_one(blocked).failures[0].kind == "timeout"
    assert score_one(blocked).scores == [(1.0,)]
    release.set()


def test_signals_in_a_reward_thread_are_named_with_the_way_out() -> None:
    import signal

    def alarmed(**columns: Any) -> list[float]:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [1.0]

    table = run(alarmed, count=1)
    assert table.scores == [(None,)]
    assert "reward timeout to None" in table.failures[0].message
    assert run(alarmed, count=1, timeout=None).scores == [(1.0,)]


def test_ctrl_c_reaches_the_main_thread_while_a_reward_runs() -> None:
    script = """
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background of a shell ignore it
from grupo.rewards import RewardRunner
def hangs(**columns): time.sleep(60)
async def hangs_too(**columns):
    import asyncio
    await asyncio.sleep(60)
for function in (hangs, hangs_too):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        RewardRunner(function).score(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={})
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - started < 10)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["interrupted", "True"] * 2, done.stderr


def test_importing_rewards_imports_no_torch() -> None:
    script = "import sys, grupo.rewards; print([name for name in ('torch', 'numpy', 'sympy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_reward_may_stop_the_run_itself() -> None:
    def refuses(**columns: Any) -> list[float]:
        raise RewardError("the judge is gone")

    with pytest.raises(RewardError, match="the judge is gone"):
        run(refuses)


# What functions get: TRL issues 2644, 4202


def test_every_keyword_arrives_as_one_list_per_completion() -> None:
    seen: dict[str, Any] = {}

    def capture(**keywords: Any) -> list[float]:
        seen.update(keywords)
        return [1.0, 0.0]

    columns = {"gold": [1, 2], "level": ["a", "b"], "meta": [{"id": 1}, {"id": 2}]}
    run(capture, count=2, columns=columns, trainer_state="state", prompt_texts=["<p0>", "<p1>"])
    assert callable(seen.pop("log_extra")) and callable(seen.pop("log_metric"))
    lists = {"prompts": ["p0", "p1"], "completions": ["c0", "c1"], "completion_ids": [[0], [1]]}
    assert seen == {**lists, "trainer_state": "state", **columns}


def test_functions_without_double_star_get_what_they_name() -> None:
    def picks(gold: list[int], completions: list[str]) -> list[float]:
        return [float(value) for value in gold]

    def by_default(completions: list[str], other: Any = None) -> list[float]:
        assert other is None
        return [0.0] * len(completions)

    def rendered(prompt_texts: list[str]) -> list[float]:
        return [float(len(text)) for text in prompt_texts]

    table = run([picks, by_default, rendered], count=2, columns={"gold": [3, 4]}, prompt_texts=["a", "bb"])
    assert table.scores == [(3.0, 0.0, 1.0), (4.0, 0.0, 2.0)]


def test_columns_that_are_missing_reserved_or_positional_are_reported() -> None:
    def picks(completions: list[str], gold: list[int], **columns: Any) -> list[float]:
        return [0.0]

    def positional(completions: list[str], /, **columns: Any) -> list[float]:
        return [0.0]

    rewards = RewardRunner([returning([0.0]), picks])
    rewards.check_columns(["gold"])
    with pytest.raises(RewardError, match=r"'picks' requires 'gold'.*'answer', 'level'"):
        rewards.check_columns(["level", "answer"])
    with pytest.raises(RewardError, match="'picks' requires 'gold'"):
        run(picks, count=1)
    check_column_names(["gold", "answer"])
    with pytest.raises(DataError, match="'completions', 'log_metric'"):
        check_column_names(["log_metric", "completions", "gold"])
    with pytest.raises(DataError, match="'prompts'"):
        rewards.check_columns(["prompts"])
    with pytest.raises(RewardError, match="'positional' takes 'completions' by position only"):
        RewardRunner(positional)


def test_functions_share_no_mutable_state_with_each_other_or_the_caller() -> None:
    messages = [[{"role": "user", "content": "q"}]] * 2
    completions = [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]
    columns = {"meta": [{"tags": ["x"]}] * 2}
    ids = [[1], [2]]
    seen = []

    def spoils(prompts: Any, completions: Any, completion_ids: Any, meta: Any) -> list[float]:
        seen.append((str(prompts), str(completions), str(completion_ids), str(meta)))
        prompts[0][0]["content"] = "spoiled"
        completions[0][0]["content"] = "spoiled"
        completions.clear()
        completion_ids[0].append(9)
        meta[0]["tags"].append("spoiled")
        return [1.0, 0.0]

    functions = [spoils, spoils]
    before = (str(messages), str(completions), str(ids), str(columns["meta"]))
    RewardRunner(functions).score(prompts=messages, completions=completions, completion_ids=ids, columns=columns)
    assert seen == [before, before]
    assert (str(messages), str(completions), str(ids), str(columns["meta"])) == before
    assert functions == [spoils, spoils]


# Kinds of functions: TRL PR 6313


class Graded:
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)


class GradedLater:
    async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [2.0] * len(completions)


async def later(completions: list[str], bonus: float = 0.0, **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [3.0 + bonus] * len(completions)


def test_partials_objects_lambdas_and_asynchronous_forms() -> None:
    functions = [
        Graded(),
        GradedLater(),
        later,
        functools.partial(functools.partial(later, bonus=1.0)),
        lambda completions, **columns: [5.0] * len(completions),
        Graded().__call__,
    ]
    table = run(functions, count=2)
    assert table.names == ("Graded", "GradedLater", "later", "later_2", "lambda", "__call__")
    assert table.scores == [(1.0, 2.0, 3.0, 4.0, 5.0, 1.0)] * 2


def test_same_names_stay_apart() -> None:
    def named(name: str) -> Callable[..., Any]:
        function = returning([0.0])
        function.__name__ = name
        return function

    assert RewardRunner([named(name) for name in ("a", "a", "a_2", "a")]).names == ("a", "a_3", "a_2", "a_4")


def test_a_dataset_column_does_not_replace_what_a_partial_has_fixed() -> None:
    def near(completions: list[str], target: Any, **columns: Any) -> list[float]:
        return [float(target)] * len(completions)

    assert run(functools.partial(near, target=50), count=1, columns={"target": [7]}).scores == [(50.0,)]


def test_asynchronous_functions_run_together_on_one_lasting_loop() -> None:
    loops = []
    arrived: list[asyncio.Event] = []

    async def waits_for_the_other(**columns: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        arrived.append(asyncio.Event())
        while len(arrived) % 2:
            await asyncio.sleep(0.001)
        return [1.0]

    rewards = RewardRunner([waits_for_the_other, waits_for_the_other], timeout=20)
    for _ in range(2):
        assert score_one(rewards).scores == [(1.0, 1.0)]
    assert len(set(loops)) == 1


def test_asynchronous_functions_work_inside_a_running_loop() -> None:
    async def notebook() -> RewardTable:
        return run(later, count=2)

    assert asyncio.run(notebook()).scores == [(3.0,), (3.0,)]


def test_context_variables_reach_the_function() -> None:
    import decimal

    with decimal.localcontext() as context:
        context.prec = 5

        def third(**columns: Any) -> list[float]:
            return [float(Decimal(1) / Decimal(3))]

        assert run(third, count=1).scores == [(0.33333,)]


# Functions of one batch at the same time


def test_functions_of_a_batch_run_at_the_same_time_sync_and_async() -> None:
    everyone = threading.Barrier(3)

    def meets(completions: list[str], **columns: Any) -> list[float]:
        everyone.wait(10)
        return [1.0] * len(completions)

    async def meets_later(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.get_running_loop().run_in_executor(None, everyone.wait, 10)
        return [2.0] * len(completions)

    table = run([meets, meets_later, meets], count=2)
    assert table.failures == () and table.scores == [(1.0, 2.0, 1.0)] * 2


def test_the_order_in_which_functions_finish_shows_nowhere() -> None:
    def finishing(place: int, delay: float) -> Callable[..., Any]:
        def graded(log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
            time.sleep(delay)
            log_metric("shared", place)
            log_metric(f"own/{place}", place)
            log_extra("parsed", [place])
            if place == 2:
                raise KeyError("gold")
            return [float(place)] if place != 3 else [math.nan]

        return graded

    for delays in ([0.0, 0.05, 0.1, 0.15], [0.15, 0.1, 0.05, 0.0]):
        table = run([finishing(place, delay) for place, delay in enumerate(delays)], count=1)
        assert table.scores == [(0.0, 1.0, None, None)]
        assert table.metrics["shared"] == [0.0, 1.0, 3.0]
        assert list(table.metrics) == ["shared", "own/0", "own/1", "own/3"]
        assert list(table.extras) == ["parsed", "graded_2/parsed", "graded_4/parsed"]
        assert [failure.name for failure in table.failures] == ["graded_3", "graded_4"]


class Crowd:
    """Counts how many functions run at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside: list[str] = []
        self.seen: list[list[str]] = []

    def function(self, name: str) -> Callable[..., Any]:
        def graded(completions: list[str], **columns: Any) -> list[float]:
            with self.lock:
                self.inside.append(name)
                self.seen.append(list(self.inside))
            time.sleep(0.05)
            with self.lock:
                self.inside.remove(name)
            return [1.0] * len(completions)

        return graded


def test_a_function_that_runs_alone_meets_no_other() -> None:
    crowd = Crowd()

    class Alone:
        is_exclusive = True

        def __call__(self, **columns: Any) -> Any:
            return crowd.function("object")(**columns)

    async def asynchronous(**columns: Any) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(None, lambda: crowd.function("async")(**columns))

    functions = [
        crowd.function("free"),
        exclusive(crowd.function("marked")),
        functools.partial(exclusive(crowd.function("partial")), bonus=1),
        asynchronous,
        Alone(),
    ]
    assert run(functions, count=1).scores == [(1.0,) * 5]
    assert crowd.seen[:3] == [["marked"], ["partial"], ["object"]] and len(crowd.seen) == 5
    assert len(crowd.seen[4]) == 2, "the others meet"


def test_earlier_names_of_marks_still_work_and_log_the_new_one(caplog: pytest.LogCaptureFixture) -> None:
    class Judge:
        runs_beside_scoring = True

        def __call__(self, **columns: Any) -> Any:
            return [1.0]

    assert run_alone(returning([1.0])).is_exclusive  # type: ignore[attr-defined]
    runner = RewardRunner([Judge(), run_beside_scoring(returning([0.5])), overlap_with_logprobs(returning([0.0]))])
    assert [function.overlaps_logprobs for function in runner.functions] == [True, True, True]
    messages = [record.getMessage() for record in caplog.records]
    assert [message.rpartition(" ")[2] for message in messages] == [
        "exclusive.",
        "overlap_with_logprobs.",
        "overlaps_logprobs.",
    ]


def test_without_a_limit_functions_run_in_the_calling_thread_beside_asynchronous_ones() -> None:
    threads: list[Any] = []
    came = threading.Event()

    def here(**columns: Any) -> list[float]:
        threads.append(threading.current_thread())
        return [float(came.wait(10))]

    async def beside(**columns: Any) -> list[float]:
        came.set()
        return [1.0]

    assert run([here, here, beside], count=1, timeout=None).scores == [(1.0, 1.0, 1.0)]
    assert threads == [threading.current_thread()] * 2


def test_company_does_not_make_a_function_run_out_of_time() -> None:
    """Functions that compute take turns: four of 0.15 s need 0.6 s together, as they do one after the other."""

    def computes(**columns: Any) -> list[float]:
        end = time.thread_time() + 0.15
        while time.thread_time() < end:
            pass
        return [1.0]

    table = run([computes] * 4, count=1, timeout=0.45)
    assert table.failures == () and table.scores == [(1.0,) * 4]


def test_stuck_functions_are_all_named_and_the_wait_is_bounded() -> None:
    release = threading.Event()

    def hangs(**columns: Any) -> list[float]:
        release.wait(20)
        return [1.0]

    started = time.monotonic()
    table = run([hangs, returning([1.0]), hangs, exclusive(returning([0.5])), hangs], count=1, timeout=0.2)
    assert 0.5 < time.monotonic() - started < 3
    release.set()
    assert table.scores == [(None, 1.0, None, 0.5, None)]
    assert [failure.name for failure in table.failures] == ["hangs", "hangs_2", "hangs_3"]


# Logging


def test_extras_and_metrics_arrive() -> None:
    def logs(completions: list[str], log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_extra("parsed", [1, 2])
        log_extra("array", np.array([3, 4]))
        log_metric("accuracy", torch.tensor(0.5))
        log_metric("accuracy", 1)
        return [1.0, 0.0]

    table = run([logs, logs], count=2)
    assert table.extras == {"parsed": [1, 2], "array": [3, 4], "logs_2/parsed": [1, 2], "logs_2/array": [3, 4]}
    assert table.metrics == {"accuracy": [0.5, 1.0, 0.5, 1.0]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda extra, metric: extra("parsed", [1]), r"log_extra\('parsed', ...\) with 1 value for 2 completions"),
        (lambda extra, metric: extra("parsed", "ab"), r"log_extra\('parsed', ...\) with a str"),
        (lambda extra, metric: extra("parsed", 5), r"with a int"),
        (lambda extra, metric: extra(3, [1, 2]), r"log_extra\(3, ...\); a name is a string"),
        (lambda extra, metric: metric(None, 1.0), r"log_metric\(None, ...\); a name is a string"),
        (lambda extra, metric: metric("score", "high"), r"log_metric\('score', ...\) with 'high'"),
        (lambda extra, metric: metric("score", [1.0]), r"with \[1.0\], not a number"),
    ],
)
def test_unusable_logging_is_an_error_at_once(call: Any, message: str) -> None:
    def logs(log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
        call(log_extra, log_metric)
        return [1.0, 0.0]

    with pytest.raises(RewardError, match=f"Reward function 'logs'.*{message}"):
        run(logs, count=2)


# What is no reward function


def test_what_cannot_be_called_is_refused() -> None:
    a_class = "the class Graded"
    for functions, message in [
        *(([], "empty"), ([None], "cannot be called"), ([5], "cannot be called")),
        *(([Graded], a_class), ([functools.partial(Graded, a=1)], a_class)),
    ]:
        with pytest.raises(ConfigError, match=message):
            RewardRunner(functions)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf])
def test_a_timeout_that_cannot_be_met_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="seconds above 0"):
        RewardRunner(returning(PLAIN), timeout=timeout)
