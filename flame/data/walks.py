"""How streams walk the rows of one source: where each stands, what comes next, and whether there is more."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from flame.data.order import RowOrder
from flame.data.rows import read_values


class Walk(Protocol):
    """The rows of one source for the streams of one reader; it reads ahead of what the streams have used up."""

    def available(self, stream: int, count: int) -> int:
        """How many of the stream's next ``count`` rows there are: fewer only where its data ends."""
        ...

    def take(self, stream: int, count: int) -> tuple[list, list[int]]:
        """The stream's next ``count`` rows, to be read by ``read``, and its cursor behind each of them."""
        ...

    def cursor(self, stream: int) -> int:
        """The stream's cursor behind its last row, once there is no row left."""
        ...

    def read(self, items: list) -> tuple[list, list[str]]:
        """Values of rows that were taken, in one go, and a name for each to be used in a complaint."""
        ...

    def num_passes(self) -> float:
        """Passes over the source that this reader's rows would make up; grows as rows are taken."""
        ...


class RowWalk:
    """Walks rows by number.

    Args:
        source: the rows.
        order: which of them stand at the positions of a stream.
        cursors: where each stream of this reader stands.
        ends: the cursor of each stream behind its last row.
    """

    def __init__(self, source, order: RowOrder, cursors: dict[int, int], ends: dict[int, int]):
        self.source, self.order = source, order
        self.cursors, self.ends = dict(cursors), ends
        self.num_taken = 0

    def available(self, stream: int, count: int) -> int:
        return max(0, min(count, self.ends[stream] - self.cursors[stream]))

    def take(self, stream: int, count: int) -> tuple[list[int], list[int]]:
        cursor = self.cursors[stream]
        self.cursors[stream] += count
        self.num_taken += count
        return self.order.positions(stream, cursor, count), list(range(cursor + 1, cursor + count + 1))

    def cursor(self, stream: int) -> int:
        return self.cursors[stream]

    def read(self, items: list[int]) -> tuple[list, list[str]]:
        rows = self.order.rows(np.array(items, dtype=np.int64)).tolist()
        return read_values(self.source, rows), rows

    def num_passes(self) -> float:
        return self.num_taken / len(self.source)
