"""Stop requests: one signal is noted, a second one acts."""

from __future__ import annotations

import os
import signal

import pytest

from flame.training.preemption import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_loop_is_told(number):
    with StopRequest(lambda flag: flag) as request:
        assert not request.agreed()
        os.kill(os.getpid(), number)
        assert request.agreed()


def test_another_ranks_request_counts():
    with StopRequest(lambda flag: flag + 1) as request:
        assert request.agreed()


def test_a_second_signal_acts_as_before():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("outer"))
    try:
        now = [100.0]
        with StopRequest(lambda flag: flag, clock=lambda: now[0]) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 1  # the same request, by another way
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
            now[0] += 10
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == ["outer"]
            assert request.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["outer", "outer"]
    finally:
        signal.signal(signal.SIGTERM, before)
