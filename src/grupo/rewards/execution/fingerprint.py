"""A short hash of a reward function: a resumed run must be paid by the same one."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 4
"""Nesting of values that are hashed; a deeper value counts by its type."""


def fingerprint(function: Callable[..., Any]) -> str:
    """Hash of a function's source and the values that a partial or closure fixes, or of an object's class and values.

    It does not change with code that the function calls, nor with data that it reads.
    """
    return _hash(json.dumps(_as_plain_value(function, MAX_DEPTH), sort_keys=True))


def _as_plain_value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth == 0:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return [_as_plain_value(item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _as_plain_value(item, depth - 1) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return [_as_plain_value(part, depth - 1) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType):
        return [_as_plain_value(part, depth - 1) for part in (value.__func__, value.__self__)]
    if isinstance(value, types.FunctionType):
        # A list in a closure is where something is collected; plain values cannot change.
        closure = inspect.getclosurevars(value).nonlocals.values()
        fixed = [item for item in closure if isinstance(item, bool | int | float | str)]
        return [value.__qualname__, _source_hash(value), *fixed]
    if callable(value) and not isinstance(value, type):
        attributes = getattr(value, "__dict__", {}).items()
        public = {name: _as_plain_value(item, depth - 1) for name, item in attributes if not name.startswith("_")}
        return [type(value).__qualname__, _source_hash(type(value)), public]
    return type(value).__name__


def _source_hash(thing: Any) -> str | None:
    try:
        return _hash(inspect.getsource(thing))
    except (OSError, TypeError):  # typed into an interpreter, or built in
        return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()
