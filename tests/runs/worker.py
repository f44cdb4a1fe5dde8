"""One rank of a group of processes that runs several jobs; started by ``harness.run_jobs``."""

from __future__ import annotations

import json
import os
import sys

from flame.train import main


def run(argvs: list[list[str]], ports: list[int], rank: int, world_size: int) -> list[int]:
    """Train job after job, each in a process group of its own; returns the exit codes."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    codes = []
    for argv, port in zip(argvs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        codes.append(main(argv))
    return codes


if __name__ == "__main__":
    exit_codes = run(json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(exit_codes))
