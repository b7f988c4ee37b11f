"""Runs that are killed: one is left alone, and the others get SIGKILL in the middle of something and then go on.

    python kill_worker.py FOLDER KILLS [SEED]

leaves `FOLDER/outcomes.json`, with a hash of each run's weights and records. Each run is a process of its own, forked
from this one, which has imported all that a run needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grupo import GRPOTrainer
from resumed_runs import logged, run_of, tables
from tiny_trainer import weights

PHASES = ("rollout", "backward", "checkpoint")
SETTINGS: dict[str, Any] = {
    "max_steps": 6, "num_iterations": 2, "logging_steps": 3, "log_completions": True, "num_completions_to_print": 1,
    "eval_strategy": "steps", "eval_steps": 3, "save_steps": 1, "save_total_limit": 2, "optim": "adamw_torch",
    "beta": 0.05,
}  # fmt: skip


def train(folder: Path, resume: bool, report: Callable[[str], None]) -> None:
    """Trains, says when each phase of a step begins and ends, and at last what came out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    trainer = run_of(folder, **SETTINGS)
    for phase, owner, name in (
        ("rollout", trainer.window, "_fill"),
        ("backward", trainer, "forward_backward"),
        ("checkpoint", trainer, "_save_checkpoint"),
    ):
        setattr(owner, name, _Reported(getattr(owner, name), phase, trainer, report))
    trainer.train(resume_from_checkpoint=resume and trainer.has_checkpoint())
    report(f"done {hash_of(trainer, folder)}")


class _Reported:
    def __init__(self, inner: Any, phase: str, trainer: GRPOTrainer, report: Callable[[str], None]) -> None:
        self.inner, self.phase, self.trainer, self.report = inner, phase, trainer, report

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.report(f"begin {self.phase} {self.trainer.state.global_step}")
        result = self.inner(*arguments, **keywords)
        self.report(f"end {self.phase} {self.trainer.state.global_step}")
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def hash_of(trainer: GRPOTrainer, folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in weights(trainer.model).items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    digest.update(json.dumps([logged(folder), tables(folder)]).encode())
    digest.update((folder / "completions.jsonl").read_bytes())
    return digest.hexdigest()


class Child:
    """A run in a process of its own, and what it says."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.close(reader)
                train(folder, resume, lambda line: _write(writer, f"{time.monotonic()} {line}\n"))
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        self.lines: list[tuple[float, str]] = []
        self._reader, self._rest = reader, b""

    def read(self, timeout: float) -> bool:
        """Takes what is there; False at the end."""
        if not select.select([self._reader], [], [], timeout)[0]:
            return True
        data = os.read(self._reader, 65536)
        *whole, self._rest = (self._rest + data).split(b"\n")
        self.lines += [(float(line.split()[0]), line.decode().partition(" ")[2]) for line in whole]
        return bool(data)

    def wait(self) -> int:
        while self.read(1.0):
            pass
        os.close(self._reader)
        return os.waitpid(self.pid, 0)[1]

    def open_phase(self) -> str:
        """The innermost phase that had begun and not ended."""
        begun = []
        for _, line in self.lines:
            what, _, phase = line.partition(" ")
            begun = [*begun, phase.split()[0]] if what == "begin" else begun[:-1]
        return begun[-1] if begun else "between"


def _write(descriptor: int, line: str) -> None:
    os.write(descriptor, line.encode())


def kill_once(folder: Path, phase: str, step: int, delay: float) -> dict[str, Any]:
    """Kills a run `delay` seconds after a phase of a step began, lets it go on, and says where and what came out."""
    child = Child(folder, resume=False)
    going = True
    while going and not any(line == f"begin {phase} {step}" for _, line in child.lines):
        going = child.read(1.0)
    time.sleep(delay)
    os.kill(child.pid, signal.SIGKILL)
    status = child.wait()
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    again = Child(folder, resume=True)
    code = again.wait()
    last = again.lines[-1][1].split() if again.lines else ["nothing"]
    return {
        "aimed_at": phase, "step": step, "killed": os.WIFSIGNALED(status), "died_in": child.open_phase(),
        "checkpoints": left, "exit_code": code, "hash": last[1] if last[0] == "done" else None,
    }  # fmt: skip


def main(folder: Path, kills: int, seed: int) -> None:
    alone = Child(folder / "alone", resume=False)
    assert alone.wait() == 0, "the run that is left alone fails"
    seconds: dict[str, list[float]] = {}
    begun: dict[str, float] = {}
    places: list[tuple[str, int]] = []
    for when, line in alone.lines[:-1]:
        what, phase, step = line.split()
        if what == "begin":
            begun[phase] = when
            places.append((phase, int(step)))
        else:
            seconds.setdefault(phase, []).append(when - begun[phase])
    generator = random.Random(seed)
    outcomes = []
    for number in range(kills):
        phase, step = generator.choice([place for place in places if place[0] == PHASES[number % len(PHASES)]])
        delay = generator.random() * sorted(seconds[phase])[len(seconds[phase]) // 2]
        outcomes.append(kill_once(folder / f"killed-{number}", phase, step, delay))
        print(outcomes[-1], file=sys.stderr, flush=True)
    report = {"hash": alone.lines[-1][1].split()[1], "outcomes": outcomes}
    (folder / "outcomes.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
