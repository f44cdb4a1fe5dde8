"""The signals that ask a run to stop: what they do at its start, and how they are noticed whatever it is doing.

Standard library only.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from flame.launch import exit_codes

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# The terminal sends Ctrl-C to every process and torchrun hands it on: within this time it is one request.
SAME_REQUEST_SECONDS = 3.0
CLOSE = b"\0"


def exit_when_asked() -> None:
    """Have each of the signals end this process with ``PREEMPTED``: while it starts, there is nothing to save."""
    for number in SIGNALS:
        signal.signal(number, _exit)


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(exit_codes.PREEMPTED)


class SignalWatcher:
    """Calls ``first`` for the first request to stop and ``again`` for each later one, in a thread of its own.

    Python runs a signal's handler in the main thread, and only between two of its instructions: not while that thread
    waits in a collective or for a child. The system also writes each signal that has a handler to a socket, which the
    thread reads (``signal.set_wakeup_fd``). Use as a context in the main thread.

    Args:
        first, again: called with the signal's number.
    """

    def __init__(self, first: Callable[[int], None], again: Callable[[int], None]):
        self._first, self._again = first, again

    def __enter__(self) -> SignalWatcher:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._previous)
        self._writer.send(CLOSE)  # closing it would not do: forked processes hold it too
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        first_at: float | None = None
        while (message := self._reader.recv(1)) != CLOSE:
            if message[0] not in SIGNALS:
                continue
            if first_at is None:
                first_at = time.monotonic()
                self._first(message[0])
            elif time.monotonic() - first_at > SAME_REQUEST_SECONDS:
                self._again(message[0])
