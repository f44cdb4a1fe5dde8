"""A Hopper GPU to compile Triton's kernels for, where there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest


def compile_for_hopper(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton take the machine's GPU for a Hopper one, and keep what it compiles in ``cache``."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
