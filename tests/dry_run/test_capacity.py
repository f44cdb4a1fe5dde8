"""How much memory there is: by option, by the system's files, and where nothing says so."""

from __future__ import annotations

import pytest
import torch

from flame.dry_run import capacity
from flame.dry_run.capacity import GIB, Capacity, available_memory, planned_capacity, run_capacity
from flame.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def system(monkeypatch, tmp_path):
    """``system(**files)`` writes the files that the system would have, and only those."""
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    monkeypatch.setattr(capacity, "_MEMINFO", tmp_path / "meminfo")

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)

    return write


def test_the_host_has_what_it_says_is_available(system):
    system(meminfo="MemTotal:       4000 kB\nMemAvailable:       3000 kB\n")
    assert available_memory() == 3000 * 1024
    system(memory__max="max\n", memory__current="100\n")  # a group without a limit
    assert available_memory() == 3000 * 1024


def test_a_control_group_may_leave_less(system):
    system(meminfo="MemAvailable:       3000 kB\n")
    system(memory__max="100000\n", memory__current="60000\n", memory__stat="anon 1\ninactive_file 5000\n")
    assert available_memory() == 45000


def test_the_processes_of_a_machine_divide_its_memory(system):
    system(meminfo=f"MemAvailable: {8 * 1024**2} kB\n")
    there = run_capacity(0, CPU, 4)
    assert there.num_bytes == 2 * GIB
    assert there.usable == int(1.6 * GIB)
    assert there.describe() == "1.60 GiB usable (2.00 for each of 4 processes, 20% kept back)"


def test_a_given_memory_is_a_limit_and_no_promise(system):
    system(meminfo=f"MemAvailable: {8 * 1024**2} kB\n")
    assert run_capacity(3, CPU, 1) == Capacity(3 * GIB, "of job.device_memory_gib", 0.2)
    assert run_capacity(30, CPU, 1) == Capacity(8 * GIB, "available on this machine", 0.2)


def test_a_system_that_does_not_say(system):
    assert available_memory() is None
    assert run_capacity(0, CPU, 1) is None
    assert run_capacity(3, CPU, 1).num_bytes == 3 * GIB


def test_a_plan_needs_a_gpu_or_its_memory(monkeypatch):
    assert planned_capacity(80, "training.batch_size").usable == 72 * GIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^training\.batch_size = auto: .* give job\.device_memory_gib"):
        planned_capacity(0, "training.batch_size")
