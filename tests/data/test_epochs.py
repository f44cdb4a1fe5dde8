"""The end of the data: training.max_epochs with streams that end at different times."""

import datasets
import pytest

from .corpus import make_loader, numbered_texts
from .ranks import run_ranks, step_hashes

LENGTHS = [5, 40, 1, 17, 3, 9, 90, 2, 11, 8] * 2 + [0, 0]


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
    assert step_hashes(actual) == step_hashes(expected)
    assert state["is_draining"]


@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_resume_near_the_end_at_another_number_of_ranks_and_workers(corpus, stop):
    expected, end = run_ranks(corpus, 1)
    head, state = run_ranks(corpus, 2, max_steps=stop)
    tail, state = run_ranks(corpus, 3, state=state)
    assert step_hashes(head + tail) == step_hashes(expected)
    assert state["streams"] == end["streams"]


def test_workers_end_with_the_data(corpus):
    expected, _ = run_ranks(corpus, 1)
    actual, _ = run_ranks(corpus, 1, num_workers=2)
    assert step_hashes(actual) == step_hashes(expected)


def test_epochs_are_counted_to_the_end(corpus):
    loader = make_loader(corpus, max_epochs=2, num_streams=12)
    with pytest.raises(StopIteration):
        while True:
            loader.next_step()
    assert loader.epochs() == {corpus: 2.0}
