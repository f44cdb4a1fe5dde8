"""Being asked to stop: SIGTERM, SIGUSR1 and Ctrl-C end the run at a step on which all ranks agree, within a limit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch

from flame.launch import exit_codes, notes
from flame.launch.stop_signals import SIGNALS, SignalWatcher

logger = logging.getLogger(__name__)

# Of the limit; torchrun kills after the whole of it.
OWN_SHARE = 0.9
# That the end of a run may take which has nothing to lose. It may wait for a rank that the same signal has ended.
END_SECONDS = 5.0


class Stopped(BaseException):
    """The run was asked to stop, at a moment when stopping at once loses nothing."""


class StopRequest:
    """Notes a signal instead of dying of it. Use as a context in the main thread.

    At first a signal raises ``Stopped`` in the main thread, and ``END_SECONDS`` later ends the process wherever that
    thread then is. Inside ``deferred``, where there is work to lose, it is only noted and the training loop asks
    between two steps. After the limit the process ends all the same, and a second signal ends it at once.

    Args:
        limit_seconds: ``checkpoint.preempt_timeout_seconds``, from the signal to the end.

    Attributes:
        received: the first signal.
        has_saved: the work is saved; torchrun, which ends the ranks after the first, may come as a second signal.
        last_checkpoint: describes the newest checkpoint, for the message at the limit.
    """

    def __init__(self, limit_seconds: float):
        self.limit_seconds = OWN_SHARE * limit_seconds
        self.received: signal.Signals | None = None
        self.has_saved = False
        self.last_checkpoint: Callable[[], str] = lambda: "none"
        self._raises = True
        self._has_raised = False
        self._has_work = False
        self._limit = threading.Timer(self.limit_seconds, self._end_at_limit)
        self._without_work = threading.Timer(END_SECONDS, self._end_without_work)
        self._limit.daemon = self._without_work.daemon = True

    def __enter__(self) -> StopRequest:
        self._watcher = SignalWatcher(self._start_clock, self._end_at_once).__enter__()
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._watcher.__exit__(*exception)
        self._limit.cancel()
        self._without_work.cancel()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While inside, a signal is only noted."""
        self._raises, self._has_work = False, True
        try:
            yield
        finally:
            self._raises, self._has_work = True, False

    @contextmanager
    def interruptible(self, alone: bool) -> Iterator[None]:
        """While inside, a signal raises ``Stopped``, if this process is ``alone``: others could not be told.

        Raises:
            Stopped: there is a signal.
        """
        self._raises = alone
        try:
            if alone and self.received is not None:
                raise Stopped
            yield
        finally:
            self._raises = False

    def agreed(self, any_rank: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank. The device is not waited for.

        Args:
            any_rank: combines each rank's 0 or 1, an int64 scalar on the CPU, to the largest over all ranks.
        """
        stop = bool(any_rank(torch.tensor(int(self.received is not None))))
        if self.received is not None:
            logger.warning("%s: stopping, with everything saved", self.received.name)
        return stop

    def is_received_within(self, seconds: float) -> bool:
        """Whether there is a signal, waiting for one for so long."""
        deadline = time.monotonic() + seconds
        while self.received is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.received is not None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if self._raises and not self._has_raised:
            self._has_raised = True
            raise Stopped

    def _start_clock(self, number: int) -> None:
        self.received = self.received or signal.Signals(number)
        self._limit.start()
        if not self._has_work:
            self._without_work.start()

    def _end_at_once(self, number: int) -> None:
        _end(exit_codes.PREEMPTED if self.has_saved else exit_codes.KILLED + number)

    def _end_without_work(self) -> None:
        if not self._has_work:
            last = self.last_checkpoint()
            logger.warning(
                "%s: ended while it waited for something; the last checkpoint is %s", self.received.name, last
            )
            _end(exit_codes.PREEMPTED)

    def _end_at_limit(self) -> NoReturn:
        logger.error(
            "%s came %.0f s ago and no step could be saved since (checkpoint.preempt_timeout_seconds); the last "
            "checkpoint is %s",
            self.received.name,
            self.limit_seconds,
            self.last_checkpoint(),
        )
        _end(exit_codes.PREEMPTED)


def _end(code: int) -> NoReturn:
    """End this process and its data workers now, from any thread."""
    for child in multiprocessing.active_children():
        child.kill()
    notes.leave_code(code)
    os._exit(code)
