"""Rewards for generated Python: does it pass its tests, and does it keep to what it may use.

Expected values never enter the sandbox. What a program is asked there are questions (an input, a call, an expression);
its answers come back as plain values and are judged here, where the program cannot reach. Printing 'passed', leaving
early, patching `assert` or returning an object that equals everything gains nothing. The one exception are tests that
only run as a whole (see `ScriptTest`).
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
from grupo.rewards.answers.extraction import completion_texts, shown_value
from grupo.rewards.code.sandbox.runner import (
    Limits,
    SandboxRun,
    isolation,
    run_python,
    run_together,
    warn_of_weak_isolation,
)
from grupo.rewards.code.test_cases import CodeTest, ScriptTest, read_tests
from grupo.rewards.verifiers.base import keyword_signature
from grupo.utils.messages import pluralize

CodeFault = Literal["no_code", "syntax_error", "exception", "timeout", "memory", "limit", "wrong_output"]
CODE_FAULTS: tuple[CodeFault, ...] = get_args(CodeFault)
"""What can be wrong with a program. `limit`: too many processes, or too much output."""

_FENCE = re.compile(r"[ \t]*(?P<ticks>`{3,})[ \t]*(?P<language>[\w+-]*)[^`]*")
_PYTHON = {"python", "python3", "py"}


def extract_code(text: str, whole_text: bool = False) -> str | None:
    """The last closed block of the text that is fenced as ```python (also `py`, `python3`), without its fence.

    Args:
        text: of a completion.
        whole_text: a text without any fence is code as a whole.
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
    """What one program did in its tests."""

    passed: int
    total: int
    faults: tuple[CodeFault, ...] = ()
    """One for each test that was run and failed."""
    detail: str = ""
    """Of the first failure: the last line of the error, or what was printed or returned."""

    @property
    def is_right(self) -> bool:
        return self.passed == self.total


@dataclass(frozen=True)
class NotJudged:
    """Why a program has no verdict."""

    kind: Literal["unusable tests", "not run"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def judge_code(
    code: str,
    tests: Sequence[CodeTest],
    limits: Limits | None = None,
    *,
    all_or_nothing: bool = False,
    site_packages: bool = False,
) -> CodeVerdict:
    """Run a program once for each test.

    Tests stop after a syntax error or a time-out, which would come again, and after any failure if `all_or_nothing`;
    the tests left out count as failed.

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
    return None if test.holds(run) else "wrong_output"


def _detail(run: SandboxRun, fault: CodeFault) -> str:
    if fault in ("syntax_error", "exception", "memory") and run.error:
        return f"{run.error}: {run.error_text}"[:200]
    if fault == "exception":
        return f"exit code {run.exit_code}"
    if fault == "wrong_output":
        return shown_value(run.values[0], 200) if run.values else run.stdout[:200]
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
        """How many completions had tests that could not be read."""
        self.faults: Counter[str] = Counter()
        """Completions by their first fault, over all calls."""
        self._warned: set[str] = set()
        self.__signature__ = keyword_signature("completions", tests_column)

    def __call__(
        self,
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The score of each completion (a string, a list of messages, or None); None where its tests are unusable."""
        cells = columns[self.tests_column]
        if len(cells) != len(completions):
            raise RewardError(
                f"code_reward got {pluralize(len(cells), 'cell')} of '{self.tests_column}' for "
                f"{pluralize(len(completions), 'completion')}; it needs one for each."
            )
        if "isolation" not in self._warned:
            self._warned.add("isolation")
            warn_of_weak_isolation("code_reward")
        codes = [extract_code(text, self.whole_text) for text in completion_texts(completions)]
        deadline = time.monotonic() + self.call_seconds
        verdicts = run_together(
            lambda row: self._verdict(codes[row], cells[row], deadline), range(len(codes)), self.workers
        )
        self._report(verdicts, log_extra, log_metric)
        return [self._score(verdict) if isinstance(verdict, CodeVerdict) else None for verdict in verdicts]

    def _verdict(self, code: str | None, cell: Any, deadline: float) -> CodeVerdict | NotJudged:
        try:
            tests = read_tests(cell)
        except ValueError as error:
            return NotJudged("unusable tests", str(error))
        if code is None:
            return CodeVerdict(0, len(tests), ("no_code",))
        if time.monotonic() > deadline:
            return NotJudged("not run", f"the call had already taken call_seconds={self.call_seconds:g} s")
        try:
            return judge_code(
                code, tests, self.limits, all_or_nothing=not self.per_test, site_packages=self.site_packages
            )
        except RewardError as error:
            return NotJudged("not run", str(error))

    def _score(self, verdict: CodeVerdict) -> float:
        return verdict.passed / verdict.total if self.per_test else float(verdict.is_right)

    def _report(
        self,
        verdicts: Sequence[CodeVerdict | NotJudged],
        log_extra: Callable[[str, list[Any]], None] | None,
        log_metric: Callable[[str, float], None] | None,
    ) -> None:
        judged = [verdict for verdict in verdicts if isinstance(verdict, CodeVerdict)]
        not_judged = [verdict for verdict in verdicts if isinstance(verdict, NotJudged)]
        kinds = Counter(one.kind for one in not_judged)
        self.unusable_tests += kinds["unusable tests"]
        first = Counter(verdict.faults[0] for verdict in judged if verdict.faults)
        self.faults.update(first)
        for one in not_judged:
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
            for fault in CODE_FAULTS if judged else ():
                log_metric(f"code/{fault}", first[fault] / len(judged))
        if log_extra is not None:
            log_extra("code_tests", [_passed(verdict) for verdict in verdicts])
            log_extra("code_error", [_first_fault(verdict) for verdict in verdicts])


def _passed(verdict: CodeVerdict | NotJudged) -> str:
    return f"{verdict.passed}/{verdict.total}" if isinstance(verdict, CodeVerdict) else str(verdict)


def _first_fault(verdict: CodeVerdict | NotJudged) -> str:
    if isinstance(verdict, NotJudged) or not verdict.faults:
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
    """Runs the last ```python block of the completion in a sandbox; the share of its tests that pass, 0 to 1.

    0.0 without such a block. Where the tests cannot be read, or could not be run, it abstains (None), counts it and
    warns once. Logs `code/<fault>`: the share of completions whose first fault is this one, see `CODE_FAULTS`.

    Args:
        tests_column: dataset column; see `read_tests` for what may stand in it.
        per_test: the share of tests passed; False: 1.0 if all pass, else 0.0.
        timeout: seconds for one test.
        memory_mb: MiB for one test, Python itself (about 30) included.
        whole_text: a completion without any fence is a program as a whole.
        site_packages: programs may import what is installed here.
        require_isolation: refuse to run without namespaces (network and files stay reachable without them).
        workers: programs at once; None for one per core.
        call_seconds: no program is started later than this in one call, so that one batch of endless loops does not
            exceed the time-out of the whole reward (60 s unless set) and lose every score.

    Raises:
        ConfigError: a limit that cannot be met, or no isolation where it is required.
    """
    if not (math.isfinite(call_seconds) and call_seconds > 0) or (workers is not None and workers < 1):
        raise ConfigError(f"code_reward(workers={workers}, call_seconds={call_seconds}): both must be above 0.")
    limits = Limits(seconds=timeout, memory_mb=memory_mb)
    if require_isolation and not isolation().namespaces:
        raise ConfigError(
            f"code_reward(require_isolation=True) cannot be had here: {isolation()}. Allow user namespaces, or run "
            "in a container without secrets and network and set require_isolation=False."
        )
    return CodeReward(tests_column, per_test, limits, whole_text, site_packages, workers, call_seconds)
