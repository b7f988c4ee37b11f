"""Rewards for generated Python: does it pass its tests, and does it keep to what it may use.

Expected values never enter the sandbox. What a program is asked there are questions (an input, a call, an expression);
its answers come back as plain values and are judged here, where the program cannot reach. Printing 'passed', leaving
early, patching `assert` or returning an object that equals everything gains nothing. The one exception are tests that
only run as a whole (see `ScriptTest`).
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers import completion_texts, shown_value
from grupo.rewards.sandbox import (
    Call,
    Job,
    Limits,
    SandboxRun,
    isolation,
    run_python,
    run_together,
    warn_of_weak_isolation,
)
from grupo.rewards.verifiers import keyword_signature

CodeFault = Literal["no_code", "syntax_error", "exception", "timeout", "memory", "limit", "wrong_output"]
CODE_FAULTS: tuple[CodeFault, ...] = get_args(CodeFault)
"""What can be wrong with a program. `limit`: too many processes, or too much output."""

FLOAT_TOLERANCE = 1e-6
"""Relative, and absolute near 0, of floats in the expected value of a function test."""

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


# ---- tests


@dataclass(frozen=True)
class OutputTest:
    """The program reads `stdin` and prints `expected`; white space at the ends of lines and of the text is free."""

    stdin: str
    expected: str

    def job(self, code: str) -> Job:
        return Job(code, stdin=self.stdin)

    def holds(self, run: SandboxRun) -> bool:
        return _lines(run.stdout) == _lines(self.expected)


@dataclass(frozen=True)
class FunctionTest:
    """A function of the program returns `expected` for these arguments; lists and tuples count as the same."""

    call: Call
    expected: Any

    def job(self, code: str) -> Job:
        return Job(code, calls=(self.call,))

    def holds(self, run: SandboxRun) -> bool:
        return run.values is not None and same_value(run.values[0], self.expected)


@dataclass(frozen=True)
class AssertTest:
    """`assert` statements, cut in two: what names the program is evaluated there, the comparison here."""

    calls: tuple[Call, ...]
    conditions: tuple[str, ...]
    """Expressions over `answer_0`, `answer_1`, ..., the values of the calls."""

    def job(self, code: str) -> Job:
        return Job(code, calls=self.calls)

    def holds(self, run: SandboxRun) -> bool:
        if run.values is None:
            return False
        names = {f"answer_{number}": value for number, value in enumerate(run.values)}
        try:
            return all(_evaluate(condition, names) for condition in self.conditions)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError):
            return False  # the program's value does not take part in such a comparison


@dataclass(frozen=True)
class ScriptTest:
    """Code that passes when it comes to its end, for tests that do not come apart (loops, `check(candidate)`).

    It runs in the program's interpreter, so a program that sets out to deceive it can.
    """

    script: str

    def job(self, code: str) -> Job:
        return Job(code, script=self.script)

    def holds(self, run: SandboxRun) -> bool:
        return run.finished


CodeTest = OutputTest | FunctionTest | AssertTest | ScriptTest


def read_tests(cell: Any) -> list[CodeTest]:
    """The tests of one dataset row.

    Args:
        cell: a list of tests, or the JSON text of one. A test is a text of `assert` statements, or a dictionary with
            `input` and `output`, `function`, `args`, `kwargs` and `expected`, `assert`, or `script`. Keys whose value
            is None count as absent (columns of a dataset have the same keys in every row), `expected` apart.

    Raises:
        ValueError: there is no test in it, or one cannot be read; the message says why.
    """
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the text is not JSON ({error})") from None
    if not isinstance(cell, (list, tuple)) or not cell:
        raise ValueError(f"{'an empty list' if cell == [] else f'a {type(cell).__name__}'} instead of a list of tests")
    return [_read_test(entry) for entry in cell]


def _read_test(entry: Any) -> CodeTest:
    if isinstance(entry, str):
        return _assert_test(entry)
    if not isinstance(entry, Mapping):
        raise ValueError(f"a {type(entry).__name__} is no test")
    given = {key: value for key, value in entry.items() if value is not None}
    form = given.keys() - {"expected"} if "function" not in given else given.keys()
    if form == {"assert"} and isinstance(given["assert"], str):
        return _assert_test(given["assert"])
    if form == {"script"} and isinstance(given["script"], str):
        return ScriptTest(_parsed(given["script"], "script"))
    if "output" in form and form <= {"input", "output"}:
        if not all(isinstance(value, str) for value in given.values()):
            raise ValueError("'input' and 'output' must be texts")
        return OutputTest(given.get("input", ""), given["output"])
    if "function" in form and "expected" in entry and form <= {"function", "args", "kwargs", "expected"}:
        arguments, keywords = given.get("args", []), given.get("kwargs", {})
        if not (isinstance(arguments, (list, tuple)) and isinstance(keywords, Mapping)):
            raise ValueError("'args' must be a list and 'kwargs' a dictionary")
        function = _parsed(str(given["function"]), "function", "eval")
        call = Call(function, tuple(arguments), dict(keywords))
        if not (_is_plain(list(arguments)) and _is_plain(dict(keywords)) and _is_plain(entry["expected"])):
            raise ValueError("'args', 'kwargs' and 'expected' must be plain values")
        return FunctionTest(call, entry["expected"])
    raise ValueError(
        f"a test with the keys {', '.join(sorted(map(str, form))) or 'none'}; it has 'input' and 'output', or "
        "'function', 'args' and 'expected', or 'assert', or 'script'"
    )


def _parsed(code: str, what: str, mode: str = "exec") -> str:
    try:
        ast.parse(code, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"'{what}' is not Python: {error}") from None
    return code


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes, complex)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def same_value(found: Any, expected: Any) -> bool:
    """Equality of plain values; lists and tuples are the same (JSON has no tuples), floats within 1e-6."""
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in expected)
    numbers = (int, float)
    if isinstance(expected, float) or isinstance(found, float):
        if not (isinstance(expected, numbers) and isinstance(found, numbers)):
            return False
        try:
            return (found != found and expected != expected) or math.isclose(
                found, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE
            )
        except OverflowError:  # an integer beyond the floats
            return False
    return bool(found == expected)


# ---- asserts, cut in two

_PURE: dict[str, Any] = {
    function.__name__: function
    for function in (len, sorted, set, frozenset, list, tuple, dict, str, int, float, bool, abs, round, sum)
}
_PURE |= {function.__name__: function for function in (min, max, any, all, repr, isinstance)}
_JOINING = (
    *(ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Call),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Div, ast.cmpop, ast.boolop, ast.unaryop, ast.Load, ast.Name, ast.keyword),
)
"""What is evaluated here. No power, product or shift: the program's values could make them endless."""
_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr, ast.Starred, ast.Await)


class _Indivisible(Exception):
    """The test has to run as a whole."""


class _Cut(ast.NodeTransformer):
    """Replaces what names the program by `answer_n`, and collects it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _SCOPES):
            raise _Indivisible
        if isinstance(node, ast.Call) and _is_pure(node.func):
            node.args = [_expression(self.visit(argument)) for argument in node.args]
            for keyword in node.keywords:
                keyword.value = _expression(self.visit(keyword.value))
            return node
        if isinstance(node, ast.Name) and node.id in _PURE:
            return node
        if isinstance(node, (ast.Call, ast.Attribute, ast.Subscript, ast.Name)):
            if any(isinstance(inner, (ast.NamedExpr, ast.Await, ast.Yield)) for inner in ast.walk(node)):
                raise _Indivisible
            self.calls.append(Call(ast.unparse(node)))
            return ast.copy_location(ast.Name(f"answer_{len(self.calls) - 1}", ast.Load()), node)
        if not isinstance(node, _JOINING):
            raise _Indivisible
        return self.generic_visit(node)


def _expression(node: ast.AST) -> ast.expr:
    assert isinstance(node, ast.expr)
    return node


def _is_pure(function: ast.expr) -> bool:
    return (isinstance(function, ast.Name) and function.id in _PURE) or ast.unparse(function) == "math.isclose"


def _assert_test(code: str) -> CodeTest:
    """Raises ValueError: not Python, or no `assert` in it."""
    tree = ast.parse(_parsed(code, "assert"))
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError(f"there is no assert in {code!r:.60}")
    cut, conditions = _Cut(), []
    try:
        for statement in tree.body:
            if not isinstance(statement, ast.Assert):
                raise _Indivisible
            conditions.append(ast.unparse(cut.visit(statement.test)))
    except _Indivisible:
        return ScriptTest(code)
    # A condition without the program in it is decided by the dataset alone; that is no test.
    return AssertTest(tuple(cut.calls), tuple(conditions)) if cut.calls else ScriptTest(code)


@functools.lru_cache(maxsize=4096)
def _compiled(condition: str) -> Any:
    return compile(condition, "assert", "eval")


def _evaluate(condition: str, answers: Mapping[str, Any]) -> bool:
    return bool(eval(_compiled(condition), {"__builtins__": {}, "math": math, **_PURE, **answers}))


# ---- judging


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
                f"code_reward got {len(cells)} cells of '{self.tests_column}' for {len(completions)} completions; it "
                "needs one for each."
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
