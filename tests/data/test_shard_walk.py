from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data import shard_walk
from flame.data.shard_order import ShardOrder, join_cursor
from flame.data.shard_walk import ShardWalk
from flame.errors import UserError


class ListReader:
    """Windows of a shard that is a list; counts the rows that were read."""

    def __init__(self, source, shard, num_skipped, window_rows):
        self.source, self.values, self.window_rows = source, source.shards[shard], window_rows
        self.num_rows = min(num_skipped, len(self.values))

    def __iter__(self):
        return self

    def __next__(self):
        window = self.values[self.num_rows : self.num_rows + self.window_rows]
        if not window:
            raise StopIteration
        self.num_rows += len(window)
        self.source.num_read += len(window)
        return window


@pytest.fixture(autouse=True)
def light(monkeypatch):
    monkeypatch.setattr(shard_walk, "ShardReader", ListReader)


def make_source(sizes: list[int]):
    shards = [[(shard, row) for row in range(size)] for shard, size in enumerate(sizes)]
    return SimpleNamespace(name="shards", shards=shards, num_read=0)


def make_order(sizes, num_streams, shuffle="global", window_rows=4):
    order = ShardOrder(len(sizes), 42, 0, shuffle, num_streams)
    order.window_rows = window_rows
    return order


def open_walk(source, order, cursors, max_epochs=0):
    ends = {stream: order.end(stream, max_epochs) if max_epochs else 1 << 62 for stream in cursors}
    return ShardWalk(source, order, cursors, ends)


def values(walk, stream, count):
    items, cursors = walk.take(stream, walk.available(stream, count))
    return walk.read(items)[0], cursors


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 14), min_size=1, max_size=6).filter(any),
    num_streams=st.integers(1, 8),
    max_epochs=st.integers(1, 3),
    window_rows=st.integers(1, 6),
)
def test_every_row_once_per_epoch(sizes, num_streams, max_epochs, window_rows):
    source, order = make_source(sizes), make_order(sizes, num_streams, window_rows=window_rows)
    walk = open_walk(source, order, {stream: order.start(stream) for stream in range(num_streams)}, max_epochs)
    counts = Counter(value for stream in range(num_streams) for value in values(walk, stream, 1000)[0])
    assert counts == {row: max_epochs for shard in source.shards for row in shard}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    num_streams=st.integers(1, 8),
    window_rows=st.integers(1, 6),
    stops=st.lists(st.integers(0, 30), min_size=8, max_size=8),
    split=st.integers(1, 4),
)
def test_resume_anywhere_with_the_streams_dealt_anew(sizes, num_streams, window_rows, stops, split):
    order = make_order(sizes, num_streams, window_rows=window_rows)
    starts = {stream: order.start(stream) for stream in range(num_streams)}
    whole = open_walk(make_source(sizes), order, starts)
    expected, cursors = {}, dict(starts)
    for stream in range(num_streams):
        taken, after = values(whole, stream, stops[stream] + 20)
        expected[stream] = taken[stops[stream] :]
        cursors[stream] = after[stops[stream] - 1] if stops[stream] else starts[stream]
    for part in range(split):
        own = {stream: cursor for stream, cursor in cursors.items() if stream % split == part}
        walk = open_walk(make_source(sizes), order, own)
        for stream in own:
            assert values(walk, stream, 20)[0] == expected[stream]


def test_streams_that_share_a_shard_read_it_once():
    sizes = [100]
    source, order = make_source(sizes), make_order(sizes, 12)
    walk = open_walk(source, order, {stream: order.start(stream) for stream in range(12)}, max_epochs=1)
    for _ in range(9):
        for stream in range(12):
            values(walk, stream, 1)
    assert source.num_read == 100


def test_rows_go_out_in_the_order_of_the_source_without_shuffling():
    sizes = [5, 3]
    walk = open_walk(make_source(sizes), make_order(sizes, 1, "none"), {0: 0})
    assert values(walk, 0, 10)[0] == [(0, n) for n in range(5)] + [(1, n) for n in range(3)] + [(0, 0), (0, 1)]


def test_a_resume_reads_no_more_than_the_shard_in_hand():
    sizes = [1000] * 10
    source, order = make_source(sizes), make_order(sizes, 1)
    _, cursors = values(open_walk(source, order, {0: 0}), 0, 9500)
    source.num_read = 0
    values(open_walk(source, order, {0: cursors[-1]}), 0, 1)
    assert source.num_read <= 4


def test_shards_without_rows_are_an_error_not_a_hang():
    walk = open_walk(make_source([0, 0]), make_order([0, 0], 2), {0: 0, 1: 0})
    with pytest.raises(UserError, match="no rows"):
        walk.available(0, 1)


def test_rows_that_wait_for_slow_streams_go_to_disk(monkeypatch):
    monkeypatch.setattr(shard_walk, "MIN_QUEUE_BYTES", 100)
    monkeypatch.setattr(shard_walk, "QUEUE_BYTES", 100)
    sizes = [4000]
    order = make_order(sizes, 4)
    walk = open_walk(make_source(sizes), order, {stream: order.start(stream) for stream in range(4)}, max_epochs=1)
    fast, _ = values(walk, 0, 1000)
    slow = [value for stream in (1, 2, 3) for value in values(walk, stream, 1000)[0]]
    assert len(fast) == 1000 and sorted(fast + slow) == [(0, row) for row in range(4000)]
    assert walk.queues[1].file.size > 0


def test_passes_do_not_count_what_other_streams_left_behind():
    """A stream that is turns ahead of another in its lane, as after a resume, has not walked those turns in vain."""
    order = make_order([4], 2)
    walk = open_walk(make_source([4]), order, {0: join_cursor(100, 0), 1: 0})
    values(walk, 0, 1)
    assert walk.num_passes() == 0
    values(walk, 0, 20)
    assert walk.num_passes() == 10
    values(walk, 1, 42)
    assert walk.num_passes() == 20
