"""A penalty for programs that use more than the task needs, by their syntax tree alone.

It reads code without running it, so it cannot see what an allowed function does. It complements `code_reward`, whose
sandbox and comparison of values do not depend on it.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers.extraction import completion_texts
from grupo.rewards.code.reward import extract_code

ALLOWED_MODULES = (
    *("__future__", "abc", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal"),
    *("enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re"),
    *("statistics", "string", "sys", "time", "typing"),
)

MAX_CHARACTERS = 200_000
"""Longer programs are not parsed: parsing hostile megabytes is too expensive."""

FORBIDDEN_NAMES = frozenset(
    {"__import__", "__builtins__", "__loader__", "__spec__", "eval", "exec", "compile", "open", "globals", "locals"}
    | {"vars", "breakpoint", "help", "getattr", "setattr", "delattr"}
)
"""Builtins that escape from the program text. `getattr` and similar ones may be called with a literal name."""

_BY_NAME = {"getattr": 1, "setattr": 1, "delattr": 1, "hasattr": 1, "attrgetter": 0, "methodcaller": 0}
"""Function that takes the name of an attribute -> position of this argument."""

_DUNDER = re.compile(r"__\w+__")
_USUAL_DUNDERS = {"__name__", "__doc__", "__init__", "__len__", "__eq__", "__repr__", "__str__", "__hash__", "__call__"}
_USUAL_DUNDERS |= {"__post_init__", "__getitem__", "__setitem__", "__iter__", "__next__", "__contains__", "__new__"}
_USUAL_DUNDERS |= {"__lt__", "__le__", "__gt__", "__ge__", "__ne__", "__add__", "__sub__", "__mul__", "__neg__"}
_FRAMES = {"f_globals", "f_locals", "f_builtins", "f_back", "f_code", "gi_frame", "cr_frame", "ag_frame", "tb_frame"}
_FRAMES |= {"func_globals", "_getframe", "bltns"}
_SYS = {"stdin", "stdout", "stderr", "argv", "exit", "maxsize", "float_info", "version_info", "setrecursionlimit"}
_SYS |= {"getrecursionlimit", "getsizeof", "set_int_max_str_digits", "maxunicode", "byteorder"}
_DOORS = {"sys", "os", "builtins", "importlib", "subprocess", "ctypes", "socket"}
"""Modules that no attribute may lead to."""
_MEMBERS = {"collections.abc", "datetime.time"}
"""Members that only share their name with a module."""
_REACHED_BY_FORMAT = re.compile(r"\{[^{}]*[.\[]_")


def cheating_signs(code: str, allowed: Sequence[str] = ALLOWED_MODULES) -> list[str]:
    """One phrase for each suspicious construct of a program; empty for a clean one.

    Raises:
        SyntaxError: it is not Python, or too long or too deeply nested to be parsed.
    """
    if len(code) > MAX_CHARACTERS:
        raise SyntaxError(f"more than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(code)
        return list(dict.fromkeys(_Inspector(frozenset(allowed)).signs(tree)))
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL character, nesting
        raise SyntaxError(str(error) or "too deeply nested") from None


class _Inspector:
    def __init__(self, allowed: frozenset[str]) -> None:
        self.allowed = allowed
        self.modules: dict[str, str] = {}
        """Name in the program -> module that it refers to."""

    def signs(self, tree: ast.Module) -> Iterator[str]:
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.modules[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        # A call with a literal name, and `sys.` before a harmless attribute, excuse the name inside them.
        excused = {id(name) for node in nodes for name in self._excused(node)}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from self._imports(node)
            elif isinstance(node, ast.Name) and id(node) not in excused:
                if node.id in FORBIDDEN_NAMES:
                    yield f"uses {node.id}"
                elif self.modules.get(node.id) == "sys":
                    yield "uses sys itself"
            elif isinstance(node, ast.Attribute):
                yield from self._attribute(node)
            elif isinstance(node, ast.Call):
                yield from self._by_name(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _REACHED_BY_FORMAT.search(node.value):
                    yield "a format string that accesses hidden attributes"
            elif isinstance(node, ast.FunctionDef) and _is_always_true(node):
                yield f"{node.name} always returns True"

    def _excused(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            yield node.func
        if isinstance(node, ast.Attribute) and self._module_of(node.value) == "sys":
            yield node.value

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module or ""]
            if node.level:
                yield "uses a relative import"
                return
        for name in names:
            if not self._is_allowed(name):
                yield f"imports {name}"
        if isinstance(node, ast.ImportFrom) and self._is_allowed(names[0]):
            for alias in node.names:
                yield from self._member(names[0], alias.name)

    def _is_allowed(self, module: str) -> bool:
        """Whether the module or a package that contains it is on the list."""
        parts = module.split(".")
        return any(".".join(parts[:count]) in self.allowed for count in range(1, len(parts) + 1))

    def _member(self, module: str, name: str) -> Iterator[str]:
        """Signs in the use of a module member: modules expose other modules, as in `json.codecs.open`."""
        is_standard = module.partition(".")[0] in sys.stdlib_module_names
        if module == "sys" and name not in _SYS:
            yield f"uses sys.{name}"
        elif _hidden(name) or (is_standard and name.startswith("_")):
            yield f"accesses {module}.{name}"
        elif name in _DOORS or (
            is_standard
            and name in sys.stdlib_module_names
            and not self._is_allowed(name)
            and f"{module}.{name}" not in _MEMBERS
        ):
            yield f"accesses the module {name} through {module}"

    def _module_of(self, node: ast.expr) -> str | None:
        """The module, or member of one, at the beginning of a dotted name."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return self.modules.get(node.id) if isinstance(node, ast.Name) else None

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        module = self._module_of(node.value)
        if module == "sys" and not isinstance(node.value, ast.Name):
            module = None  # sys.stdin.readline: the part after sys has been checked
        if module is not None:
            yield from self._member(module, node.attr)
        elif _hidden(node.attr) or node.attr in _DOORS:
            yield f"accesses {node.attr}"

    def _by_name(self, node: ast.Call) -> Iterator[str]:
        function = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        position = _BY_NAME.get(function)
        if position is None:
            return
        names = node.args[position:] if function == "attrgetter" else node.args[position : position + 1]
        for name in names or [ast.Constant(None)]:
            if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                yield f"{function} with a computed name"
            elif any(_hidden(part) or part in FORBIDDEN_NAMES for part in name.value.split(".")):
                yield f"{function} of {name.value}"


def _hidden(attribute: str) -> bool:
    """Whether an attribute leads from a value to the interpreter; special methods that classes define do not."""
    return attribute in _FRAMES or (bool(_DUNDER.fullmatch(attribute)) and attribute not in _USUAL_DUNDERS)


def _is_always_true(function: ast.FunctionDef) -> bool:
    body = [statement for statement in function.body if not _is_docstring(statement)]
    return (
        function.name in ("__eq__", "__ge__", "__le__", "__bool__", "__contains__")
        and len(body) == 1
        and isinstance(body[0], ast.Return)
        and isinstance(body[0].value, ast.Constant)
        and body[0].value.value is True
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class NoCheating:
    """See `no_cheating`."""

    def __init__(self, allowed: tuple[str, ...], clean: float, cheating: float, whole_text: bool) -> None:
        self.__name__ = "no_cheating"
        self.allowed = allowed
        self.clean = clean
        self.cheating = cheating
        self.whole_text = whole_text
        self.value_range: tuple[float, float] = (cheating, clean)

    def __call__(
        self,
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        found = [self.signs(text) for text in completion_texts(completions)]
        if log_extra is not None:
            log_extra("cheating_signs", ["; ".join(signs or []) for signs in found])
        if log_metric is not None and found:
            log_metric("no_cheating/caught", sum(bool(signs) for signs in found) / len(found))
        return [self.score(signs) for signs in found]

    def signs(self, text: str) -> list[str] | None:
        """The signs in the program of a completion; None without a program that can be parsed."""
        code = extract_code(text, self.whole_text)
        try:
            return None if code is None else cheating_signs(code, self.allowed)
        except SyntaxError:
            return None

    def score(self, signs: list[str] | None) -> float:
        if signs is None:
            return min(self.clean, 0.0)
        return self.cheating if signs else self.clean


def no_cheating(
    allowed: Sequence[str] = ALLOWED_MODULES, clean: float = 0.0, cheating: float = -1.0, whole_text: bool = False
) -> NoCheating:
    """`cheating` for a program with suspicious constructs, else `clean`; never above 0 without a program.

    Suspicious are imports of modules other than `allowed` (including their submodules), `__import__`, `eval`, `exec`,
    `compile`, `open`, `globals` and similar builtins, attributes that lead to the interpreter (`__class__`,
    `__globals__`, frames), `getattr` with a computed name, modules accessed through others, `sys` beyond streams and
    limits, and comparisons that are always true. Text that is not Python cannot run, and gets 0, or `clean` if that is
    lower.

    Raises:
        ConfigError: `cheating` is not below `clean` and 0.
    """
    modules = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    if not (math.isfinite(clean) and math.isfinite(cheating) and cheating < min(clean, 0.0)):
        raise ConfigError(
            f"no_cheating(clean={clean}, cheating={cheating}) punishes nothing: set cheating below clean and 0."
        )
    return NoCheating(modules, clean, cheating, whole_text)
