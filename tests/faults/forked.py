"""Groups of ranks that are forked from a process which has imported everything, so that a restart takes a second.

A rank is a process of its own, with its own process group, files and death; only the imports are inherited. Each shows
on a board in shared memory what it is doing, so that whoever kills it knows what was hit.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flame import train
from flame.checkpoint import folders
from flame.checkpoint.writer import CheckpointWriter
from flame.launch.layout import free_port
from flame.models.backend import setup_backend
from flame.training.run import Run

PHASES = ("start", "data", "forward and backward", "update", "log", "between", "write", "publish", "purge")
SAVING = ("write", "publish", "purge")
# What a rank does while it is in each function; those of a save may run in a thread.
MARKED = {
    (Run, "next_batches"): "data",
    (train, "add_gradients"): "forward and backward",
    (train, "step_unless"): "update",
    (Run, "log_step"): "log",
    (CheckpointWriter, "_write"): "write",
    (CheckpointWriter, "_publish"): "publish",
    (folders, "purge"): "purge",
}


def preload() -> None:
    """Import what a run would import later, so that forked ranks need not; not with a GPU, which outlives no fork."""
    if not torch.cuda.device_count():
        setup_backend("auto", "cpu")


class Board:
    """What each rank shows: its step, what its main thread does, and what is being saved."""

    def __init__(self, world_size: int):
        self.memory = mmap.mmap(-1, 8 * 3 * world_size)
        self.numbers = (ctypes.c_int64 * (3 * world_size)).from_buffer(self.memory)

    def step(self, rank: int) -> int:
        """The step in hand, 0 while the rank starts."""
        return self.numbers[3 * rank]

    def phase(self, rank: int) -> str:
        """What the rank is doing; a save goes before what is done beside it."""
        return PHASES[self.numbers[3 * rank + 2] or self.numbers[3 * rank + 1]]

    def is_saving(self, rank: int) -> bool:
        return self.numbers[3 * rank + 2] != 0

    def show_step(self, rank: int, step: int) -> None:
        self.numbers[3 * rank] = step

    @contextmanager
    def showing(self, rank: int, phase: str) -> Iterator[None]:
        place = 3 * rank + (2 if phase in SAVING else 1)
        before, self.numbers[place] = self.numbers[place], PHASES.index(phase)
        try:
            yield
        finally:
            self.numbers[place] = before if phase in SAVING else PHASES.index("between")


class Group:
    """The ranks of one attempt at a job.

    Args:
        argv: the job's arguments.
        world_size: number of ranks.
        log: file that all ranks append to.
    """

    def __init__(self, argv: list[str], world_size: int, log: Path):
        self.board = Board(world_size)
        port = free_port()
        self.ranks = [
            multiprocessing.get_context("fork").Process(
                target=_train, args=(argv, rank, world_size, port, self.board, log)
            )
            for rank in range(world_size)
        ]
        for process in self.ranks:
            process.start()

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self.ranks)

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait for a condition; false when a rank ended or the time is over first."""
        deadline = time.monotonic() + timeout
        while not condition():
            if not self.is_running or time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        return True

    def kill(self, victims: list[int]) -> None:
        """``kill -9`` of some ranks."""
        for rank in victims:
            self.ranks[rank].kill()

    def stop_rest(self, victims: list[int]) -> None:
        """SIGTERM to the other ranks a moment later, as torchrun sends it when it sees that a rank has ended."""
        time.sleep(0.1)
        for rank, process in enumerate(self.ranks):
            if rank not in victims:
                process.terminate()

    def wait(self, timeout: float) -> list[int | None]:
        """The ranks' exit codes; None, and an end by force, for one that does not end in time."""
        deadline = time.monotonic() + timeout
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        for process in self.ranks:
            process.kill()
            process.join()
        return codes


def _train(argv: list[str], rank: int, world_size: int, port: int, board: Board, log: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOG_RANK": str(rank)}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for (owner, name), phase in MARKED.items():
        mock.patch.object(owner, name, _marked(getattr(owner, name), phase, rank, board)).start()
    code = train.main(argv)
    sys.stdout.flush()
    os._exit(code)


def _marked(function: Callable, phase: str, rank: int, board: Board) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if phase == "data":
            board.show_step(rank, args[0].step + 1)
        with board.showing(rank, phase):
            return function(*args, **kwargs)

    return wrapper
