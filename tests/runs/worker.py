"""One rank of a group of processes that runs several jobs; started by ``harness.run_jobs``."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from torch.distributed.tensor import _collective_utils, _redistribute, debug

from flame.train import main
from tests.runs.faults import fault


def run(
    jobs: list[tuple[list[str], str, int]], rank: int, world_size: int, codes_file: Path | None = None
) -> list[int]:
    """Train job after job (arguments, fault, port), each in a process group of its own.

    Returns:
        The exit codes; each is added to ``codes_file`` at once.
    """
    codes = []
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for number, (argv, name, port) in enumerate(jobs):
        if number:
            forget_groups()
        if number == 1:  # all modules are loaded by now: collections need not look at them again
            gc.freeze()
        os.environ["MASTER_PORT"] = str(port)
        with fault(name):
            codes.append(main(argv))
        if codes_file is not None:
            with codes_file.open("a") as file:
                print(codes[-1], file=file)
    gc.unfreeze()  # or some libraries report leaks when Python ends
    return codes


def forget_groups() -> None:
    """Let go of the process groups of a job that has ended.

    DTensor's caches hold their meshes, with a thread for each group that wakes up some hundred times a second: after
    twenty jobs these took half of the processors' time. What empties the caches is torch 2.13's.
    """
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
