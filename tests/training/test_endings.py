"""What a run says that does not come to its end, and its exit code."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from flame.errors import ConfigError, UserError, WorkerDied
from flame.launch import exit_codes
from flame.training import endings
from flame.training.endings import explain
from flame.training.preemption import Stopped, StopRequest
from tests.parallel.ranks import run_cases

LOST = RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7711")


@pytest.fixture
def stop(monkeypatch):
    monkeypatch.setattr(endings, "OTHERS_SECONDS", 0.01)
    return StopRequest(30)


def test_faults_of_the_user(stop, caplog, capsys):
    assert explain(ConfigError(["--a: wrong", "--b: wrong"]), None) == exit_codes.USER_ERROR
    assert capsys.readouterr().err == "--a: wrong\n--b: wrong\n"
    assert explain(UserError("no such data"), stop) == exit_codes.USER_ERROR
    assert explain(WorkerDied("out of memory"), stop) == exit_codes.CRASH


def test_what_is_not_known_keeps_its_traceback(stop):
    assert explain(ValueError("?"), stop) is None
    assert explain(LOST, None) is None


def test_a_lost_rank_is_quiet_when_this_one_is_told_to_end(stop):
    """torchrun tells the others as soon as a rank has ended; when it does not, the error is the only trace."""
    assert explain(LOST, stop) is None
    assert explain(RuntimeError("Timed out waiting 100000ms for recv operation"), stop) is None
    stop.is_received_within = lambda seconds: True
    assert explain(LOST, stop) == exit_codes.CRASH
    assert explain(RuntimeError("the size of tensor a"), stop) is None


def test_stopped_by_a_signal(stop, caplog):
    stop.received = signal.SIGTERM
    assert explain(Stopped(), stop) == exit_codes.PREEMPTED
    assert "SIGTERM: stopped before it saved a step; the same command starts it again" in caplog.text
    stop.last_checkpoint = lambda: "step 2"
    assert explain(Stopped(), stop) == exit_codes.PREEMPTED
    assert "SIGTERM: stopped; the last checkpoint is step 2, and the same command goes on from there" in caplog.text
    assert explain(LOST, stop) == exit_codes.PREEMPTED, "a rank that was asked to stop has lost those that were too"
    assert explain(ValueError("?"), stop) is None


NCCL_TIMED_OUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, "
    "NumelOut=112, Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete"), True),
        (RuntimeError("[unbound_buffer.cc:129] Timed out waiting 1000ms for send operation to complete"), True),
        (dist.DistBackendError(NCCL_TIMED_OUT), True),
        (RuntimeError("collective all_reduce was given tensors of other shapes at a time"), False),
        (ValueError("Timed out waiting 1000ms for recv operation to complete"), False),
    ],
)
def test_a_rank_that_did_not_come_is_said(stop, caplog, error, says):
    with caplog.at_level(logging.ERROR):
        assert explain(error, stop) is None, "what it was doing is in the traceback"
    assert ("a rank did not come to a collective within comm.train_timeout_seconds" in caplog.text) is says


def test_what_helps_a_full_gpu_is_said(stop, caplog):
    assert explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), stop) is None
    assert "activation_checkpoint.mode full" in caplog.text


COLLECTIVES: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], object]] = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "all_gather": lambda x, group: dist.all_gather([x.clone(), x.clone()], x, group=group),
    "barrier": lambda x, group: dist.barrier(group=group),
}


def only_the_first_comes(name: str):
    """What gloo raises is what ``explain`` looks for."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.barrier(group=group)
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=300), group)  # only now: connecting may take longer
    try:
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                COLLECTIVES[name](torch.ones(2), group)
            assert endings.TIMED_OUT.search(str(caught.value)), caught.value
            assert not endings.is_lost_rank(caught.value), caught.value
    finally:
        dist.barrier()  # in the group of both, which waits for the first


def test_what_gloo_says_is_known(tmp_path):
    cases = [partial(only_the_first_comes, name) for name in COLLECTIVES]
    outcomes = run_cases(cases, tmp_path)
    assert outcomes == {f"only_the_first_comes-{name}": ["passed", "passed"] for name in COLLECTIVES}
