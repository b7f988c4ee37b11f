"""Returning freed host memory to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def trim_host_memory(device_type: str) -> None:
    """Returns freed memory of tensors on the CPU to the system; does nothing for another kind of device or C library.

    Tensors are aligned, and glibc before 2.38 cannot put a new aligned block where one of the same size was freed
    (glibc bug 14581), so that a process holds nearly twice what it uses.
    """
    trim = _malloc_trim()
    if trim is not None and device_type == "cpu":
        trim(0)


def can_trim_host_memory() -> bool:
    return _malloc_trim() is not None


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None on other systems and C libraries."""
    if not sys.platform.startswith("linux"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
