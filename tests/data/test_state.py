import json

import pytest

from flame.data.shard_order import join_cursor
from flame.data.state import StreamState, merge_state_dicts


def part(streams: dict[str, list[int]], num_streams: int) -> dict:
    return {"version": 1, "num_sequences": 8, "num_streams": num_streams, "fingerprint": {}, "streams": streams}


def test_stream_state_round_trip():
    state = StreamState([3, 5], draws=8, offset=17, skipped=2)
    assert StreamState.from_list(json.loads(json.dumps(state.to_list()))) == state


def test_ranks_are_merged_in_stream_order():
    merged = merge_state_dicts([part({"1": [1], "3": [3]}, 4), part({"0": [0], "2": [2]}, 4)])
    assert merged["streams"] == [[0], [1], [2], [3]]


def test_a_missing_rank_is_noticed():
    with pytest.raises(AssertionError, match="2 of 4"):
        merge_state_dicts([part({"1": [1], "3": [3]}, 4)])


def test_state_of_a_thousand_streams_and_four_sources_is_small():
    cursors = [10**6, 10**6, join_cursor(10**4, 10**5), join_cursor(10**4, 10**5)]
    streams = {str(number): StreamState(cursors, 4 * 10**6, 10**6, 1000).to_list() for number in range(1024)}
    assert len(json.dumps(merge_state_dicts([part(streams, 1024)]))) < 128 * 1024
