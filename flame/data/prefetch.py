"""The next step's batches, fetched and copied to the device while the device computes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from flame.data.batch import Batch
from flame.data.loader import DataLoader


@dataclass
class _Step:
    """A step that was fetched: its batches, or why there are none."""

    batches: list[Batch] = field(default_factory=list)
    behind: DataLoader | None = None  # the loader's position once the step is consumed
    fault: Exception | None = None  # StopIteration behind the last step of training.max_epochs


class DevicePrefetcher:
    """A ``DataLoader`` that is one step ahead when told to be, with the state of the last step handed out.

    ``prefetch`` is to be called once the device has been given its work, by all ranks at the same steps: what it waits
    for then costs no time. On CUDA it also starts the copies, from page-locked memory on a stream of their own;
    ``Batch.to`` then gives the copy, and the device waits for it, not the host. A fault met ahead is raised when its
    step is asked for, so that the steps before it are finished as they should.

    Args:
        loader: this rank's batches.
        device: where they are going.
    """

    def __init__(self, loader: DataLoader, device: torch.device):
        self.loader = loader
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.consumed = loader
        self.ahead: _Step | None = None
        self.wait_time = 0.0  # seconds since take_wait_time

    def next_step(self) -> list[Batch]:
        """As ``DataLoader.next_step``: batches on the CPU, whose copies may be on their way."""
        started = time.perf_counter()
        step, self.ahead = self.ahead or self._fetch(), None
        self.wait_time += time.perf_counter() - started
        self.consumed = step.behind
        if step.fault is not None:
            raise step.fault
        return step.batches

    def prefetch(self) -> None:
        """Fetch the next step, unless it is at hand already."""
        if self.ahead is not None:
            return
        work = None if self.stream is None else torch.cuda.current_stream(self.device).record_event()
        started = time.perf_counter()
        self.ahead = self._fetch()
        if work is None or work.query():  # the device ran out of work, at some moment that the host cannot know
            self.wait_time += time.perf_counter() - started

    def take_wait_time(self) -> float:
        """Seconds for which the device may have waited for data since the last call; never too few."""
        wait_time, self.wait_time = self.wait_time, 0.0
        return wait_time

    def state_dict(self) -> dict:
        """The state behind the last step that ``next_step`` gave."""
        return self.consumed.state_dict()

    def load_state_dict(self, merged: dict) -> None:
        """As ``DataLoader.load_state_dict``; a step at hand is dropped."""
        self.loader.load_state_dict(merged)
        self.consumed, self.ahead = self.loader, None

    def epochs(self) -> dict[str, float]:
        """Passes over each source behind the last step that ``next_step`` gave."""
        return self.consumed.epochs()

    @property
    def num_skipped_rows(self) -> int:
        """Bad rows left out up to the last step that ``next_step`` gave."""
        return self.consumed.num_skipped_rows

    def dead_workers(self) -> str:
        """As ``DataLoader.dead_workers``."""
        return self.loader.dead_workers()

    def close(self) -> None:
        """End the workers."""
        self.loader.close()

    def _fetch(self) -> _Step:
        try:
            batches = self.loader.next_step()
        except Exception as fault:  # StopIteration among them
            return _Step(behind=self.loader.snapshot(), fault=fault)
        if self.stream is not None:
            batches = [self._start_copy(batch) for batch in batches]
        return _Step(batches, self.loader.snapshot())

    def _start_copy(self, batch: Batch) -> Batch:
        batch = batch if batch.input_ids.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(self.stream):
            batch.copy = batch.to(self.device)
            batch.copied = self.stream.record_event()
        return batch
