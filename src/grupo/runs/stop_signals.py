"""SIGTERM and Ctrl-C during training: the run stops at the end of the optimizer step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

DEFAULT_HANDLERS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

_MESSAGES = {
    signal.SIGINT: "\nCtrl-C: stopping after this step, with a checkpoint. Press Ctrl-C again to stop now.\n",
    signal.SIGTERM: "\nSIGTERM: stopping after this step, with a checkpoint.\n",
}


class StopSignals:
    """Handles SIGTERM and Ctrl-C while `watched`, unless the program has handlers of its own.

    Python delivers signals to the main thread only; in another thread nothing is handled.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that asked the run to stop, in this process or in another process of the run."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.signum = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        handled = [
            signum
            for signum, default in DEFAULT_HANDLERS.items()
            if in_main_thread and signal.getsignal(signum) == default
        ]
        for signum in handled:
            signal.signal(signum, self._handle)
        try:
            yield
        finally:
            for signum in handled:
                signal.signal(signum, DEFAULT_HANDLERS[signum])

    def raise_if_received(self) -> None:
        """Ends the program as the signal would have. Call when everything has been saved.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            SystemExit: SIGTERM; with 143, the exit code of a shell for a terminated program.
        """
        if self.signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signum is not None:
            raise SystemExit(128 + self.signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signum = signum
        # Not through a stream: the program may be in the middle of writing to it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), _MESSAGES[signal.Signals(signum)].encode())
