"""The next step's batches, fetched and copied to the device while the device computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flame.data.batch import Batch
from flame.data.loader import DataLoader


@dataclass
class _Step:
    batches: list[Batch] | None  # None behind the last step of training.max_epochs
    behind: DataLoader  # the loader's position once the step is consumed


class DevicePrefetcher:
    """A ``DataLoader`` that is one step ahead when told to be, with the state of the last step handed out.

    ``prefetch`` is to be called once the device has been given its work, by all ranks at the same steps: what it waits
    for then costs no time. On CUDA it also starts the copies, from page-locked memory on a stream of their own;
    ``Batch.to`` then gives the copy, and the device waits for it, not the host.

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

    def next_step(self) -> list[Batch]:
        """As ``DataLoader.next_step``: batches on the CPU, whose copies may be on their way."""
        step, self.ahead = self.ahead or self._fetch(), None
        self.consumed = step.behind
        if step.batches is None:
            raise StopIteration
        return step.batches

    def prefetch(self) -> None:
        """Fetch the next step, unless it is at hand already."""
        self.ahead = self.ahead or self._fetch()

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

    def close(self) -> None:
        """End the workers."""
        self.loader.close()

    def _fetch(self) -> _Step:
        try:
            batches = self.loader.next_step()
        except StopIteration:
            return _Step(None, self.loader.snapshot())
        if self.stream is not None:
            batches = [self._start_copy(batch) for batch in batches]
        return _Step(batches, self.loader.snapshot())

    def _start_copy(self, batch: Batch) -> Batch:
        batch = batch if batch.input_ids.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(self.stream):
            batch.copy = batch.to(self.device)
            batch.copied = self.stream.record_event()
        return batch
