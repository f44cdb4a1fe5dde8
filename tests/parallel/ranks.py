"""Cases that two spawned processes run together; all of a file share the pair, since starting it takes the time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = Callable[[], None]


def run_cases(cases: list[Case], folder: Path) -> dict[str, list[str]]:
    """Run every case on both ranks of a gloo group.

    Returns:
        By the name of each case, what each rank says: ``passed``, or its error.
    """
    mp.spawn(_run, args=(cases, folder), nprocs=2)
    return {case.__name__: [(folder / f"{case.__name__}.{rank}").read_text() for rank in range(2)] for case in cases}


def _run(rank: int, cases: list[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for case in cases:
        outcome = "passed"
        try:
            case()
        except BaseException as error:  # pytest.raises fails with a BaseException
            outcome = f"{type(error).__name__}: {error}"
        (folder / f"{case.__name__}.{rank}").write_text(outcome)
    dist.barrier()
    dist.destroy_process_group()
