"""Notes that the processes of a run leave for the launcher, since torchrun keeps neither exit codes nor ids for it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "FLAME_NOTES"
"""Environment variable with the folder of the notes; without it none are left."""

END_SECONDS = 5.0
"""How long a killed process may take to end: it frees its memory first, a GPU's too."""


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
    """Kill those of the processes that still run, and wait until they have ended, `END_SECONDS` at most.

    To be called in their parent; where it cannot ask how its children are (`os.waitid`: on macOS from Python 3.13 on),
    all are killed and none waited for.
    """
    processes = [int(path.read_text()) for path in folder.glob("id.*")]
    can_ask = hasattr(os, "waitid")
    for process in processes:
        if not can_ask or _runs(process):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while can_ask and any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(process: int) -> bool:
    """Whether a child of this process has not ended. One that has is left for torchrun to take its exit code."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False  # it has been waited for, and another process may have its id by now


def _leave(kind: str, number: int) -> None:
    if folder := os.environ.get(FOLDER):
        note = Path(folder) / f"{kind}.{os.environ['LOCAL_RANK']}"
        unfinished = note.with_name(f".{note.name}")
        unfinished.write_text(str(number))
        unfinished.replace(note)  # whole at any moment: the process may be killed in this one
