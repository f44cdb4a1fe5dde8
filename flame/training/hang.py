"""What every rank was doing when a step took too long: a hang becomes a stack of each."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

# Of the time-out of collectives: a rank that waits for one ends the run when it is over.
SHARE = 0.9


def stacks_path(log_folder: Path, rank: int) -> Path:
    """The file with a rank's Python stacks."""
    return log_folder / f"stacks_rank{rank}.txt"


class StackDump:
    """Writes the stacks of all threads to a file when a step does not end in time, whatever holds it up.

    The timer is a thread of the interpreter that needs neither its lock nor Python code (``faulthandler``).

    Args:
        log_folder: ``{dump_folder}/logs``.
        rank: of this process.
    """

    def __init__(self, log_folder: Path, rank: int):
        log_folder.mkdir(parents=True, exist_ok=True)
        self.path = stacks_path(log_folder, rank)
        self._file = self.path.open("w", encoding="utf-8")
        if not faulthandler.is_enabled():
            faulthandler.enable()  # NCCL's own watchdog aborts the process; its stacks then go to stderr

    def arm(self, timeout_seconds: float) -> None:
        """Start the clock for a step whose collectives may take ``timeout_seconds``; a slow step before was no hang."""
        self.disarm()
        if os.fstat(self._file.fileno()).st_size:
            os.ftruncate(self._file.fileno(), 0)
            self._file.seek(0)
        faulthandler.dump_traceback_later(SHARE * timeout_seconds, file=self._file)

    def disarm(self) -> None:
        """Stop the clock, for what may take long: a save, the end of the run."""
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Stop the clock; a file with nothing in it is removed."""
        self.disarm()
        self._file.close()
        if not self.path.stat().st_size:
            self.path.unlink()
