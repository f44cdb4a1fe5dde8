"""Which processes still run, and waiting for their end.

A process that has ended is there until its parent asks how (a zombie): for a moment, or for ever where process 1, which
inherits the orphans, asks nobody, as in some containers. It does not count as running.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def left_of(*processes: int, seconds: float = 5.0) -> set[int]:
    """Those of some processes that still run after that time; returns as soon as there are none."""
    return _left(lambda: running().keys() & processes, seconds)


def left_of_group(group: int, seconds: float = 5.0) -> set[int]:
    """The processes of a group that still run after that time; returns as soon as there are none."""
    return _left(lambda: {process for process, its_group in running().items() if its_group == group}, seconds)


def running() -> dict[int, int]:
    """The process group of each process that runs."""
    return {process: group for process, group, state in _table() if state not in "ZX"}


def _left(find: Callable[[], set[int]], seconds: float) -> set[int]:
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _table() -> list[tuple[int, int, str]]:
    """Id, group and state (one letter) of each process."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-axo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
        return [(int(process), int(group), state[0]) for process, group, state in map(str.split, listed.splitlines())]
    rows = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            state, _parent, group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            rows.append((int(entry.name), int(group), state))
    return rows
