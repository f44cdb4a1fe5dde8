"""Being asked to stop: SIGTERM, SIGUSR1 and Ctrl-C end the run at a step on which all ranks agree."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# The terminal sends Ctrl-C to every process and torchrun hands it on: within this time it is one request.
SAME_REQUEST_SECONDS = 3.0


class StopRequest:
    """Notes a signal instead of dying of it; the training loop asks between two steps.

    A later signal acts as it would without flame. Use as a context in the main thread.

    Args:
        any_rank: combines each rank's 0 or 1, an int64 scalar on the CPU, to the largest over all ranks.
        clock: seconds, monotonic.
    """

    def __init__(self, any_rank: Callable[[torch.Tensor], torch.Tensor], clock: Callable[[], float] = time.monotonic):
        self._any_rank = any_rank
        self._clock = clock
        self._received: signal.Signals | None = None
        self._received_at = 0.0
        self._previous: dict[int, signal.Handlers | Callable | None] = {}

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank. The device is not waited for."""
        stop = bool(self._any_rank(torch.tensor(int(self._received is not None))))
        if self._received is not None:
            logger.warning("%s: saving, then stopping", self._received.name)
        return stop

    def _note(self, number: int, _frame: object) -> None:
        if self._received is None:
            self._received, self._received_at = signal.Signals(number), self._clock()
        elif self._clock() - self._received_at > SAME_REQUEST_SECONDS:
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
