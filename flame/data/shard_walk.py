"""How streams walk the shards of a source: each lane's shards are read once for all its streams in this process."""

from __future__ import annotations

from dataclasses import dataclass

from flame.data.shard_order import ShardOrder, join_cursor, split_cursor
from flame.data.shards import ShardedSource, ShardReader
from flame.data.spill import SpillFile, SpillQueue
from flame.errors import UserError

# Streams that share a lane come to need its rows at different times, the more so the longer they run: what is read for
# one of them waits for the others, in memory up to this many bytes for all streams of a process, then on disk.
QUEUE_BYTES = 64 << 20
MIN_QUEUE_BYTES = 64 << 10
VALUE_BYTES = 64  # of a value that has no length
EMPTY_PASSES = 2


@dataclass(frozen=True)
class ShardRow:
    """A row that was read: its cursor behind it, where it lies in the source, and its value."""

    cursor: int
    shard: int
    row: int
    value: object


class ShardWalk:
    """Walks the shards of a source with the streams of one reader.

    Args:
        source: the shards.
        order: which rows of which shards a stream gets.
        cursors: where each stream of this reader stands.
        ends: the cursor of each stream behind its last row.
    """

    def __init__(self, source: ShardedSource, order: ShardOrder, cursors: dict[int, int], ends: dict[int, int]):
        self.first_turns = {stream: split_cursor(cursor)[0] for stream, cursor in cursors.items()}
        file, max_bytes = SpillFile(), max(MIN_QUEUE_BYTES, QUEUE_BYTES // max(1, len(cursors)))
        self.order = order
        self.queues = {stream: SpillQueue(file, max_bytes) for stream in cursors}
        self.lanes = {
            lane: _Lane(
                source,
                order,
                lane,
                {stream: cursor for stream, cursor in cursors.items() if order.lane(stream) == lane},
                split_cursor(max(end for stream, end in ends.items() if order.lane(stream) == lane))[0],
                self.queues,
            )
            for lane in set(map(order.lane, cursors))
        }

    def available(self, stream: int, count: int) -> int:
        queue, lane = self.queues[stream], self.lanes[self.order.lane(stream)]
        while len(queue) < count and lane.read_on():
            pass
        return min(count, len(queue))

    def take(self, stream: int, count: int) -> tuple[list[ShardRow], list[int]]:
        rows = [self.queues[stream].pop() for _ in range(count)]
        if rows:
            lane, turn = self.lanes[self.order.lane(stream)], split_cursor(rows[-1].cursor)[0]
            lane.num_turns_walked = max(lane.num_turns_walked, turn - self.first_turns[stream])
        return rows, [row.cursor for row in rows]

    def cursor(self, stream: int) -> int:
        return join_cursor(*self.lanes[self.order.lane(stream)].wanted[stream])

    def read(self, items: list[ShardRow]) -> tuple[list, list[str]]:
        return [item.value for item in items], [f"{item.row} of shard {item.shard}" for item in items]

    def num_passes(self) -> float:
        return sum(lane.num_turns_walked for lane in self.lanes.values()) / self.order.num_shards


class _Lane:
    """Reads the shards of one lane, turn by turn, and queues the rows of this process's streams.

    ``wanted`` holds turn and row of the next row that each stream is still to be given.
    """

    def __init__(
        self,
        source: ShardedSource,
        order: ShardOrder,
        lane: int,
        cursors: dict[int, int],
        num_turns: int,
        queues: dict[int, SpillQueue],
    ):
        self.source, self.order, self.lane, self.num_turns, self.queues = source, order, lane, num_turns, queues
        self.wanted = {stream: split_cursor(cursor) for stream, cursor in cursors.items()}
        self._begin_turn(min(turn for turn, _ in self.wanted.values()))
        self.num_rows: dict[int, int] = {}  # of the shards read to their ends
        self.num_turns_walked = 0  # by the stream that has walked on furthest, from where it stood at first
        self.num_empty_turns = 0  # in a row

    def read_on(self) -> bool:
        """Read a window, or turn to the next shard where one ends; False behind the last turn."""
        if self.turn >= self.num_turns:
            return False
        shard, window_rows = self.shard, self.order.window_rows
        first = min((row for turn, row in self.wanted.values() if turn == self.turn), default=0)
        if first >= self.num_rows.get(shard, first + 1):
            self._end_turn(self.num_rows[shard])
            return True
        if self.reader is None:
            self.reader = ShardReader(self.source, shard, first - first % window_rows, window_rows)
        values = next(self.reader, None)
        if values is None:
            self.num_rows[shard] = self.reader.num_rows
            self._end_turn(self.reader.num_rows)
        else:
            self._deal(self.reader.num_rows - len(values), values)
        return True

    def _begin_turn(self, turn: int) -> None:
        self.turn = turn
        self.shard = self.order.shard(self.lane, turn)
        self.reader: ShardReader | None = None

    def _deal(self, start: int, values) -> None:
        """Queue those of the window's rows, which begins at row ``start`` of the shard, that go to own streams."""
        order = self.order.window(self.lane, self.turn, start // self.order.window_rows, len(values))
        for stream, (turn, row) in self.wanted.items():
            if turn != self.turn:
                continue
            while row < start + len(values):
                place, row = order[row - start], row + self.order.streams_per_lane
                value = values[place]
                num_bytes = len(value) if hasattr(value, "__len__") else VALUE_BYTES
                self.queues[stream].push(ShardRow(join_cursor(turn, row), self.shard, start + place, value), num_bytes)
            self.wanted[stream] = turn, row

    def _end_turn(self, num_rows: int) -> None:
        """Go on to the lane's next shard, where streams begin by so many rows as they were past the end of this one."""
        for stream, (turn, row) in self.wanted.items():
            if turn == self.turn:
                self.wanted[stream] = turn + 1, row - num_rows
        self._begin_turn(self.turn + 1)
        self.num_empty_turns = 0 if num_rows else self.num_empty_turns + 1
        if self.num_empty_turns > EMPTY_PASSES * self.order.num_shards:
            raise UserError(f"--training.dataset {self.source.name}: its shards have no rows")
