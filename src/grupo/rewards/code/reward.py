"""A reward for generated Python programs that pass their tests.

Expected values never enter the sandbox. A program gets only an input, a call or an expression there; its answers come
back as plain values and are compared here, out of the program's reach. Printing 'passed', exiting early, patching
`assert` or returning an object that equals everything gains nothing. The one exception are tests that only run as a
whole (see `ScriptTest`).
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers.extraction import completion_texts, quote_value
from grupo.rewards.code.sandbox.runner import (
    Limits,
    SandboxRun,
    isolation,
    map_in_threads,
    run_python,
    warn_if_not_isolated,
)
from grupo.rewards.code.test_cases import CodeTest, ScriptTest, read_tests
from grupo.rewards.verifiers.base import keyword_signature
from grupo.utils.messages import pluralize

CodeFault = Literal["no_code", "syntax_error", "exception", "timeout", "memory", "limit", "wrong_output"]
CODE_FAULTS: tuple[CodeFault, ...] = get_args(CodeFault)
"""Faults of a program. `limit`: too many processes, or too much output."""

_FENCE = re.compile(r"[ \t]*(?P<ticks>`{3,})[ \t]*(?P<language>[\w+-]*)[^`]*")
_PYTHON = {"python", "python3", "py"}


def extract_code(text: str, whole_text: bool = False) -> str | None:
    """The content of the last closed block fenced as ```python (also `py`, `python3`).

    Args:
        text: completion text.
        whole_text: take a text without any fence as code.
    """
    code: str | None = None
    block: list[str] = []
    closing, language = "", ""
    fences = False
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)
        if not closing and match:
            closing, language, block, fences = match["ticks"], match["language"].lower(), [], True
        elif closing and match and not match["language"] and len(match["ticks"]) >= len(closing):
            code = "\n".join(block) + "\n" if language in _PYTHON else code
            closing = ""
        elif closing:
            block.append(line)
    if code is None and whole_text and not fences:
        code = text
    return code if code is not None and code.strip() else None


@dataclass(frozen=True)
class CodeVerdict:
    """Test results of one program."""

    passed: int
    total: int
    faults: tuple[CodeFault, ...] = ()
    """One for each test that ran and failed."""
    detail: str = ""
    """First failure: the last line of the error, or the printed or returned value."""

    @property
    def is_right(self) -> bool:
        return self.passed == self.total


@dataclass(frozen=True)
class NoVerdict:
    """Reason why a program has no verdict."""

    kind: Literal["unusable tests", "not run"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def run_tests(
    code: str,
    tests: Sequence[CodeTest],
    limits: Limits | None = None,
    *,
    all_or_nothing: bool = False,
    site_packages: bool = False,
) -> CodeVerdict:
    """Run a program once for each test.

    Tests stop after a syntax error or a time-out, which would repeat, and after any failure if `all_or_nothing`;
    skipped tests count as failed.

    Raises:
        RewardError: the sandbox could not be started.
    """
    passed, faults, detail = 0, [], ""
    for test in tests:
        run = run_python(test.job(code), limits, site_packages=site_packages)
        fault = _fault(run, test)
        if fault is None:
            passed += 1
            continue
        detail = detail or _detail(run, fault)
        faults.append(fault)
        if all_or_nothing or fault in ("syntax_error", "timeout"):
            break
    return CodeVerdict(passed, len(tests), tuple(faults), detail)


def _fault(run: SandboxRun, test: CodeTest) -> CodeFault | None:
    if run.ended == "timeout":
        return "timeout"
    if run.ended == "memory" or run.error == "MemoryError":
        return "memory"
    if run.ended in ("processes", "output"):
        return "limit"
    if run.error == "NotPython":
        return "syntax_error"
    if run.error == "AssertionError" and isinstance(test, ScriptTest):
        return "wrong_output"
    if run.exit_code != 0 or run.error:
        return "exception"
    return None if test.passes(run) else "wrong_output"


def _detail(run: SandboxRun, fault: CodeFault) -> str:
    if fault in ("syntax_error", "exception", "memory") and run.error:
        return f"{run.error}: {run.error_text}"[:200]
    if fault == "exception":
        return f"exit code {run.exit_code}"
    if fault == "wrong_output":
        return quote_value(run.values[0], 200) if run.values else run.stdout[:200]
    return run.ended


class CodeReward:
    """See `code_reward`."""

    value_range: tuple[float, float] = (0.0, 1.0)

    def __init__(
        self,
        tests_column: str,
        per_test: bool,
        limits: Limits,
        whole_text: bool,
        site_packages: bool,
        workers: int | None,
        call_seconds: float,
    ) -> None:
        self.__name__ = "code_reward"
        self.tests_column = tests_column
        self.per_test = per_test
        self.limits = limits
        self.whole_text = whole_text
        self.site_packages = site_packages
        self.workers = workers
        self.call_seconds = call_seconds
        self.unusable_tests = 0
        """Number of completions with unreadable tests."""
        self.faults: Counter[str] = Counter()
        """Number of completions by their first fault, over all calls."""
        self._warned: set[str] = set()
        self.__signature__ = keyword_signature("completions", tests_column)

    def __call__(
        self,
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The score of each completion (a string, a list of messages, or None); None if its tests are unusable."""
        cells = columns[self.tests_column]
        if len(cells) != len(completions):
            raise RewardError(
                f"code_reward got {pluralize(len(cells), 'cell')} of '{self.tests_column}' for "
                f"{pluralize(len(completions), 'completion')}; it needs one for each."
            )
        if "isolation" not in self._warned:
            self._warned.add("isolation")
            warn_if_not_isolated("code_reward")
        codes = [extract_code(text, self.whole_text) for text in completion_texts(completions)]
        deadline = time.monotonic() + self.call_seconds
        verdicts = map_in_threads(
            lambda index: self._verdict(codes[index], cells[index], deadline), range(len(codes)), self.workers
        )
        self._report(verdicts, log_extra, log_metric)
        return [self._score(verdict) if isinstance(verdict, CodeVerdict) else None for verdict in verdicts]

    def _verdict(self, code: str | None, cell: Any, deadline: float) -> CodeVerdict | NoVerdict:
        try:
            tests = read_tests(cell)
        except ValueError as error:
            return NoVerdict("unusable tests", str(error))
        if code is None:
            return CodeVerdict(0, len(tests), ("no_code",))
        if time.monotonic() > deadline:
            return NoVerdict("not run", f"the call had already taken call_seconds={self.call_seconds:g} s")
        try:
            return run_tests(
                code, tests, self.limits, all_or_nothing=not self.per_test, site_packages=self.site_packages
            )
        except RewardError as error:
            return NoVerdict("not run", str(error))

    def _score(self, verdict: CodeVerdict) -> float:
        return verdict.passed / verdict.total if self.per_test else float(verdict.is_right)

    def _report(
        self,
        verdicts: Sequence[CodeVerdict | NoVerdict],
        log_extra: Callable[[str, list[Any]], None] | None,
        log_metric: Callable[[str, float], None] | None,
    ) -> None:
        verdicts_given = [verdict for verdict in verdicts if isinstance(verdict, CodeVerdict)]
        without = [verdict for verdict in verdicts if isinstance(verdict, NoVerdict)]
        kinds = Counter(one.kind for one in without)
        self.unusable_tests += kinds["unusable tests"]
        first = Counter(verdict.faults[0] for verdict in verdicts_given if verdict.faults)
        self.faults.update(first)
        for one in without:
            if one.kind not in self._warned:
                self._warned.add(one.kind)
                warnings.warn(
                    f"code_reward abstains on {kinds[one.kind]} of {len(verdicts)} completions (column "
                    f"'{self.tests_column}'), here and in later batches: {one}.",
                    stacklevel=4,
                )
        if log_metric is not None:
            log_metric("code/unusable_tests", kinds["unusable tests"])
            log_metric("code/not_run", kinds["not run"])
            log_metric("code/isolated", float(isolation().namespaces))
            for fault in CODE_FAULTS if verdicts_given else ():
                log_metric(f"code/{fault}", first[fault] / len(verdicts_given))
        if log_extra is not None:
            log_extra("code_tests", [_passed(verdict) for verdict in verdicts])
            log_extra("code_error", [_first_fault(verdict) for verdict in verdicts])


def _passed(verdict: CodeVerdict | NoVerdict) -> str:
    return f"{verdict.passed}/{verdict.total}" if isinstance(verdict, CodeVerdict) else str(verdict)


def _first_fault(verdict: CodeVerdict | NoVerdict) -> str:
    if isinstance(verdict, NoVerdict) or not verdict.faults:
        return ""
    return f"{verdict.faults[0]}: {verdict.detail}" if verdict.detail else verdict.faults[0]


def code_reward(
    tests_column: str = "tests",
    per_test: bool = True,
    timeout: float = 5.0,
    memory_mb: int = 256,
    whole_text: bool = False,
    site_packages: bool = False,
    require_isolation: bool = False,
    workers: int | None = None,
    call_seconds: float = 50.0,
) -> CodeReward:
    """The share of its tests that the program in a completion passes in a sandbox, 0 to 1.

    The program is the last ```python block; without one the reward is 0.0. If the tests cannot be read or run, it
    abstains (None), counts it and warns once. Logs `code/<fault>`: the share of completions with this first fault, see
    `CODE_FAULTS`.

    Args:
        tests_column: dataset column with tests in the forms of `read_tests`.
        per_test: True for the share of passed tests; False for 1.0 if all pass, else 0.0.
        timeout: seconds for one test.
        memory_mb: MiB for one test, including Python itself (about 30).
        whole_text: take a completion without any fence as a program.
        site_packages: let programs import the packages that are installed here.
        require_isolation: refuse to run without namespaces, without which network and files stay reachable.
        workers: number of programs that run at once; None for one per core.
        call_seconds: start no program later than this in one call, so that a batch of endless loops does not exceed the
            time-out of the whole reward (60 s by default) and lose every score.

    Raises:
        ConfigError: a limit that cannot be met, or no isolation although it is required.
    """
    if not (math.isfinite(call_seconds) and call_seconds > 0) or (workers is not None and workers < 1):
        raise ConfigError(f"code_reward(workers={workers}, call_seconds={call_seconds}): set both above 0.")
    limits = Limits(seconds=timeout, memory_mb=memory_mb)
    if require_isolation and not isolation().namespaces:
        raise ConfigError(
            f"code_reward(require_isolation=True) is not possible here: {isolation()}. Allow user namespaces, or run "
            "in a container without secrets and network and set require_isolation=False."
        )
    return CodeReward(tests_column, per_test, limits, whole_text, site_packages, workers, call_seconds)
