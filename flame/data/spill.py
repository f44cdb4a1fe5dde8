"""Queues that hold a bounded part of what is in them in memory, and the rest in a temporary file."""

from __future__ import annotations

import pickle
import tempfile
from collections import deque


class SpillFile:
    """Pieces of bytes in one temporary file, whose room is used again when they are taken out.

    The file has no name, so that it is gone with the process however that ends; TMPDIR says where it lies. Room is
    given in powers of two.
    """

    def __init__(self):
        self.file = None
        self.size = 0
        self.free: dict[int, list[int]] = {}  # offsets by the room there

    def put(self, data: bytes) -> tuple[int, int]:
        """Store ``data``; returns its place, for ``take``."""
        if self.file is None:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the process needs it)
        room = _room_for(len(data))
        if self.free.get(room):
            offset = self.free[room].pop()
        else:
            offset, self.size = self.size, self.size + room
        self.file.seek(offset)
        self.file.write(data)
        return offset, len(data)

    def take(self, place: tuple[int, int]) -> bytes:
        """What was put at a place, which is free then."""
        offset, length = place
        self.file.seek(offset)
        self.free.setdefault(_room_for(length), []).append(offset)
        return self.file.read(length)


def _room_for(length: int) -> int:
    return 1 << (length - 1).bit_length()


class SpillQueue:
    """First in, first out. About three times ``max_bytes`` stay in memory: the front, the back, a piece on its way.

    Args:
        file: shared with other queues.
        max_bytes: size of a piece.
    """

    def __init__(self, file: SpillFile, max_bytes: int):
        self.file, self.max_bytes = file, max_bytes
        self.front: deque = deque()
        self.places: deque[tuple[int, int]] = deque()  # of the pieces between front and back
        self.back: list = []
        self.front_bytes = self.back_bytes = 0  # of all that was pushed there since it was empty
        self.num_items = 0

    def __len__(self) -> int:
        return self.num_items

    def push(self, item, num_bytes: int) -> None:
        """Add an item of about ``num_bytes`` to the back; it must be plain data."""
        self.num_items += 1
        if not self.places and not self.back and self.front_bytes < self.max_bytes:
            self.front.append(item)
            self.front_bytes += num_bytes
            return
        self.back.append(item)
        self.back_bytes += num_bytes
        if self.back_bytes >= self.max_bytes:
            self.places.append(self.file.put(pickle.dumps(self.back, pickle.HIGHEST_PROTOCOL)))
            self.back, self.back_bytes = [], 0

    def pop(self):
        """Take the item at the front."""
        if not self.front:
            self._refill()
        self.num_items -= 1
        item = self.front.popleft()
        if not self.front:
            self.front_bytes = 0
        return item

    def _refill(self) -> None:
        if self.places:
            self.front.extend(pickle.loads(self.file.take(self.places.popleft())))
        else:
            self.front.extend(self.back)
            self.back, self.back_bytes = [], 0
        self.front_bytes = self.max_bytes  # full, as far as is known
