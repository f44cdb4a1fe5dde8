from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data.shard_order import MAX_LANES, ShardOrder, join_cursor, split_cursor


@pytest.mark.parametrize(
    "num_shards, num_streams, num_lanes",
    [(1, 960, 1), (2, 960, 2), (7, 960, 6), (100, 960, 96), (5000, 960, MAX_LANES), (5000, 7, 7), (3, 4, 2)],
)
def test_lanes_divide_the_streams_and_no_more_than_the_shards(num_shards, num_streams, num_lanes):
    assert ShardOrder(num_shards, 42, 0, "global", num_streams).num_lanes == num_lanes


@settings(max_examples=30, deadline=None)
@given(num_shards=st.integers(1, 30), num_streams=st.integers(1, 24), max_epochs=st.integers(1, 3))
def test_every_shard_has_one_turn_per_epoch(num_shards, num_streams, max_epochs):
    order = ShardOrder(num_shards, 42, 0, "global", num_streams)
    turns = [(lane, turn) for lane in range(order.num_lanes) for turn in range(order.num_turns(lane, max_epochs))]
    epochs = [Counter() for _ in range(max_epochs)]
    for lane, turn in turns:
        epochs[(lane + turn * order.num_lanes) // num_shards][order.shard(lane, turn)] += 1
    assert all(epoch == Counter(range(num_shards)) for epoch in epochs)


def test_windows_are_shuffled_anew_on_each_turn():
    order = ShardOrder(2, 42, 0, "global", 4)
    windows = {tuple(order.window(lane, turn, number, 20)) for lane in (0, 1) for turn in (0, 1) for number in (0, 1)}
    assert len(windows) == 8 and all(sorted(window) == list(range(20)) for window in windows)


def test_no_shuffle_keeps_shards_and_rows_in_order():
    order = ShardOrder(3, 42, 0, "none", 6)
    assert [order.shard(lane, 0) for lane in range(3)] == [0, 1, 2]
    assert order.window(0, 5, 1, 4) == [0, 1, 2, 3]


def test_cursors_start_at_different_rows_of_a_lane_and_count_passes():
    order = ShardOrder(2, 42, 0, "global", 6)
    assert [split_cursor(order.start(stream)) for stream in range(6)] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (0, 2),
        (0, 2),
    ]
    assert order.epochs({stream: order.end(stream, 3) for stream in range(6)}) == 3.0
    assert split_cursor(join_cursor(7, 123)) == (7, 123)
