"""One run at a time in a run folder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from flame.errors import UserError

LOCK = ".lock"


class RunFolderLock:
    """Holds a run folder for this process; the system lets go of it when the process ends, however it ends.

    A record lock (``fcntl.lockf``) is not inherited by data workers, so one that outlives its trainer holds nothing.

    Raises:
        UserError: another process holds it, or the folder cannot be made.
    """

    def __init__(self, dump_folder: str | Path):
        self.folder = Path(dump_folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (held until release)
        except OSError as error:
            raise UserError(f"job.dump_folder = {dump_folder}: cannot be written to: {error.strerror}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"job.dump_folder = {dump_folder}: {holder} is training there; stop it or give another folder"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        """Let go; a folder with nothing in it, of a job that never started, is removed."""
        (self.folder / LOCK).unlink(missing_ok=True)
        self._file.close()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
