"""Which row stands at a virtual position of a source, and how the positions are dealt to streams."""

from __future__ import annotations

import numpy as np

from flame.data.permutation import derive_key, permute

BLOCK_ROWS = 1_000


class RowOrder:
    """Maps virtual positions 0, 1, 2, ... to rows: position p is row pi_e(p mod N) of epoch e = p // N.

    Stream s has the positions s, s + S, s + 2S, ...; its cursor counts the rows that it has had.

    Args:
        num_rows: N, at least 1.
        seed: the job's seed.
        source_index: place of the source in the job, so that equal sources of a mixture differ in order.
        shuffle: "global" permutes every epoch anew; "block" permutes blocks of ``BLOCK_ROWS`` consecutive rows, and the
            rows inside each; "none" keeps the order of the source.
        num_streams: S.
    """

    def __init__(self, num_rows: int, seed: int, source_index: int, shuffle: str, num_streams: int = 1):
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.num_streams = num_streams
        self.key = derive_key(seed, source_index)
        self.key_inside = derive_key(seed, source_index, 1)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Row numbers, int64 [n], at virtual ``positions``, int64 [n]."""
        epoch, index = np.divmod(positions, self.num_rows)
        if self.shuffle == "none":
            return index
        if self.shuffle == "block" and self.num_rows > BLOCK_ROWS:
            return self._rows_by_block(epoch, index)
        return permute(index, epoch, self.num_rows, self.key)

    def positions(self, stream: int, cursor: int, count: int) -> list[int]:
        """Virtual positions of the ``count`` rows of a stream from its ``cursor`` on."""
        first = stream + cursor * self.num_streams
        return list(range(first, first + count * self.num_streams, self.num_streams))

    def start(self, stream: int) -> int:
        """The stream's cursor before its first row."""
        return 0

    def end(self, stream: int, max_epochs: int) -> int:
        """The stream's cursor behind its last row of ``max_epochs`` epochs."""
        return max(0, -(-(max_epochs * self.num_rows - stream) // self.num_streams))

    def epochs(self, cursors: dict[int, int]) -> float:
        """Passes over the source that all streams have made, judged by the ``cursors`` of some of them."""
        return sum(cursors.values()) / len(cursors) * self.num_streams / self.num_rows

    def _rows_by_block(self, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The shorter last block gets a place of its own in each epoch; the full ones are permuted around it."""
        num_full, num_rest = divmod(self.num_rows, BLOCK_ROWS)
        rest_place = permute(np.zeros_like(epoch), epoch, num_full + 1, self.key_inside)
        behind_rest = index >= rest_place * BLOCK_ROWS + num_rest
        place, inside = np.divmod(index - np.where(behind_rest, num_rest, 0), BLOCK_ROWS)
        block = permute(np.minimum(place, num_full - 1), epoch, num_full, self.key)
        in_rest = ~behind_rest & (index >= rest_place * BLOCK_ROWS)
        block[in_rest] = num_full
        turn = epoch * (num_full + 1) + block  # a block is in another order in each epoch
        inside_full = permute(inside, turn, BLOCK_ROWS, self.key_inside)
        if in_rest.any():
            inside_full[in_rest] = permute(inside[in_rest], turn[in_rest], num_rest, self.key_inside)
        return block * BLOCK_ROWS + inside_full
