"""Which row stands at a virtual position of a source."""

from __future__ import annotations

import numpy as np

from flame.data.permutation import derive_key, permute


class RowOrder:
    """Maps virtual positions 0, 1, 2, ... to rows: position p is row pi_e(p mod N) of epoch e = p // N.

    Args:
        num_rows: N, at least 1.
        seed: the job's seed.
        source_index: place of the source in the job, so that equal sources of a mixture differ in order.
        shuffle: "global" permutes every epoch anew, "none" keeps the order of the source.
    """

    def __init__(self, num_rows: int, seed: int, source_index: int, shuffle: str):
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.key = derive_key(seed, source_index)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Row numbers, int64 [n], at virtual ``positions``, int64 [n]."""
        epoch, index = np.divmod(positions, self.num_rows)
        if self.shuffle == "none":
            return index
        return permute(index, epoch, self.num_rows, self.key)

    def start(self, stream: int, num_streams: int) -> int:
        """A stream's cursor before its first row. The row at cursor c has virtual position stream + c * num_streams."""
        return 0

    def end(self, stream: int, num_streams: int, max_epochs: int) -> int:
        """The cursor of a stream behind its last row of ``max_epochs`` epochs."""
        return max(0, -(-(max_epochs * self.num_rows - stream) // num_streams))

    def epochs(self, cursors: dict[int, int], num_streams: int) -> float:
        """Passes over the source that all streams have made, judged by the ``cursors`` of some of them."""
        return sum(cursors.values()) / len(cursors) * num_streams / self.num_rows
