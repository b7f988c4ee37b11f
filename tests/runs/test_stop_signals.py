"""Ctrl-C and SIGTERM while a run trains: a checkpoint at the end of the step, and an exit code that says why."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grupo.runs.stop_signals import StopSignals
from resumed_runs import EVALUATED, assert_same_run, run, sum_of_ids

pytestmark = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler, reason="started with SIGINT ignored"
)


def sends(number: int, step: int, times: int = 1) -> Any:
    """A reward that sends this process a signal in the rollout of a step; its scores are those of `sum_of_ids`."""
    left = [times]

    def sum_of_ids_(trainer_state: Any, **columns: Any) -> list[float]:
        while trainer_state.global_step + 1 == step and left[0]:
            left[0] -= 1
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        return sum_of_ids(**columns)

    sum_of_ids_.__name__ = "sum_of_ids"
    return sum_of_ids_


STOPPED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Ctrl-C inside an epoch": (signal.SIGINT, 3, {}),
    "SIGTERM inside an epoch": (signal.SIGTERM, 3, {}),
    "between two logs, where an evaluation is due": (signal.SIGTERM, 2, {**EVALUATED, "logging_steps": 3}),
    "at the end of an epoch": (signal.SIGINT, 4, {"eval_strategy": "epoch", "logging_strategy": "epoch"}),
    "inside an epoch evaluated at its end": (
        signal.SIGTERM,
        6,
        {"eval_strategy": "epoch", "logging_strategy": "epoch"},
    ),
    "in the last step": (signal.SIGINT, 8, EVALUATED),
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    number, step, settings = STOPPED[name]
    settings = {"save_strategy": "no", **settings}
    whole = run(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as raised:
        run(tmp_path / "parts", rewards=sends(number, step), **settings)
    assert number == signal.SIGINT or raised.value.code == 143
    checkpoint = tmp_path / "parts" / f"checkpoint-{step}"
    assert f"The run was stopped after step {step}; its last checkpoint is {checkpoint}." in caplog.messages
    assert [path.name for path in (tmp_path / "parts").glob("checkpoint-*")] == [checkpoint.name]
    parts = run(tmp_path / "parts", resume=True, accept=("rewards",), **settings)
    assert_same_run(parts, whole)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rewards=sends(signal.SIGINT, 2, times=2), save_strategy="no")
    assert not list(tmp_path.glob("checkpoint-*"))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1, "the second step did not end"


def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, rewards=sends(signal.SIGTERM, 2, times=3), save_strategy="no")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_handlers_are_there_during_training_and_not_before_or_after(tmp_path: Path) -> None:
    seen = []

    def looks(**columns: Any) -> list[float]:
        seen.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])
        return sum_of_ids(**columns)

    run(tmp_path, rewards=looks, max_steps=1, save_strategy="no")
    assert all(getattr(handler, "__self__", None).__class__ is StopSignals for handler in seen[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(ZeroDivisionError), StopSignals().watched():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_the_program_stay(tmp_path: Path) -> None:
    """A cluster's own handler knows better; and what is ignored stays ignored."""
    taken = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    try:
        trainer = run(tmp_path, rewards=sends(signal.SIGTERM, 1), max_steps=2, save_strategy="no")
    finally:
        signal.signal(signal.SIGTERM, old)
    assert taken == [signal.SIGTERM] and trainer.state.global_step == 2


def test_in_another_thread_nothing_is_watched() -> None:
    found = []

    def watch() -> None:
        with StopSignals().watched():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
