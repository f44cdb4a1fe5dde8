from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data.spill import SpillFile, SpillQueue


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.integers(-9, 9), max_size=60), max_bytes=st.integers(1, 20))
def test_a_queue_gives_back_what_it_was_given_in_order(steps, max_bytes):
    file = SpillFile()
    queues, expected, number = [SpillQueue(file, max_bytes) for _ in range(2)], [deque(), deque()], 0
    for turn, step in enumerate(steps):
        queue, items = queues[turn % 2], expected[turn % 2]
        for _ in range(max(0, step)):
            queue.push((number, "x" * step), step)
            items.append((number, "x" * step))
            number += 1
        for _ in range(min(-step, len(items))):
            assert queue.pop() == items.popleft()
        assert len(queue) == len(items)


def test_little_stays_in_memory_and_room_on_disk_is_used_again():
    file = SpillFile()
    queue = SpillQueue(file, max_bytes=1000)
    for _ in range(20):
        for number in range(100):
            queue.push(f"{number:0100}", 100)
            assert len(queue.front) + len(queue.back) <= 21
        for _ in range(100):
            assert len(queue.pop()) == 100
    assert 8_000 < file.size < 20_000


def test_what_fits_into_memory_makes_no_file():
    file = SpillFile()
    queue = SpillQueue(file, max_bytes=1000)
    for _ in range(100):
        queue.push("x", 100)
        queue.push("y", 100)
        assert queue.pop() + queue.pop() == "xy"
    assert file.file is None


def test_taking_from_an_empty_queue_is_an_error():
    with pytest.raises(IndexError):
        SpillQueue(SpillFile(), 10).pop()
