"""How a run ends that does not come to its end: what is said, and the exit code."""

from __future__ import annotations

import logging
import re
import sys

import torch
from torch.distributed import DistBackendError, DistNetworkError

from flame.errors import ConfigError, UserError, WorkerDied
from flame.launch import exit_codes
from flame.training.preemption import Stopped, StopRequest

logger = logging.getLogger(__name__)

# Neither has a type of its own in torch 2.11 to 2.13: gloo raises plain RuntimeErrors, NCCL DistBackendErrors for
# whatever goes wrong.

# What they say on the other ranks when a rank is gone.
LOST_RANK = re.compile(
    r"Connection (closed by|reset by|refused)|Broken pipe|Socket closed|remote process exited|"
    r"failed to recv|recvValue failed|sendBytes failed"
)
# What they say when a collective took longer than it may, gloo from any of them. NCCL's watchdog ends the process with
# its message; only TORCH_NCCL_BLOCKING_WAIT=1 makes an error of it.
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms for (send|recv) operation|Watchdog caught collective operation timeout"
)
# torchrun notices a rank that ended within a tenth of a second, and signals the others.
OTHERS_SECONDS = 10.0


def explain(error: BaseException, stop: StopRequest | None) -> int | None:
    """Say what ended a run, and give its exit code; None for what deserves its traceback.

    Args:
        stop: the run's stop request; None before there is one.
    """
    if isinstance(error, ConfigError):
        print(error, file=sys.stderr)
        return exit_codes.USER_ERROR
    is_lost = is_lost_rank(error)
    if isinstance(error, Stopped) or (stop is not None and stop.received and is_lost):
        last = stop.last_checkpoint()
        # Before the checkpoints have been looked at, "none" does not mean that the run folder holds none.
        logger.warning(
            "%s%s: stopped%s",
            stop.received.name,
            ", and another rank has ended" if is_lost else "",
            " before it saved a step; the same command starts it again"
            if last == "none"
            else f"; the last checkpoint is {last}, and the same command goes on from there",
        )
        return exit_codes.PREEMPTED
    if isinstance(error, UserError):
        logger.error("%s", error)
        return exit_codes.USER_ERROR
    if isinstance(error, WorkerDied):
        logger.error("%s", error)
        return exit_codes.CRASH
    if stop is not None and is_lost and stop.is_received_within(OTHERS_SECONDS):
        # Of all ranks only the one that failed has something to say.
        logger.warning("another rank ended, and this one with it")
        return exit_codes.CRASH
    if isinstance(error, RuntimeError) and TIMED_OUT.search(str(error)):
        logger.error(
            "a rank did not come to a collective within comm.train_timeout_seconds (up to the first step "
            "comm.init_timeout_seconds); what each was doing is in logs/stacks_rank*.txt of the run folder, and with "
            "NCCL in logs/flight_recorder_rank*"
        )
    if isinstance(error, torch.OutOfMemoryError):
        logger.error(
            "the GPU's memory is full: give training.batch_size or seq_len less, activation_checkpoint.mode full (or "
            "auto), or shard over more GPUs; --job.dry_run says what a job takes"
        )
    return None


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other ranks are gone."""
    kinds = (DistBackendError, DistNetworkError, ConnectionError, RuntimeError)
    return isinstance(error, kinds) and LOST_RANK.search(str(error)) is not None
