import itertools
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data.state import StreamState
from flame.data.streams import StreamReader
from flame.errors import UserError

from .corpus import EOS, make_plan, numbered_texts, word_tokenizer


def read(plan, count, numbers=None, states=None):
    numbers = numbers if numbers is not None else list(range(plan.num_streams))
    states = states or [StreamState() for _ in numbers]
    return list(itertools.islice(StreamReader(plan, numbers, states), count))


def first_tokens(sequences) -> list[int]:
    return [int(sequence.input_ids[0]) for sequence in sequences]


@pytest.mark.parametrize("num_streams", [1, 15, 960])
def test_every_row_once_per_epoch_whatever_the_number_of_streams(num_streams):
    plan = make_plan(numbered_texts([4] * 100), 4, num_streams)
    rows = [token // 4 for token in first_tokens(read(plan, 300))]
    assert [sorted(rows[start : start + 100]) for start in (0, 100, 200)] == [list(range(100))] * 3
    assert rows[:100] != rows[100:200]
    assert rows == [token // 4 for token in first_tokens(read(make_plan(numbered_texts([4] * 100), 4), 300))]


@pytest.mark.parametrize("stop", [90, 100])
def test_resume_at_the_tail_and_at_the_edge_of_an_epoch(stop):
    plan = make_plan(numbered_texts([4] * 100), 4)
    whole = first_tokens(read(plan, stop + 160))
    state = StreamState.from_list(read(plan, stop)[-1].state)
    rest = first_tokens(read(plan, 160, states=[state]))
    assert rest == whole[stop:]
    assert len(set(rest[: 100 - stop])) == 100 - stop and len(set(rest[100 - stop : 200 - stop])) == 100


def test_documents_without_special_tokens_are_told_apart():
    plan = make_plan(numbered_texts([3, 2, 4]), 9, shuffle="none")
    assert read(plan, 1)[0].cu_seqlens.tolist() == [0, 3, 5, 9]


def test_documents_with_eos_appended():
    plan = make_plan(numbered_texts([3, 2, 4]), 12, shuffle="none", tokenizer=word_tokenizer(eos_token="<eos>"))
    (sequence,) = read(plan, 1)
    assert sequence.cu_seqlens.tolist() == [0, 4, 7, 12]
    assert sequence.labels.tolist() == [1, 2, EOS, -100, 4, EOS, -100, 6, 7, 8, EOS, -100]


def test_no_shuffle_keeps_the_order_of_the_source():
    plan = make_plan(numbered_texts([4] * 10), 4, shuffle="none")
    assert first_tokens(read(plan, 20)) == list(range(0, 40, 4)) * 2


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any),
    seq_len=st.integers(1, 9),
    num_streams=st.integers(1, 6),
    stops=st.lists(st.integers(1, 20), max_size=3),
)
def test_stops_and_resumes_change_nothing(lengths, seq_len, num_streams, stops):
    plan = make_plan(numbered_texts(lengths), seq_len, num_streams, context_len=min(seq_len, 4))
    expected = read(plan, sum(stops) + 12)
    states = [StreamState() for _ in range(num_streams)]
    position, actual = 0, []
    for count in [*stops, 12]:
        numbers = [(position + turn) % num_streams for turn in range(num_streams)]
        part = read(plan, count, numbers, [states[number] for number in numbers])
        for sequence in part:
            states[position % num_streams] = StreamState.from_list(sequence.state)
            position += 1
        actual += part
    for one, other in zip(actual, expected, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()
        assert one.cu_seqlens.tolist() == other.cu_seqlens.tolist()
        assert one.state == other.state


def test_streams_dealt_to_readers_give_the_same_sequences():
    plan = make_plan(numbered_texts([5, 9, 2, 14, 1]), 6, 5)
    together = read(plan, 30)
    for number in range(5):
        alone = read(plan, 6, [number])
        assert first_tokens(alone) == first_tokens(together[number::5])


def test_each_document_is_used_once_per_epoch():
    lengths = [7, 1, 13, 4, 9, 2]
    plan = make_plan(numbered_texts(lengths), 3, 4)
    states, counts = [StreamState() for _ in range(4)], Counter()
    for number, sequence in zip(itertools.cycle(range(4)), read(plan, 200), strict=False):
        states[number] = StreamState.from_list(sequence.state)
        counts.update(sequence.input_ids.tolist())
    drawn = Counter()
    for number, state in enumerate(states):
        positions = [number + cursor * 4 for cursor in range(state.cursors[0])]
        drawn.update(plan.orders[0].rows(np.array(positions, dtype=int)).tolist())
    for row, start in enumerate(itertools.accumulate([0, *lengths[:-1]])):
        assert drawn[row] <= counts[start] <= drawn[row] + 4  # the streams' open documents are not in the states yet


def test_max_epochs_ends_the_stream_with_its_last_token():
    plan = make_plan(numbered_texts([3] * 11), 4, max_epochs=2)
    sequences = read(plan, 100)
    assert [sequence.is_last for sequence in sequences] == [False] * 16 + [True]
    assert sum((sequence.labels != -100).sum() for sequence in sequences) == 2 * 2 * 11
    assert sequences[-1].labels.tolist()[1:] == [-100] * 3
    assert sequences[-1].cu_seqlens.tolist() == [0, 2, 4]


def test_empty_documents_at_the_end_do_not_make_a_sequence():
    plan = make_plan(["0 1", "", ""], 2, shuffle="none", max_epochs=1)
    (sequence,) = read(plan, 10)
    assert sequence.is_last and plan.is_finished(0, StreamState.from_list(sequence.state))


@pytest.mark.parametrize("bad", [None, 5, ["a"]])
def test_a_row_without_text_is_named(bad):
    plan = make_plan(["0 1", bad], 2, shuffle="none")
    with pytest.raises(UserError, match=r"texts: row 1 .*column text.*on_bad_row skip"):
        read(plan, 2)


def test_bad_rows_are_skipped_and_counted():
    plan = make_plan(["0 1", None, "2 3"], 2, shuffle="none", skip_bad_rows=True)
    sequences = read(plan, 3)
    assert first_tokens(sequences) == [0, 2, 0]
    assert StreamState.from_list(sequences[2].state).skipped == 1


@pytest.mark.parametrize("texts", [["", ""], [None, None]])
def test_a_source_without_any_text_is_an_error(texts):
    plan = make_plan(texts, 4, 2, skip_bad_rows=True)
    with pytest.raises(UserError, match="no row holds any text"):
        read(plan, 1)


def test_a_stream_that_meets_empty_rows_only_is_told_from_a_source_without_text():
    plan = make_plan(["1 2"] * 9 + [""], 4, 60, shuffle="none")
    with pytest.raises(UserError, match="one of the 60 streams meets rows without text only"):
        read(plan, 60)


@pytest.mark.parametrize("num_streams, expected", [(1, False), (2, True), (3, False), (5, True)])
def test_a_look_for_streams_without_tokens_leaves_no_thread(num_streams, expected):
    plan = make_plan(["", "1", "", "2"], 4, num_streams, shuffle="none", max_epochs=2)
    reader = StreamReader(plan, list(range(num_streams)), [StreamState() for _ in range(num_streams)])
    before = set(threading.enumerate())  # other tests' threads may end meanwhile
    assert reader.has_empty_stream() == expected
    assert set(threading.enumerate()) <= before
