"""Process-wide settings of a training process: seeds, determinism, garbage collection."""

from __future__ import annotations

import gc
import os
import time

import torch

_IMPORTED_AT = time.time()


def set_determinism(deterministic: bool) -> None:
    """Choose between fast and repeatable kernels.

    Deterministic runs take kernels that do not vary from run to run, and warn where torch has none; cuBLAS needs its
    workspace fixed before the first product (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
    """
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the generators for one step, so that dropout and the like need no saved state to resume exactly.

    Args:
        seed: the job's seed.
        step: training step.
        rank: of this process among all, so that no two draw alike.
    """
    # 2654435761 and 40503 are Knuth's multiplicative hash constants: neighbouring steps get unrelated seeds.
    torch.manual_seed((seed + step * 2654435761 + rank * 40503) % 2**63)


class GarbageCollector:
    """Collects at fixed steps, on all ranks alike, instead of whenever one rank happens to reach a threshold.

    Args:
        every: steps between collections.
    """

    def __init__(self, every: int):
        self.every = every
        gc.disable()
        gc.collect()

    def step(self, step: int) -> None:
        """Collect the young generations if the step is due."""
        if step % self.every == 0:
            gc.collect(1)

    def collect(self) -> None:
        """Collect what the first step has left: compilers and tuners leave cycles that hold activations."""
        gc.collect()

    def close(self) -> None:
        """Give the decision back to Python."""
        gc.enable()


def seconds_since_start() -> float:
    """Seconds since the command was given, as far as this process knows: since the launcher began, or this module."""
    return time.time() - float(os.environ.get("FLAME_START_TIME", _IMPORTED_AT))
