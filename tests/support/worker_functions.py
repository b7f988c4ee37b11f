"""Functions that the tests run in worker processes, which import them by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def double(item: Any) -> Any:
    return item * 2


def behave(item: Any) -> Any:
    """Do what the item says."""
    what, value = item
    if what == "sleep":
        time.sleep(value)
    elif what == "mark and sleep":
        Path(value).touch()
        time.sleep(30)
    elif what == "spin":  # C code that lets no other thread of its process run
        9 ** (9**value)
    elif what == "allocate":
        return len(bytearray(value * 2**20))
    elif what == "raise":
        raise ValueError(value)
    elif what == "exit":
        sys.exit(value)
    elif what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "unpicklable":
        return lambda: value
    elif what == "nest":
        return behave((what, value))
    return value


def process_id(_: Any) -> int:
    time.sleep(0.05)
    return os.getpid()


def refuse() -> None:
    raise ImportError("no such library here")


PREPARED = []


def prepare_slowly() -> None:
    time.sleep(0.5)
    PREPARED.append(os.getpid())


def prepared(_: Any) -> list[int]:
    return PREPARED


def write_and_hang(item: tuple[str, str]) -> None:
    """Leave the id of this process in a file, then keep busy: asleep, in Python, or in C."""
    path, how = item
    Path(path).with_suffix(".part").write_text(str(os.getpid()))
    Path(path).with_suffix(".part").rename(path)
    while how == "sleep":
        time.sleep(60)
    while how == "python":
        pass
    9 ** (9**9)
