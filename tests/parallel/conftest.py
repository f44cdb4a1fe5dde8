"""What several files of this folder need."""

from __future__ import annotations

import pytest

from flame.config import Comm
from flame.launch.layout import free_port
from flame.parallel.distributed import Distributed, init_distributed, shutdown


@pytest.fixture
def alone(tmp_path, monkeypatch) -> Distributed:
    """A process group of this process."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    yield init_distributed(Comm(), tmp_path)
    shutdown()
