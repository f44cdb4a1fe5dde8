import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data.documents import Documents
from flame.data.pack import IGNORE_INDEX, StreamBuffer, pack_sequence
from flame.data.state import StreamState


def push(buffer: StreamBuffer, lengths: list[int], start: int = 0) -> None:
    tokens = np.arange(start, start + sum(lengths), dtype=np.int32)
    first = buffer.state.cursors[0] + sum(len(block.documents) - block.num_finished for block in buffer.blocks)
    cursors = list(range(first + 1, first + len(lengths) + 1))
    buffer.push(Documents(tokens, list(itertools.accumulate(lengths))), [0] * len(lengths), cursors)


def pack(lengths: list[int], seq_len: int, context_len: int | None = None, split: int = 0):
    """Sequences from documents whose tokens count through; ``split`` of them are read before the others."""
    buffer = StreamBuffer(StreamState())
    push(buffer, lengths[:split])
    push(buffer, lengths[split:], sum(lengths[:split]))
    return [pack_sequence(buffer, seq_len, context_len or seq_len) for _ in range(sum(lengths) // seq_len)]


def test_boundaries_are_where_documents_start():
    (sequence,) = pack([3, 2, 4], 9)
    assert sequence.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert sequence.cu_seqlens.dtype == np.int32


def test_last_token_of_a_document_has_no_target():
    (sequence,) = pack([3, 2, 4], 9)
    assert sequence.labels.tolist() == [1, 2, IGNORE_INDEX, 4, IGNORE_INDEX, 6, 7, 8, IGNORE_INDEX]


def test_last_input_of_a_piece_or_sequence_keeps_its_target_when_the_document_goes_on():
    first, second = pack([10], 5, context_len=3)
    assert first.cu_seqlens.tolist() == [0, 3, 5]
    assert first.labels.tolist() == [1, 2, 3, 4, 5]
    assert second.cu_seqlens.tolist() == [0, 3, 5]
    assert second.labels.tolist() == [6, 7, 8, 9, IGNORE_INDEX]


def test_empty_documents_count_as_drawn_and_leave_no_boundary():
    (sequence,) = pack([0, 2, 0, 0, 2], 4)
    assert sequence.cu_seqlens.tolist() == [0, 2, 4]
    assert StreamState.from_list(sequence.state).draws == 5


def test_one_token_documents():
    (sequence,) = pack([1] * 4, 4)
    assert sequence.cu_seqlens.tolist() == [0, 1, 2, 3, 4]
    assert sequence.labels.tolist() == [IGNORE_INDEX] * 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 30), st.integers(1, 30), st.integers(0, 20)
)
def test_packing_keeps_every_token_and_masks_only_document_ends(lengths, seq_len, context_len, split):
    sequences = pack(lengths, seq_len, min(context_len, seq_len), split)
    tokens = [token for sequence in sequences for token in sequence.input_ids.tolist()]
    assert tokens == list(range(len(tokens)))
    last_tokens = {end - 1 for end in itertools.accumulate(lengths)}
    targets = [target for sequence in sequences for target in sequence.labels.tolist()]
    assert targets == [IGNORE_INDEX if token in last_tokens else token + 1 for token in tokens]
    for sequence in sequences:
        boundaries = sequence.cu_seqlens.tolist()
        pieces = np.diff(boundaries)
        assert boundaries[0] == 0 and boundaries[-1] == seq_len
        assert pieces.min() > 0 and pieces.max() <= context_len
        starts = {0, *itertools.accumulate(lengths)}
        document_starts = [place for place, token in enumerate(sequence.input_ids.tolist()) if token in starts]
        assert set(document_starts) <= set(boundaries)


def test_state_does_not_show_how_far_was_read():
    lengths = [3, 0, 1, 0, 0, 4, 0]
    states = [[sequence.state for sequence in pack(lengths, 4, split=split)] for split in range(len(lengths))]
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_resuming_inside_a_document_skips_what_was_used(offset):
    buffer = StreamBuffer(StreamState(offset=offset))
    push(buffer, [8])
    assert buffer.num_tokens == 8 - offset
    assert pack_sequence(buffer, 4, 4).input_ids.tolist() == list(range(offset, offset + 4))


def test_time_is_linear_in_document_length():
    """A document of 4 million tokens is cut up by slicing, never copied as a whole."""
    import time

    buffer = StreamBuffer(StreamState())
    push(buffer, [4_000_000])
    started = time.process_time()
    for _ in range(4_000_000 // 2048):
        pack_sequence(buffer, 2048, 2048)
    assert time.process_time() - started < 5
