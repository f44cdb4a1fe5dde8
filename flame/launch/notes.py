"""Notes that the processes of a run leave for the launcher, since torchrun keeps neither exit codes nor ids for it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

FOLDER = "FLAME_NOTES"
"""Environment variable with the folder of the notes; without it none are left."""


def leave_code(code: int) -> None:
    """Note the exit code of this process."""
    _leave("code", code)


def leave_id() -> None:
    """Note the id of this process."""
    _leave("id", os.getpid())


def read_codes(folder: Path) -> dict[int, tuple[int, int]]:
    """The exit code of each local rank that has left one, and when it did, in nanoseconds."""
    notes = {int(path.suffix[1:]): path for path in folder.glob("code.*")}
    return {rank: (int(path.read_text()), path.stat().st_mtime_ns) for rank, path in notes.items()}


def kill_rest(folder: Path) -> None:
    """Kill those of the processes that still run."""
    for path in folder.glob("id.*"):
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _leave(kind: str, number: int) -> None:
    if folder := os.environ.get(FOLDER):
        (Path(folder) / f"{kind}.{os.environ['LOCAL_RANK']}").write_text(str(number))
