"""Clocks, memory and the machine."""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

MIB = 2**20
PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl")


class MemoryAbove:
    """Peak resident bytes above those at construction, of this process.

    On Linux the kernel's high-water mark is reset first; elsewhere it cannot be, and a peak before construction, such
    as while loading, hides a lower one after it.
    """

    def __init__(self, *modules: Any) -> None:
        # Weights that are still on disk would be counted when they are first read, freed memory when it is used again.
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.sum()
        gc.collect()
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            if hasattr(libc, "malloc_trim"):
                libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        self.start = _status_bytes("VmRSS") or _peak_rss_bytes()

    def bytes(self) -> int:
        return (_status_bytes("VmHWM") or _peak_rss_bytes()) - self.start


def _status_bytes(field: str) -> int | None:
    """A size of /proc/self/status, where there is one."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class OtherProcesses:
    """How busy processes other than this one and its children are: their part of a measurement's noise."""

    def __init__(self) -> None:
        self.start = self._seconds()

    def cores(self, seconds: float) -> float | None:
        """Cores that others kept busy on average since construction, `seconds` ago; None where it cannot be known."""
        end = self._seconds()
        if self.start is None or end is None:
            return None
        return round(max(end - self.start, 0.0) / seconds, 3)

    @staticmethod
    def _seconds() -> float | None:
        """CPU time of the machine since it started, without that of this process and its finished children."""
        statistics_file = Path("/proc/stat")
        if not statistics_file.is_file():
            return None
        ticks = [int(field) for field in statistics_file.read_text().splitlines()[0].split()[1:]]
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = ticks[:8]
        busy = user + nice + system + interrupts + soft_interrupts + stolen
        return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


class Stopwatch:
    """Wraps functions and adds up the seconds spent in them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - started)

        return timed


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(works: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of every repeat of every work, taking turns, so that a slow minute of the machine meets all of them."""
    for _ in range(warm_up):
        for work in works.values():
            work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            found[name].append(seconds_of(work))
    return found


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> dict[str, Any]:
    """What numbers of this run depend on."""
    return {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "machine": machine_kind(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def machine_kind() -> str:
    """Cores, vector width and accelerator: what a reader needs to compare with his own machine."""
    import torch

    vectors = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX-512")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return f"{os.cpu_count()} cores, {vectors}, {accelerator or 'no GPU'}"
