"""A seed checkpoint holds the same weights whatever number of ranks made it: ``python -m tests.faults.seed``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from flame.checkpoint.dcp import read_metadata, read_tensors, tensor_metadata
from tests.faults.forked import Group, preload
from tests.runs.harness import Job

WORLDS = (1, 2, 4)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    entries = tensor_metadata(read_metadata(folder))
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    read_tensors(folder, tensors, alone=True)
    return tensors


def main(report: Callable[[str], None] = print) -> int:
    """Make a seed checkpoint with each number of ranks; 0 when all are equal."""
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        root, made = Path(temporary), []
        for world in WORLDS:
            options = {"checkpoint.create_seed_checkpoint": "true", "training.num_streams": "60"}
            codes = Group(Job(root / str(world), options).argv, world, root / "log.txt").wait(300)
            assert codes == [0] * world, (root / "log.txt").read_text()[-3000:]
            made.append(weights(root / str(world) / "checkpoint" / "step-0"))
    first, *others = made
    differ = [name for name in first for other in others if not torch.equal(first[name], other[name])]
    report(f"{len(first)} tensors, made by {WORLDS} ranks: " + (f"{differ} differ" if differ else "bit for bit equal"))
    return 1 if differ or any(other.keys() != first.keys() for other in others) else 0


if __name__ == "__main__":
    sys.exit(main())
