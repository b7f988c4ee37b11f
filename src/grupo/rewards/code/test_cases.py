"""Tests of generated programs: the calls to run in the sandbox, and the comparison of their values."""

from __future__ import annotations

import ast
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grupo.rewards.code.sandbox.runner import Call, SandboxJob, SandboxRun

FLOAT_TOLERANCE = 1e-6
"""Tolerance of floats in expected values: relative, and absolute near 0."""


@dataclass(frozen=True)
class OutputTest:
    """The program reads `stdin` and prints `expected`; white space at the ends of lines and of the text is ignored."""

    stdin: str
    expected: str

    def job(self, code: str) -> SandboxJob:
        return SandboxJob(code, stdin=self.stdin)

    def passes(self, run: SandboxRun) -> bool:
        return _lines(run.stdout) == _lines(self.expected)


@dataclass(frozen=True)
class FunctionTest:
    """A function of the program returns `expected` for these arguments; lists and tuples count as equal."""

    call: Call
    expected: Any

    def job(self, code: str) -> SandboxJob:
        return SandboxJob(code, calls=(self.call,))

    def passes(self, run: SandboxRun) -> bool:
        return run.values is not None and same_value(run.values[0], self.expected)


@dataclass(frozen=True)
class AssertTest:
    """`assert` statements split in two: calls of the program are evaluated in the sandbox, comparisons here."""

    calls: tuple[Call, ...]
    conditions: tuple[str, ...]
    """Expressions over `answer_0`, `answer_1`, ..., the values of the calls."""

    def job(self, code: str) -> SandboxJob:
        return SandboxJob(code, calls=self.calls)

    def passes(self, run: SandboxRun) -> bool:
        if run.values is None:
            return False
        names = {f"answer_{number}": value for number, value in enumerate(run.values)}
        try:
            return all(_evaluate(condition, names) for condition in self.conditions)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError):
            return False  # the program's value does not support such a comparison


@dataclass(frozen=True)
class ScriptTest:
    """Code that passes if it completes, for tests that cannot be split (loops, `check(candidate)`).

    It runs in the program's interpreter, so a program that tries to deceive it can.
    """

    script: str

    def job(self, code: str) -> SandboxJob:
        return SandboxJob(code, script=self.script)

    def passes(self, run: SandboxRun) -> bool:
        return run.finished


CodeTest = OutputTest | FunctionTest | AssertTest | ScriptTest


def read_tests(cell: Any) -> list[CodeTest]:
    """The tests of one dataset row.

    Args:
        cell: a list of tests, or such a list as JSON text. A test is a string of `assert` statements, or a dictionary
            with `input` and `output`; `function`, `args`, `kwargs` and `expected`; `assert`; or `script`. Keys other
            than `expected` whose value is None count as absent, since a dataset column has the same keys in every row.

    Raises:
        ValueError: no test, or one that cannot be read; the message says why.
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
        raise ValueError(f"a {type(entry).__name__} is not a test")
    given = {key: value for key, value in entry.items() if value is not None}
    form = given.keys() - {"expected"} if "function" not in given else given.keys()
    if form == {"assert"} and isinstance(given["assert"], str):
        return _assert_test(given["assert"])
    if form == {"script"} and isinstance(given["script"], str):
        return ScriptTest(_parsed(given["script"], "script"))
    if "output" in form and form <= {"input", "output"}:
        if not all(isinstance(value, str) for value in given.values()):
            raise ValueError("'input' and 'output' must be strings")
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
        f"a test with the keys {', '.join(sorted(map(str, form))) or 'none'}; give 'input' and 'output', or "
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
    """Equality of plain values; lists and tuples are equal (JSON has no tuples), floats within 1e-6."""
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


# ---- splitting asserts

_PURE: dict[str, Any] = {
    function.__name__: function
    for function in (len, sorted, set, frozenset, list, tuple, dict, str, int, float, bool, abs, round, sum)
}
_PURE |= {function.__name__: function for function in (min, max, any, all, repr, isinstance)}
_JOINING = (
    *(ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Call),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Div, ast.cmpop, ast.boolop, ast.unaryop, ast.Load, ast.Name, ast.keyword),
)
"""Nodes that are evaluated here. No power, product or shift: the program's values could make them endless."""
_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr, ast.Starred, ast.Await)


class _Indivisible(Exception):
    """The test has to run as a whole."""


class _Splitter(ast.NodeTransformer):
    """Replaces expressions that use the program by `answer_n`, and collects them."""

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
    """Raises ValueError if the code is not Python or has no `assert`."""
    tree = ast.parse(_parsed(code, "assert"))
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError(f"there is no assert in {code!r:.60}")
    splitter, conditions = _Splitter(), []
    try:
        for statement in tree.body:
            if not isinstance(statement, ast.Assert):
                raise _Indivisible
            conditions.append(ast.unparse(splitter.visit(statement.test)))
    except _Indivisible:
        return ScriptTest(code)
    # A condition that does not use the program does not test it.
    return AssertTest(tuple(splitter.calls), tuple(conditions)) if splitter.calls else ScriptTest(code)


@functools.lru_cache(maxsize=4096)
def _compiled(condition: str) -> Any:
    return compile(condition, "assert", "eval")


def _evaluate(condition: str, answers: Mapping[str, Any]) -> bool:
    return bool(eval(_compiled(condition), {"__builtins__": {}, "math": math, **_PURE, **answers}))
