"""SIGTERM and Ctrl-C during training: a wish that is met at the end of the optimizer step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

_SAID = {
    signal.SIGINT: "\nCtrl-C: the run stops after this step and saves a checkpoint. Ctrl-C again stops it at once.\n",
    signal.SIGTERM: "\nSIGTERM: the run stops after this step and saves a checkpoint.\n",
}


class StopSignals:
    """Takes SIGTERM and Ctrl-C while `watched`, and only where the program had no handlers of its own.

    Python delivers signals to its main thread alone; in another one nothing is watched.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The signal that asked for the end, of this process or of another one of the run."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.received = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        ours = [
            number for number, default in DEFAULTS.items() if in_main_thread and signal.getsignal(number) == default
        ]
        for number in ours:
            signal.signal(number, self._take)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, DEFAULTS[number])

    def end_if_received(self) -> None:
        """Ends the program as the signal would have, after all that had to be saved.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            SystemExit: SIGTERM; with 143, the shell's code for a program that it ended.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = number
        # Not through a stream: the program may be in the middle of writing to it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), _SAID[signal.Signals(number)].encode())
