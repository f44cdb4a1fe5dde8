"""A GPU to compile for where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def hopper(tmp_path, monkeypatch):
    """Compile for a Hopper GPU into an empty cache; the folder."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner

    from flame.models.tuning import bench_compiled
    from tests.models.tuned_kernel import add_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(Autotuner, "_bench", bench_compiled(Autotuner._bench))
    add_kernel.device_caches.clear()  # of what other tests have compiled
    return tmp_path
