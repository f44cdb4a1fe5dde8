"""One rank of a group of processes that runs several jobs; started by ``harness.run_jobs``."""

from __future__ import annotations

import json
import os
import sys

from flame.train import main
from tests.runs.faults import fault


def run(jobs: list[tuple[list[str], str, int]], rank: int, world_size: int) -> list[int]:
    """Train job after job (arguments, fault, port), each in a process group of its own; returns the exit codes."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    codes = []
    for argv, name, port in jobs:
        os.environ["MASTER_PORT"] = str(port)
        with fault(name):
            codes.append(main(argv))
    return codes


if __name__ == "__main__":
    exit_codes = run(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(exit_codes))
