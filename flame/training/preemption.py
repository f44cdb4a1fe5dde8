"""Being asked to stop: SIGTERM and SIGUSR1 end the run at a step on which all ranks agree."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Notes a signal instead of dying of it; the training loop asks between two steps.

    A second signal acts as it would without flame. Use as a context in the main thread.

    Args:
        any_rank: combines each rank's 0 or 1, an int64 scalar on the CPU, to the largest over all ranks.
    """

    def __init__(self, any_rank: Callable[[torch.Tensor], torch.Tensor]):
        self._any_rank = any_rank
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

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
        self._received = signal.Signals(number)
        signal.signal(number, self._previous[self._received])
