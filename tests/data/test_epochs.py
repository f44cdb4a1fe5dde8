"""The end of the data: training.max_epochs with streams that end at different times."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import datasets
import pytest

from flame.data.batch import combine_digests
from flame.data.state import merge_state_dicts

from .corpus import make_loader, numbered_texts

LENGTHS = [5, 40, 1, 17, 3, 9, 90, 2, 11, 8] * 2 + [0, 0]
GLOBAL_BATCH = 12


class ThreadGroup:
    """Gathers values of ranks that run as threads."""

    def __init__(self, size: int):
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, value) -> list:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def run_ranks(corpus: str, dp_size: int, max_steps: int = 10**6, state: dict | None = None, **training):
    """Step ``dp_size`` ranks until the data ends: (all batches of each step, merged state after the last one)."""
    group = ThreadGroup(dp_size)
    options = {"max_epochs": 1, "num_streams": 12, "varlen": True, "batch_size": GLOBAL_BATCH // dp_size, **training}
    loaders = [
        make_loader(corpus, rank, dp_size, gather=lambda value, rank=rank: group.gather(rank, value), **options)
        for rank in range(dp_size)
    ]

    def run(loader) -> list:
        if state is not None:
            loader.load_state_dict(state)
        steps = []
        while len(steps) < max_steps:
            try:
                steps.append(loader.next_step())
            except StopIteration:
                break
        loader.close()
        return steps

    with ThreadPoolExecutor(dp_size) as threads:
        by_rank = list(threads.map(run, loaders))
    assert len({len(steps) for steps in by_rank}) == 1
    merged = json.loads(json.dumps(merge_state_dicts([loader.state_dict() for loader in loaders])))
    return [[batch for batches in step for batch in batches] for step in zip(*by_rank, strict=True)], merged


def hashes(steps) -> list[str]:
    return [
        combine_digests({n: d for batch in step for n, d in zip(batch.numbers, batch.digests, strict=True)})
        for step in steps
    ]


@pytest.fixture
def corpus(tmp_path) -> str:
    datasets.Dataset.from_dict({"text": numbered_texts(LENGTHS)}).save_to_disk(tmp_path / "corpus")
    return str(tmp_path / "corpus")


@pytest.mark.parametrize("num_streams, max_epochs", [(12, 1), (12, 3), (60, 1), (60, 2)])
def test_every_target_is_trained_on_once_per_epoch(corpus, num_streams, max_epochs):
    steps, _ = run_ranks(corpus, 1, num_streams=num_streams, max_epochs=max_epochs)
    targets = [target for step in steps for batch in step for target in batch.labels.flatten().tolist()]
    starts = {sum(LENGTHS[:row]) for row in range(len(LENGTHS))}
    expected = [token for token in range(sum(LENGTHS)) if token not in starts] * max_epochs
    assert sorted(target for target in targets if target != -100) == sorted(expected)


@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_the_end_is_the_same_for_any_number_of_ranks(corpus, dp_size):
    expected, _ = run_ranks(corpus, 1)
    actual, state = run_ranks(corpus, dp_size)
    assert hashes(actual) == hashes(expected)
    assert state["is_draining"]


@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_resume_near_the_end_at_another_number_of_ranks_and_workers(corpus, stop):
    expected, end = run_ranks(corpus, 1)
    head, state = run_ranks(corpus, 2, max_steps=stop)
    tail, state = run_ranks(corpus, 3, state=state)
    assert hashes(head + tail) == hashes(expected)
    assert state["streams"] == end["streams"]


def test_workers_end_with_the_data(corpus):
    expected, _ = run_ranks(corpus, 1)
    actual, _ = run_ranks(corpus, 1, num_workers=2)
    assert hashes(actual) == hashes(expected)


def test_epochs_are_counted_to_the_end(corpus):
    loader = make_loader(corpus, max_epochs=2, num_streams=12)
    with pytest.raises(StopIteration):
        while True:
            loader.next_step()
    assert loader.epochs() == {corpus: 2.0}
