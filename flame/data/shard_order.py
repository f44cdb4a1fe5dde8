"""Which rows of a sharded source a stream gets, when shards can only be read from front to back."""

from __future__ import annotations

import numpy as np

from flame.data.order import RowOrder
from flame.data.permutation import derive_key, permute

WINDOW_ROWS = 1_000
MAX_LANES = 120
ROWS_PER_TURN = 1 << 32  # more than a shard has rows


class ShardOrder:
    """Deals the rows of K shards to S streams through L lanes; L is the largest divisor of S up to K and ``MAX_LANES``.

    Lane l takes the shards at the virtual positions l, l + L, l + 2L, ..., where position p is shard pi_e(p mod K) of
    epoch e = p // K: each shard once per epoch, whatever K and L. On each of these *turns* the lane reads its shard
    front to back in windows of ``WINDOW_ROWS`` rows, each in an order of its own. The lane's rows, counted on from
    shard to shard, go to its S / L streams (those equal to l modulo L) in rotation.

    The rows of a shard need not be counted before they are read: a cursor is a turn of the lane and a row in it, and
    one that lies behind the shard's last row goes on by so many rows in the next turn. It is kept as one number.

    Args:
        num_shards: K.
        seed, source_index: as for ``RowOrder``.
        shuffle: "none" keeps shards and rows in the order of the source; others shuffle as described.
        num_streams: S.
    """

    def __init__(self, num_shards: int, seed: int, source_index: int, shuffle: str, num_streams: int):
        self.num_shards = num_shards
        self.num_lanes = count_lanes(num_shards, num_streams)
        self.streams_per_lane = num_streams // self.num_lanes
        self.window_rows = WINDOW_ROWS
        self.shuffle = shuffle
        self.shards = RowOrder(num_shards, seed, source_index, "none" if shuffle == "none" else "global")
        self.key = derive_key(seed, source_index, 2)

    def lane(self, stream: int) -> int:
        """The lane that a stream belongs to."""
        return stream % self.num_lanes

    def shard(self, lane: int, turn: int) -> int:
        """The shard that a lane reads on a turn."""
        return int(self.shards.rows(np.array([lane + turn * self.num_lanes]))[0])

    def window(self, lane: int, turn: int, number: int, num_rows: int) -> list[int]:
        """The order of the ``num_rows`` rows of a turn's window, each counted from the window's first."""
        if self.shuffle == "none":
            return list(range(num_rows))
        key = derive_key(self.key, lane + turn * self.num_lanes)
        return permute(np.arange(num_rows), np.full(num_rows, number), num_rows, key).tolist()

    def num_turns(self, lane: int, max_epochs: int) -> int:
        """Turns of a lane in ``max_epochs`` epochs."""
        return max(0, -(-(max_epochs * self.num_shards - lane) // self.num_lanes))

    def start(self, stream: int) -> int:
        """The stream's cursor before its first row."""
        return join_cursor(0, stream // self.num_lanes)

    def end(self, stream: int, max_epochs: int) -> int:
        """The stream's cursor behind its last row of ``max_epochs`` epochs."""
        return join_cursor(self.num_turns(self.lane(stream), max_epochs), 0)

    def epochs(self, cursors: dict[int, int]) -> float:
        """Passes over the source that all streams have made, in whole shards, judged by ``cursors`` of some of them."""
        turns = sum(split_cursor(cursor)[0] for cursor in cursors.values())
        return turns / len(cursors) * self.num_lanes / self.num_shards


def count_lanes(num_shards: int, num_streams: int) -> int:
    """The largest divisor of the number of streams up to that of the shards and ``MAX_LANES``."""
    limit = min(num_shards, num_streams, MAX_LANES)
    return next(number for number in range(limit, 0, -1) if num_streams % number == 0)


def join_cursor(turn: int, row: int) -> int:
    """A cursor as one number: before ``row``, as the turn's windows are ordered, of a lane's ``turn``."""
    return turn * ROWS_PER_TURN + row


def split_cursor(cursor: int) -> tuple[int, int]:
    """Turn and row of a cursor."""
    return divmod(cursor, ROWS_PER_TURN)
