"""Run untrusted Python once, with limits. docs/code_rewards.md says what this protects from, and what not.

    training process ── supervisor (`supervisor.py`) ── ... ── the program (under `child.py`)

There are two levels of isolation, detected once by trying (`isolation()`). With *namespaces* (Linux, if user namespaces
are allowed) a program has no network, sees only files of the system and of Python, and dies with its namespace. Without
them it has limits and, if we are root, a user of its own, and is otherwise an ordinary process.
"""

from __future__ import annotations

import functools
import json
import marshal
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from grupo.errors import ConfigError, RewardError
from grupo.utils.worker_pool import available_cpus

Ending = Literal["exit", "timeout", "memory", "processes", "output"]

START_SECONDS = 20.0
"""Seconds beyond the program's own, for starting and ending on a busy machine; then the supervisor is killed."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Limits:
    """Limits of one run. A program that exceeds one is killed, or gets the error that the system raises."""

    seconds: float = 5.0
    """Wall-clock seconds; CPU seconds of each process are limited to this, rounded up, + 1."""
    memory_mb: int = 256
    """MiB of address space of each process, and resident MiB of all of them. Python starts with about 30."""
    processes: int = 8
    """Number of processes and threads, including the program itself."""
    open_files: int = 64
    file_mb: int = 16
    """MiB of one file; with namespaces also of all files in the scratch folder."""
    output_kb: int = 1024
    """KiB each of standard output and standard error; a program that writes more is killed."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ConfigError(f"sandbox limit {name}={value!r} cannot be met: give a number above 0.")
        if self.open_files < 16 or self.memory_mb < 64:
            raise ConfigError(
                f"open_files={self.open_files}, memory_mb={self.memory_mb} are too little for Python itself: give at "
                "least 16 open files and 64 MiB."
            )


@dataclass(frozen=True)
class Call:
    """An expression to evaluate in the program's module after it has run; with `arguments`, its value is called."""

    expression: str
    arguments: tuple[Any, ...] | None = None
    """Plain values: None, bool, int, float, complex, str, bytes, list, tuple, set, dict."""
    keywords: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SandboxJob:
    """One program and the calls to evaluate in it."""

    source: str
    stdin: str | None = None
    """None for an immediate end of file."""
    calls: tuple[Call, ...] = ()
    script: str | None = None
    """Code to run in the program's module afterwards. It shares the interpreter with the program, which can cheat."""


@dataclass(frozen=True)
class SandboxRun:
    """Result of one run. Everything but `ended`, which was observed from outside, is the untrusted program's claim."""

    ended: Ending
    exit_code: int | None
    """As in `subprocess`, negative for a signal; None if the supervisor killed the program."""
    stdout: str
    stderr: str
    seconds: float
    values: tuple[Any, ...] | None = None
    """Values of the calls, in their order; None if the program did not get that far."""
    finished: bool = False
    """All calls and the script completed, as far as the program can be believed."""
    error: str = ""
    """Type of the exception that ended the program; 'NotPython' for a syntax error in its own text."""
    error_text: str = ""


@dataclass(frozen=True)
class Isolation:
    """Isolation of programs from this machine."""

    namespaces: bool
    """No network, only files of the system, no view of other processes, and no process survives the run."""
    other_user: bool
    """The program runs as a user who owns nothing. Without namespaces this needs root."""
    reason: str = ""
    """Reason why there are no namespaces."""

    def __str__(self) -> str:
        if self.namespaces:
            return "namespaces: no network, only system files visible"
        user = "a user of its own" if self.other_user else "the rights of this user, network and files included"
        return f"no namespaces ({self.reason}): limits on time, memory, files and processes, and {user}"


@functools.cache
def isolation() -> Isolation:
    """The best isolation of this machine, found by trying; takes a fraction of a second, once."""
    if sys.platform == "win32":
        raise ConfigError("The sandbox needs Linux or macOS: Windows lacks the limits that it sets.")
    job, limits = SandboxJob("print('ready')"), Limits(seconds=10.0)
    reason = f"{sys.platform} has none"
    if sys.platform == "linux":
        reason = ""
        try:
            if _run(job, limits, Isolation(True, os.geteuid() == 0), False).stdout == "ready\n":
                return Isolation(True, os.geteuid() == 0)
            reason = "the interpreter does not start in them"
        except RewardError as error:
            reason = str(error)
    if os.geteuid() == 0 and _run(job, limits, Isolation(False, True), False).stdout == "ready\n":
        return Isolation(False, True, reason)
    return Isolation(False, False, reason)


def run_python(
    job: SandboxJob | str, limits: Limits | None = None, *, site_packages: bool = False, within: Isolation | None = None
) -> SandboxRun:
    """Run a program in a fresh interpreter.

    It gets an empty environment (except `HOME`, `TMPDIR`, `PATH` and `LANG`), an empty working folder that is removed
    afterwards, and no open file of this process. When this returns, none of its processes is left.

    Args:
        job: the program and the calls to evaluate in it, or just its text.
        limits: limits of the run.
        site_packages: allow imports of installed packages; otherwise the standard library only, which starts faster.
        within: isolation to use instead of the best one of this machine.

    Raises:
        RewardError: the sandbox itself could not be started.
    """
    job = SandboxJob(job) if isinstance(job, str) else job
    return _run(job, limits or Limits(), within or isolation(), site_packages)


def map_in_threads(
    function: Callable[[_Item], _Result], items: Sequence[_Item], workers: int | None = None
) -> list[_Result]:
    """`function(item)` of each item, in their order; `workers` run at once (default: one per available CPU)."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(workers or available_cpus(), len(items)), "grupo-sandbox") as pool:
        return list(pool.map(function, items))


def warn_if_not_isolated(who: str) -> None:
    """Warn if programs are not isolated from this machine by namespaces."""
    if not isolation().namespaces:
        warnings.warn(f"{who} runs programs with {isolation()}. See docs/code_rewards.md.", stacklevel=3)


@functools.cache
def _child_source() -> str:
    return Path(__file__).with_name("child.py").read_text(encoding="utf-8")


def _run(job: SandboxJob, limits: Limits, within: Isolation, site_packages: bool) -> SandboxRun:
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    interpreter = [sys.executable, "-I"] if site_packages else [base, "-I", "-S"]
    token = secrets.token_hex(16)
    folder = "" if within.namespaces else tempfile.mkdtemp(prefix="grupo-sandbox-")
    request = {
        **vars(limits),
        "command": [*interpreter, "-B", "-X", "utf8", "-c", _child_source()],
        "job": marshal.dumps(
            {
                "source": job.source,
                "calls": [(call.expression, call.arguments, call.keywords) for call in job.calls],
                "script": job.script,
                "token": token,
            }
        ),
        "stdin": None if job.stdin is None else job.stdin.encode(errors="replace"),
        "namespaces": within.namespaces,
        "drop_user": within.other_user,
        "folder": folder,
        "stage": os.path.realpath(tempfile.gettempdir()),
        "visible": [os.path.realpath(sys.base_prefix), *([sys.prefix] if site_packages else [])],
    }
    try:
        answer = _run_supervisor(request, limits.seconds + START_SECONDS)
    finally:
        if folder:
            _remove_tree(folder)
    if answer["ended"] == "failed":
        raise RewardError(str(answer["failure"]))
    return _sandbox_run(answer, token, len(job.calls))


def _remove_tree(folder: str) -> None:
    """Remove a scratch folder, even if the program has removed permissions or nested folders beyond the path limit."""
    with suppress(OSError):
        os.chmod(folder, 0o700)
        moved = 0
        unseen = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        while unseen:
            path = unseen.pop()
            os.chmod(path, 0o700)
            for entry in list(os.scandir(path)):
                if entry.is_dir(follow_symlinks=False):
                    # Moved to the top, so that every folder that is removed below has no folders in it.
                    os.chmod(entry.path, 0o700)
                    moved += 1
                    unseen.append(os.path.join(folder, f"{moved}-{secrets.token_hex(8)}"))
                    os.rename(entry.path, unseen[-1])
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def _run_supervisor(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The supervisor's answer to a request."""
    script = str(Path(__file__).with_name("supervisor.py"))
    with subprocess.Popen(
        [sys.executable, "-I", "-S", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    ) as supervisor:
        assert supervisor.stdin is not None and supervisor.stdout is not None and supervisor.stderr is not None
        # Whatever happens to it, the kernel ends its processes with it.
        watchdog = threading.Timer(seconds, supervisor.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            packed = marshal.dumps(request)
            supervisor.stdin.write(b"%d\n" % len(packed) + packed)
            supervisor.stdin.flush()  # and left open: its end tells the supervisor that this process is gone
            answer = supervisor.stdout.read()
            complaint = supervisor.stderr.read().decode(errors="replace")
        except BrokenPipeError:
            answer, complaint = b"", supervisor.stderr.read().decode(errors="replace")
        else:
            if len(answer) < 2:
                with suppress(subprocess.TimeoutExpired):  # did someone else kill it?
                    supervisor.wait(1.0)
        finally:
            watchdog.cancel()
            supervisor.kill()
    if answer == b"+" and supervisor.returncode < 0 and not request["namespaces"]:
        # Without namespaces a program of the same user can kill it, and must not escape its verdict that way.
        return {"ended": "exit", "wait_status": None, "seconds": 0.0, "stdout": b"", "stderr": b"", "message": b""}
    try:
        return dict(marshal.loads(answer[1:]))  # from the supervisor: the program cannot write there
    except (EOFError, ValueError, TypeError):
        last = complaint.strip().splitlines()[-1:] or [f"no answer within {seconds:g} s"]
        raise RewardError(f"the sandbox could not be started: {last[0]}") from None


def _sandbox_run(answer: dict[str, Any], token: str, calls: int) -> SandboxRun:
    status = answer["wait_status"]
    code = os.waitstatus_to_exitcode(status) if status is not None and answer["ended"] == "exit" else None
    ended: Ending = "timeout" if code == -signal.SIGXCPU else answer["ended"]
    values, message = None, _parse_message(answer["message"])
    finished = ended == "exit" and code == 0 and message.get("token") == token
    if finished:
        try:
            values = tuple(decode_value(value) for value in message["values"])
        except (KeyError, TypeError, ValueError, RecursionError):
            finished = False
        else:
            finished = len(values) == calls
    error = message.get("error")
    return SandboxRun(
        ended=ended,
        exit_code=code,
        stdout=answer["stdout"].decode(errors="replace"),
        stderr=answer["stderr"].decode(errors="replace"),
        seconds=answer["seconds"],
        values=values if finished else None,
        finished=finished,
        error=error if isinstance(error, str) else "",
        # A lone surrogate could not be written to any file.
        error_text=str(message.get("text", ""))[:500].encode(errors="replace").decode(),
    )


def _parse_message(data: bytes) -> dict[str, Any]:
    """The message of the child, in a channel that the program can write to as well."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def decode_value(encoded: Any) -> Any:
    """A value encoded by `child.encode`.

    Raises:
        TypeError, ValueError, RecursionError: it is not one. It comes from untrusted code.
    """
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return encoded
    if not isinstance(encoded, dict):
        raise TypeError("a bare list is not an encoded value")
    ((kind, content),) = encoded.items()
    if kind in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[kind]([decode_value(item) for item in content])
    if kind == "dict":
        return {decode_value(key): decode_value(value) for key, value in content}
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    raise TypeError(f"{kind!r} is not a kind of value")
