"""Checkpoints that are written in a thread while training goes on, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from flame.checkpoint.snapshot import HostMemory, Snapshot, local_parts
from flame.checkpoint.writer import CheckpointWriter, Staged


@dataclass
class Save:
    """One checkpoint on its way.

    Attributes:
        step: optimizer steps done.
        error: why it was not written, None while it is well.
        blocked_seconds: time for which training waited for the snapshot.
        total_seconds: from the snapshot to the publication, or the failure.
    """

    step: int
    error: Exception | None = None
    blocked_seconds: float = 0.0
    total_seconds: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


class BackgroundSaves:
    """Writes checkpoints in a thread. All ranks call every method alike, except ``take_finished``.

    Args:
        writer: what writes, with a process group that nothing else uses: the thread's collectives must not mix with
            those of training.
        pinned: take the snapshot in page-locked memory.
    """

    def __init__(self, writer: CheckpointWriter, pinned: bool):
        self.writer = writer
        self.pinned = pinned
        self._memory: HostMemory | None = None
        self._snapshot: Snapshot | None = None
        self._save: Save | None = None

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the host memory for snapshots of these tensors, unless it is there; takes seconds for billions.

        Raises:
            UserError: there is not so much.
        """
        parts = local_parts(tensors)
        if self._memory is not None and not self._memory.fits(parts):
            self._memory.close()
            self._memory = None
        if self._memory is None:
            self._memory = HostMemory(parts, self.pinned)

    def start(self, staged: Staged) -> None:
        """Begin to save what ``prepare`` took memory for; no other save is under way.

        The tensors must not change until ``wait_for_snapshot`` returns.
        """
        assert self._save is None, "take the outcome of the save before, first"
        started = time.monotonic()
        self._snapshot = snapshot = Snapshot(staged.tensors, self._memory)
        self._save = save = Save(staged.step)
        staged = replace(staged, fetch=snapshot.fetch)
        # A daemon: when the process has to end at once, nothing waits for a checkpoint that is not published.
        thread = threading.Thread(target=self._run, args=(save, snapshot, staged), name="checkpoint", daemon=True)
        thread.start()
        save.blocked_seconds = time.monotonic() - started

    def wait_for_snapshot(self) -> None:
        """Wait until the tensors may change; to be called before each update."""
        if self._snapshot is None:
            return
        started = time.monotonic()
        self._snapshot.wait()
        self._snapshot = None
        self._save.blocked_seconds += time.monotonic() - started

    def take_finished(self) -> Save | None:
        """The save that has come to its end since the last call, with its error if it failed."""
        if self._save is None or not self._save.done.is_set():
            return None
        self._snapshot, save, self._save = None, self._save, None
        return save

    def wait(self, timeout: float | None = None) -> Save | None:
        """Wait for the save under way, if there is one, for at most ``timeout`` seconds, and take it."""
        if self._save is not None:
            self._save.done.wait(timeout)
        return self.take_finished()

    def _run(self, save: Save, snapshot: Snapshot, staged: Staged) -> None:
        started = time.monotonic()
        try:
            self.writer.ranks.together(snapshot.copy)
            self.writer.write(staged)
        except Exception as error:  # whatever it is, it is the training loop's to report
            save.error = error
        finally:
            save.total_seconds = time.monotonic() - started
            save.done.set()
