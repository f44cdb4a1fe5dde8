"""Numbers on their way to the host: when they are there, and what becomes of them on a device that fails."""

from __future__ import annotations

import pytest
import torch

from flame.metrics.sending import Sent, send


class Event:
    """Stands in for a CUDA event that is passed after some queries, or never on a device that has failed."""

    def __init__(self, num_queries=0, fails=False):
        self.num_queries, self.fails = num_queries, fails

    def query(self):
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.num_queries -= 1
        return self.num_queries < 0


def test_a_cpu_has_nothing_to_send():
    numbers = torch.arange(3.0)
    sent = send(numbers)
    assert sent.wait() is numbers
    assert sent.arrives_within(0.0)


def test_numbers_arrive_in_time_or_not():
    numbers = torch.zeros(1)
    assert Sent(numbers, Event(num_queries=3)).arrives_within(60.0)
    assert not Sent(numbers, Event(num_queries=10**6)).arrives_within(0.02)
    assert not Sent(numbers, Event(fails=True)).arrives_within(60.0)


@pytest.mark.gpu
def test_the_host_goes_on_before_the_numbers_are_there():
    numbers = torch.arange(3.0, device="cuda")
    send(numbers).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        sent = send(numbers + 1)
        assert not sent.arrives_within(0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sent.wait().tolist() == [1.0, 2.0, 3.0]
