"""How much memory there is for one process on its device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from flame.errors import UserError
from flame.metrics.device import GIB

# Of the memory: what plans do not know, such as workspaces, short documents and gaps between blocks; on a CPU also what
# its operators take within themselves.
MARGIN, CPU_MARGIN = 0.1, 0.2

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Capacity:
    """Memory for one process.

    Attributes:
        num_bytes: all that it may take.
        source: where that is known from, in words.
        margin: share of it that plans leave free.
    """

    num_bytes: int
    source: str
    margin: float = MARGIN

    @property
    def usable(self) -> int:
        """Bytes that a plan may come to."""
        return int(self.num_bytes * (1 - self.margin))

    def describe(self) -> str:
        return f"{gib(self.usable)} GiB usable ({gib(self.num_bytes)} {self.source}, {self.margin:.0%} kept back)"


def run_capacity(limit_gib: float, device: torch.device, num_local: int) -> Capacity | None:
    """What a process of a run has on its device; None where that is not known.

    Args:
        limit_gib: ``job.device_memory_gib``; the run takes no more, and 0 is no limit.
        num_local: processes of this machine, among which a CPU's memory is divided.
    """
    margin, there = CPU_MARGIN if device.type == "cpu" else MARGIN, None
    if device.type == "cuda":
        there = Capacity(torch.cuda.mem_get_info(device)[0], f"free on {torch.cuda.get_device_name(device)}")
    elif (available := available_memory()) is not None:
        source = "available on this machine" if num_local == 1 else f"for each of {num_local} processes"
        there = Capacity(available // num_local, source, margin)
    given = _given(limit_gib, margin) if limit_gib else None
    return min((each for each in (given, there) if each), key=lambda each: each.num_bytes, default=None)


def planned_capacity(limit_gib: float, needed_for: str) -> Capacity:
    """What a plan is for: the GPU that ``job.device_memory_gib`` describes, or this machine's.

    Args:
        needed_for: the option that asks, for the message.

    Raises:
        UserError: neither is there.
    """
    if limit_gib:
        return _given(limit_gib)
    if not torch.cuda.is_available():
        raise UserError(
            f"{needed_for} = auto: this machine has no GPU whose memory a plan could go by; give "
            "job.device_memory_gib, such as 80 for a card with 80 GiB"
        )
    return run_capacity(0, torch.device("cuda", torch.cuda.current_device()), 1)


def gib(num_bytes: int) -> str:
    """Bytes as a number of GiB, for texts."""
    return f"{num_bytes / GIB:,.2f}"


def _given(limit_gib: float, margin: float = MARGIN) -> Capacity:
    return Capacity(int(limit_gib * GIB), "of job.device_memory_gib", margin)


def available_memory() -> int | None:
    """Bytes of the host's memory that processes may still take, within this process's cgroup; None where unknown."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(_MEMINFO), re.MULTILINE)
    amounts = [int(match[1]) * 1024] if match else []
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        cached = re.search(r"^inactive_file (\d+)", _read(_CGROUP / "memory.stat"), re.MULTILINE)
        amounts.append(max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0)))
    return min(amounts, default=None)


def _read(path: Path) -> str:
    """A file of the system's; empty where there is none, as on other systems than Linux."""
    try:
        return path.read_text()
    except OSError:
        return ""
