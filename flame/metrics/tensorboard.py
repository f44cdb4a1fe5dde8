"""TensorBoard event files that hold every step once, also when a run was stopped and went on from a checkpoint."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flame.metrics.jsonl import DISK_FULL

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


class TensorBoardWriter:
    """Write a row's scalars to ``folder``, after removing the events of steps later than ``last_step``."""

    def __init__(self, folder: str | Path, last_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter  # takes a second; only runs that want it pay

        trim_events(Path(folder), last_step)
        self._writer: SummaryWriter | None = SummaryWriter(log_dir=str(folder))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write ``scalars`` (tag -> value) and hand them to the operating system at once: a killed run keeps them.

        TensorBoard's writer does not recover from a full disk; the run goes on without it.
        """
        if self._writer is None:
            return
        try:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
            self._writer.flush()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            logger.error("TensorBoard ends at step %d, for the rest of this start: %s", step, error.strerror)
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def trim_events(folder: Path, last_step: int) -> int:
    """Cut the event files in ``folder`` off behind ``last_step``; returns how many files changed.

    Steps only grow within a file and from file to file, so the newest files are cut until one begins early enough. A
    file that would keep no scalar goes away.
    """
    changed = 0
    for path in sorted(folder.glob("events.out.tfevents.*"), key=_age, reverse=True):
        end, has_scalars = _end_of_step(path, last_step)
        if not has_scalars:
            path.unlink()
        elif end < path.stat().st_size:
            os.truncate(path, end)
        else:
            break
        changed += 1
        if has_scalars:
            break
    return changed


def _age(path: Path) -> tuple[int, float]:
    """When a file was begun: its name tells the second, even after a copy of the folder; then the file system."""
    begun = path.name.split(".")[3]
    return int(begun) if begun.isdigit() else 0, path.stat().st_mtime


def _end_of_step(path: Path, last_step: int) -> tuple[int, bool]:
    """Offset behind the last whole record that belongs to a step up to ``last_step``; whether a scalar is before it."""
    from tensorboard.compat.proto.event_pb2 import Event

    end, has_scalars = 0, False
    for offset, data in _records(path):
        event = Event.FromString(data)
        if event.HasField("summary") and event.step > last_step:
            break
        has_scalars |= event.HasField("summary")
        end = offset
    return end, has_scalars


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset behind it, content) of every whole record.

    A record of the TFRecord format is the content's length (uint64, little endian), 4 bytes of check sum, the content
    and 4 bytes of check sum. https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            if file.tell() + length + 4 > size:
                return  # torn by a kill
            data = file.read(length)
            file.seek(4, os.SEEK_CUR)
            yield file.tell(), data
