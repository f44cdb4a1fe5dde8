"""The end of the data: training.max_epochs with streams that end at different times."""

import json
from collections import Counter

import datasets
import pytest

from flame.errors import UserError

from .corpus import make_loader, numbered_texts, write_shards
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


SPARSE = ["", "1 2 3", "", "", "", "4 5 6 7 8 9", "", ""] * 6  # most of 12 streams have no text, some have


def write_rows(path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def assert_no_padding_alone(steps, seq_len=8):
    """Each step has targets, and only the last one may lack sequences."""
    assert steps and all(any(batch.num_valid for batch in step) for step in steps)
    labels = [row for step in steps[:-1] for batch in step for row in batch.labels.reshape(-1, seq_len)]
    assert all((row != -100).any() for row in labels)


@pytest.mark.parametrize("options", [{"shuffle": "none"}, {"max_epochs": 3}, {"streaming": True}])
def test_streams_whose_rows_are_all_empty_are_passed_over(tmp_path, options):
    corpus = write_rows(tmp_path / "rows.jsonl", SPARSE)
    expected, end = run_ranks(corpus, 1, **options)
    assert_no_padding_alone(expected)
    assert step_hashes(run_ranks(corpus, 1, num_workers=2, **options)[0]) == step_hashes(expected)
    for dp_size in (2, 3, 4):
        steps, state = run_ranks(corpus, dp_size, **options)
        assert step_hashes(steps) == step_hashes(expected) and state["streams"] == end["streams"]
    head, state = run_ranks(corpus, 4, max_steps=1, **options)
    tail, state = run_ranks(corpus, 3, state=state, **options)
    assert step_hashes(head + tail) == step_hashes(expected) and state["streams"] == end["streams"]


def test_lanes_whose_shards_have_no_text_are_passed_over(tmp_path):
    for number in range(12):
        write_rows(tmp_path / f"{number:02}.jsonl", ["0 1 2 3 4 5 6 7 8"] * 2 if number % 4 == 3 else [""] * number)
    expected, _ = run_ranks(f"{tmp_path}/*.jsonl", 1, streaming=True, batch_size=2)
    assert_no_padding_alone(expected)
    steps, _ = run_ranks(f"{tmp_path}/*.jsonl", 2, streaming=True, batch_size=1)
    assert step_hashes(steps) == step_hashes(expected)


@pytest.mark.parametrize("options", [{}, {"max_epochs": 50}, {"streaming": True}])
@pytest.mark.parametrize("dp_size, num_workers", [(1, 2), (3, 0)])
def test_data_without_any_text_is_an_error(tmp_path, options, dp_size, num_workers):
    corpus = write_rows(tmp_path / "rows.jsonl", [""] * 40)
    with pytest.raises(UserError, match="no row holds any text"):
        run_ranks(corpus, dp_size, num_workers=num_workers, **options)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("stop", [5, 50])
def test_a_resume_with_an_earlier_end_has_no_step_of_padding(corpus, before, stop):
    _, state = run_ranks(corpus, 1, max_steps=stop, max_epochs=before, batch_size=3)
    expected, _ = run_ranks(corpus, 1, state=state, batch_size=3)
    assert all(any(batch.num_valid for batch in step) for step in expected)
    steps, _ = run_ranks(corpus, 3, state=state, batch_size=1)
    assert step_hashes(steps) == step_hashes(expected)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ends", [(1, 2), (1, 3), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("sizes", [[5, 40], [3, 0, 7, 1, 9], [1] * 14])
def test_more_epochs_after_the_end_lose_and_double_no_row(tmp_path, sizes, ends, streaming):
    corpus = write_shards(tmp_path / "shards", sizes, [2])
    state, targets = None, []
    for number, max_epochs in enumerate(ends):
        options = {"max_epochs": max_epochs, "streaming": streaming, "shuffle": "none", "batch_size": 6 // (number + 1)}
        steps, state = run_ranks(corpus, number + 1, state=state, **options)
        targets += [target for step in steps for batch in step for target in batch.labels.flatten().tolist()]
    assert Counter(targets) - Counter({-100: len(targets)}) == {2 * row + 1: ends[-1] for row in range(sum(sizes))}
