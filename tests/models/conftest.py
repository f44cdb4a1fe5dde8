"""A GPU to compile for where there is none."""

from __future__ import annotations

import pytest

from tests.hopper import compile_for_hopper


@pytest.fixture
def hopper(tmp_path, monkeypatch):
    """Compile for a Hopper GPU into an empty cache; the folder."""
    pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    from flame.models.tuning import bench_compiled
    from tests.models.tuned_kernel import add_kernel

    compile_for_hopper(tmp_path, monkeypatch)
    monkeypatch.setattr(Autotuner, "_bench", bench_compiled(Autotuner._bench))
    add_kernel.device_caches.clear()  # of what other tests have compiled
    return tmp_path
