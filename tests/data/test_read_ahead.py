import gc
import itertools
import os
import subprocess
import sys
import threading
import time

import pytest

from flame.data import streams
from flame.data.state import StreamState
from flame.data.streams import StreamReader
from flame.errors import UserError

from .corpus import make_loader, make_plan, numbered_texts

LENGTHS = [5, 40, 1, 0, 17, 3, 9, 26, 0, 2, 11, 8]


def tokenizer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokenizer")]


def wait_until_gone() -> None:
    """The thread ends by itself, with the batch in hand; not waiting for that is what is tested."""
    deadline = time.monotonic() + 10
    while tokenizer_threads():
        assert time.monotonic() < deadline, "the thread did not end"
        time.sleep(0.01)


def open_reader(plan) -> StreamReader:
    numbers = list(range(plan.num_streams))
    return StreamReader(plan, numbers, [StreamState() for _ in numbers])


def contents(sequences) -> list[tuple]:
    return [
        (each.input_ids.tolist(), each.labels.tolist(), each.cu_seqlens.tolist(), each.state, each.is_last)
        for each in sequences
    ]


@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize("max_epochs", [0, 3])
def test_reading_ahead_changes_neither_sequences_nor_states(monkeypatch, num_streams, max_epochs):
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", 30)  # many batches
    read = {}
    for batches_ahead in (1, 2, 5):
        monkeypatch.setattr(streams, "BATCHES_AHEAD", batches_ahead)
        plan = make_plan(numbered_texts(LENGTHS), 7, num_streams, max_epochs=max_epochs)
        read[batches_ahead] = contents(itertools.islice(open_reader(plan), 120))
    assert read[1] == read[2] == read[5]
    assert len(read[1]) == 120 or (max_epochs and all(last for *_, last in read[1][-1:]))


def test_the_next_batch_is_begun_before_the_last_one_is_used_up(monkeypatch):
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", 30)
    reader = open_reader(make_plan(numbered_texts(LENGTHS), 7, 2))
    sequences = iter(reader)
    for _ in range(50):
        next(sequences)
        assert 1 <= len(reader.ahead) <= streams.BATCHES_AHEAD
        held = sum(stream.buffer.num_tokens for stream in reader.streams)
        assert held < 2 * 7 + 3 * 30 + 2 * max(LENGTHS)  # what it reads ahead has a bound
    sequences.close()
    wait_until_gone()


def test_the_tokenizer_works_on_a_thread_of_its_own_and_arrays_are_made_outside_of_it():
    plan, threads = make_plan(numbered_texts(LENGTHS), 7), {"tokenize": set(), "frame": set()}
    for name, seen in threads.items():
        method = getattr(plan.encoder, name)
        setattr(plan.encoder, name, lambda *args, m=method, s=seen: s.add(threading.current_thread().name) or m(*args))
    for _ in itertools.islice(open_reader(plan), 50):
        pass
    assert threads["frame"] == {threading.current_thread().name}
    assert len(threads["tokenize"]) == 1 and threads["tokenize"] != threads["frame"]


def test_a_fault_in_the_thread_is_raised_to_the_consumer_behind_what_came_before_it(monkeypatch):
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", 8)
    plan = make_plan([*numbered_texts([4] * 40), None], 4, shuffle="none")
    sequences, first_tokens = iter(open_reader(plan)), []
    with pytest.raises(UserError, match=r"texts: row 40 .*column text: the value is missing"):
        for sequence in sequences:
            first_tokens.append(int(sequence.input_ids[0]))
    assert first_tokens == list(range(0, 4 * len(first_tokens), 4)) and len(first_tokens) >= 36
    wait_until_gone()


def test_other_errors_keep_their_kind_and_message():
    plan = make_plan(numbered_texts([4] * 10), 4)

    def broken(texts):
        raise MemoryError("no room for the pieces")

    plan.encoder.tokenize = broken
    with pytest.raises(MemoryError, match="no room for the pieces"):
        next(iter(open_reader(plan)))
    wait_until_gone()


def test_no_thread_before_the_first_sequence_and_none_after_the_last():
    wait_until_gone()
    reader = open_reader(make_plan(numbered_texts([4] * 10), 4, max_epochs=1))
    assert not tokenizer_threads()
    assert len(list(reader)) == 10
    wait_until_gone()


def test_closing_does_not_wait_for_the_batch_in_hand():
    plan, begun, release = make_plan(numbered_texts([4] * 40), 4), threading.Event(), threading.Event()
    tokenize, calls = plan.encoder.tokenize, itertools.count()

    def stop_at_the_second_batch(texts):
        if next(calls) == 1:
            begun.set()
            release.wait(30)
        return tokenize(texts)

    plan.encoder.tokenize = stop_at_the_second_batch
    sequences = iter(open_reader(plan))
    next(sequences)
    assert begun.wait(30)
    sequences.close()
    assert tokenizer_threads()  # still in that batch
    release.set()
    wait_until_gone()


def test_a_reader_that_is_dropped_leaves_no_thread():
    reader = open_reader(make_plan(numbered_texts([4] * 10), 4, max_epochs=1))
    assert not reader.has_empty_stream()
    del reader
    gc.collect()
    wait_until_gone()


def test_workers_are_forked_from_a_process_without_the_thread():
    loader = make_loader("builtin:stdlib", num_workers=1)
    loader.next_step()
    assert not tokenizer_threads()
    loader.close()


def test_a_process_that_leaves_its_loader_open_ends():
    code = (
        "from tests.data.corpus import make_loader; make_loader('builtin:stdlib', seq_len=512).next_step(); print('ok')"
    )
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["ok"] and "rror" not in run.stderr


def test_rows_that_are_read_but_give_no_token_end_the_reading(monkeypatch):
    """Passes are counted up to the batch that came back, not up to those that are still on their way."""
    monkeypatch.setattr(streams, "FRUITLESS_PASSES", 1)
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", 2)
    plan = make_plan(["0 1", "", "", ""], 2, shuffle="none")
    assert len(list(itertools.islice(open_reader(plan), 40))) == 40
    with pytest.raises(UserError, match="no row holds any text"):
        next(iter(open_reader(make_plan(["", ""], 2))))
