"""Cases that a few spawned processes run together; all of a file share them, since starting them takes the time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = Callable[[], None]


def run_cases(cases: list[Case], folder: Path, size: int = 2, device_type: str = "cpu") -> dict[str, list[str]]:
    """Run every case on each rank of a group of ``size``: gloo, or with "cuda" NCCL and a GPU each.

    Returns:
        By the name of each case, what each rank says: ``passed``, or its error.
    """
    mp.spawn(_run, args=(cases, folder, size, device_type), nprocs=size)
    return {name_of(case): [(folder / f"{name_of(case)}.{rank}").read_text() for rank in range(size)] for case in cases}


def name_of(case: Case) -> str:
    """A function's name; of a partial also what it is called with."""
    return "-".join((case.func.__name__, *case.args)) if isinstance(case, partial) else case.__name__


def _run(rank: int, cases: list[Case], folder: Path, size: int, device_type: str) -> None:
    torch.set_num_threads(1)
    backend, seconds = "gloo", 60
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        backend, seconds = "cpu:gloo,cuda:nccl", 600  # one rank may still be looking for the best kernel
    place = {"rank": rank, "world_size": size, "init_method": f"file://{folder}/store"}
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **place)
    for case in cases:
        outcome = "passed"
        try:
            case()
        except BaseException as error:  # pytest.raises fails with a BaseException
            outcome = f"{type(error).__name__}: {error}"
        (folder / f"{name_of(case)}.{rank}").write_text(outcome)
    dist.barrier()
    dist.destroy_process_group()
