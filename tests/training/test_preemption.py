"""Stop requests: when a signal is noted and when it acts, the limit, the second signal."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from contextlib import nullcontext

import pytest
import torch

from flame.launch import exit_codes, notes, stop_signals
from flame.launch.stop_signals import SIGNALS
from flame.training import preemption
from flame.training.preemption import Stopped, StopRequest


def alone(flag):
    return flag


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_where_there_is_work_to_lose_a_signal_is_noted(number):
    with StopRequest(30) as request, request.deferred():
        assert not request.agreed(alone)
        send(number)
        assert request.agreed(alone)
        assert request.received == number
        assert request.is_received_within(0)


def test_another_ranks_request_counts():
    with StopRequest(30) as request, request.deferred():
        assert request.agreed(lambda flag: flag + 1)


def test_before_and_after_training_a_signal_stops_at_once():
    with StopRequest(30) as request:
        with pytest.raises(Stopped):
            send()
        with request.deferred():
            pass
    with StopRequest(30) as request:
        with request.deferred():
            pass
        with pytest.raises(Stopped):
            send()


def test_a_single_process_is_interrupted_while_it_waits_for_data():
    with StopRequest(30) as request, request.deferred():
        with pytest.raises(Stopped), request.interruptible(alone=True):
            send()
        with pytest.raises(Stopped), request.interruptible(alone=True):
            pytest.fail("a signal that came before is found on the way in")


def test_one_of_several_processes_is_not():
    with StopRequest(30) as request, request.deferred():
        with request.interruptible(alone=False):
            send()
        assert request.agreed(alone)


def test_handlers_are_put_back():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with StopRequest(30) as request, request.deferred():
        send()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


# What ends the process is tried in a forked one, whose main thread is stuck as in a collective: handlers of Python do
# not run there.


def stuck(folder, limit, has_saved, has_work):
    os.environ |= {notes.FOLDER: str(folder), "LOCAL_RANK": "3"}
    with StopRequest(limit) as request, request.deferred() if has_work else nullcontext():
        request.last_checkpoint = lambda: "step 40"
        request.has_saved = has_saved
        (folder / "ready").touch()
        _hold_the_main_thread()


def _hold_the_main_thread():
    """Wait where no signal's handler gets a turn: a read of torch's store, which is C++ all through."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).get("never")


def start(folder, limit, has_saved=False, has_work=True):
    if torch.cuda.is_available():
        pytest.skip("CUDA does not outlive a fork")
    child = multiprocessing.get_context("fork").Process(target=stuck, args=(folder, limit, has_saved, has_work))
    child.start()
    deadline = time.monotonic() + 20
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    return child


def test_the_limit_holds_whatever_the_main_thread_does(tmp_path, caplog, capfd):
    child = start(tmp_path, limit=1)
    began = time.monotonic()
    os.kill(child.pid, signal.SIGTERM)
    child.join(20)
    assert child.exitcode == exit_codes.PREEMPTED
    assert time.monotonic() - began < 5
    assert notes.read_codes(tmp_path)[3][0] == exit_codes.PREEMPTED


def test_where_there_is_no_work_to_lose_it_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "END_SECONDS", 0.5)
    child = start(tmp_path, limit=60, has_work=False)
    os.kill(child.pid, signal.SIGTERM)
    child.join(20)
    assert child.exitcode == exit_codes.PREEMPTED
    assert notes.read_codes(tmp_path)[3][0] == exit_codes.PREEMPTED


def test_work_to_lose_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "END_SECONDS", 0.1)
    child = start(tmp_path, limit=60)
    os.kill(child.pid, signal.SIGTERM)
    child.join(1)
    assert child.is_alive()
    child.kill()
    child.join(20)


@pytest.mark.parametrize("has_saved", [False, True])
def test_a_second_signal_ends_it_at_once(tmp_path, monkeypatch, has_saved):
    monkeypatch.setattr(stop_signals, "SAME_REQUEST_SECONDS", 0.5)
    child = start(tmp_path, 60, has_saved)
    for wait in (0.1, 0.7):  # the same request by another way, then another one
        os.kill(child.pid, signal.SIGTERM)
        time.sleep(wait)
        assert child.is_alive()
    os.kill(child.pid, signal.SIGUSR1)
    child.join(5)
    assert child.exitcode == (exit_codes.PREEMPTED if has_saved else exit_codes.KILLED + signal.SIGUSR1)
