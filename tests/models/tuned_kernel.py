"""A kernel with three candidates, one of which cannot be compiled, and stand-ins for timing them."""

from __future__ import annotations

from pathlib import Path

import torch
import triton
import triton.language as tl

SIZES = (64, 128, 256)


@triton.jit
def add_kernel(x, y, n, OFFSET: tl.constexpr, B: tl.constexpr):
    tl.static_assert(B != 256)
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, at < n) + OFFSET, at < n)


def make_tuner(offset: int, **options):
    configs = [triton.Config({"OFFSET": offset, "B": size}) for size in SIZES]
    return triton.autotune(configs, key=["n"], cache_results=True, **options)(add_kernel)


def tune(tuner) -> None:
    x = torch.empty(512)
    tuner.run(x, x, 512, grid=(8,), warmup=True)  # the kernel that is chosen is not launched either


def compiled(folder: Path) -> int:
    return len(list(folder.glob("*/add_kernel.cubin")))


def bench_by_order(timed: list):
    def bench(launch, quantiles):
        timed.append(launch)
        return [float(len(timed))] * 3

    return bench
