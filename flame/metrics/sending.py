"""Numbers that go from the device to the host while the host goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Sent:
    """Numbers on their way to the host.

    Attributes:
        numbers: on the host; from a GPU not to be read before they are there.
        ready: the event behind the copy; None where there is nothing to wait for.
    """

    numbers: torch.Tensor
    ready: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """The numbers, once they are there; all that the device was given before them is then done."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.numbers

    def arrives_within(self, seconds: float) -> bool:
        """Whether the numbers are there, waiting for them for so long; never on a device that has failed."""
        deadline = time.monotonic() + seconds
        try:
            while self.ready is not None and not self.ready.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # any error of the device's, also one of work that has nothing to do with the numbers
            return False
        return True


def send(numbers: torch.Tensor) -> Sent:
    """Start the way of a tensor to the host, which waits for nothing; the tensor must not be changed any more."""
    if numbers.device.type == "cpu":
        return Sent(numbers)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    return Sent(host, torch.cuda.current_stream(numbers.device).record_event())
