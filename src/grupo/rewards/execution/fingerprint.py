"""What a reward function is, in plain values: enough to notice that a resumed run would be paid by another one."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 4
"""Of values inside of values; what lies deeper is named by its type."""


def identity(function: Callable[..., Any]) -> str:
    """A short hash: of a function's source, and what a partial or a closure has fixed; of an object's class and values.

    It cannot see a change in what the function calls in turn, nor in data that it reads.
    """
    return _hash(json.dumps(_plain(function, MAX_DEPTH), sort_keys=True))


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth == 0:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return [_plain(part, depth - 1) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType):
        return [_plain(value.__func__, depth - 1), _plain(value.__self__, depth - 1)]
    if isinstance(value, types.FunctionType):
        return [value.__qualname__, _source(value), *_fixed_by_closure(value)]
    if callable(value) and not isinstance(value, type):
        return [type(value).__qualname__, _source(type(value)), _settings(value, depth - 1)]
    return type(value).__name__


def _settings(instance: Any, depth: int) -> dict[str, Any]:
    public = {name: value for name, value in getattr(instance, "__dict__", {}).items() if not name.startswith("_")}
    return {name: _plain(value, depth) for name, value in public.items()}


def _fixed_by_closure(function: types.FunctionType) -> list[Any]:
    """Values that cannot change; a list in a closure is where something is collected."""
    values = inspect.getclosurevars(function).nonlocals.values()
    return [value for value in values if isinstance(value, bool | int | float | str)]


def _source(thing: Any) -> str | None:
    try:
        return _hash(inspect.getsource(thing))
    except (OSError, TypeError):  # typed into an interpreter, or built in
        return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()
