"""The time that the device takes: marks between the pieces of work that it is given, and the seconds between two."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Mark = float | torch.cuda.Event


class HostClock:
    """The clock of a CPU, whose work is done when the call that gives it returns; a mark is a moment in seconds.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now

    def mark(self) -> float:
        """The present moment."""
        return self._now()

    def seconds(self, start: float, end: float) -> float:
        """Seconds from one mark to another."""
        return end - start


class DeviceClock:
    """The clock of a GPU; a mark is an event behind all that the device was given so far. The host waits for nothing.

    Args:
        device: whose current stream is measured.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """The moment at which the device is done with the work that it has."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from one mark to another, both of which the device has passed.

        Raises:
            RuntimeError: it has not.
        """
        return start.elapsed_time(end) / 1000


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock that the work of a device is measured by."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
