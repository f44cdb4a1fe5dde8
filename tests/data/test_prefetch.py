import json
from types import SimpleNamespace

import datasets
import pytest
import torch

from flame.data import prefetch
from flame.data.prefetch import DevicePrefetcher
from flame.data.state import merge_state_dicts
from flame.errors import UserError

from .corpus import make_loader, numbered_texts


@pytest.fixture
def corpus(tmp_path) -> str:
    datasets.Dataset.from_dict({"text": numbered_texts([5, 40, 1, 17, 3] * 4)}).save_to_disk(tmp_path / "corpus")
    return str(tmp_path / "corpus")


def digests(batches) -> list[bytes]:
    return [digest for batch in batches for digest in batch.digests]


def test_state_and_counts_are_those_of_the_last_step_handed_out(corpus):
    plain, ahead = make_loader(corpus), DevicePrefetcher(make_loader(corpus), torch.device("cpu"))
    for _ in range(5):
        assert digests(ahead.next_step()) == digests(plain.next_step())
        ahead.prefetch()
        ahead.prefetch()
        assert json.dumps(ahead.state_dict()) == json.dumps(plain.state_dict())
        assert ahead.epochs() == plain.epochs() and ahead.num_skipped_rows == 0
    state = merge_state_dicts([ahead.state_dict()])
    ahead.next_step()
    ahead.prefetch()
    ahead.load_state_dict(state)
    assert digests(ahead.next_step()) == digests(plain.next_step())
    ahead.close()


def test_the_end_of_the_data_comes_when_it_is_reached(corpus):
    loader = DevicePrefetcher(make_loader(corpus, max_epochs=1, num_streams=12), torch.device("cpu"))
    plain, num_steps = make_loader(corpus, max_epochs=1, num_streams=12), 0
    with pytest.raises(StopIteration):
        while True:
            plain.next_step()
            num_steps += 1
    for _ in range(num_steps):
        loader.next_step()
        loader.prefetch()
    with pytest.raises(StopIteration):
        loader.next_step()


def test_a_fault_met_ahead_is_raised_when_its_step_is_asked_for(tmp_path):
    texts = [*numbered_texts([40] * 10), None, *numbered_texts([40] * 9)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "corpus")
    options = dict(num_streams=2, shuffle="none", batch_size=2)
    plain = make_loader(str(tmp_path / "corpus"), **options)
    ahead = DevicePrefetcher(make_loader(str(tmp_path / "corpus"), **options), torch.device("cpu"))
    num_steps = 0
    with pytest.raises(UserError, match="row 10"):
        while True:
            plain.next_step()
            num_steps += 1
    assert num_steps
    for _ in range(num_steps):
        ahead.next_step()
        ahead.prefetch()
    with pytest.raises(UserError, match="row 10"):
        ahead.next_step()


def test_the_time_of_fetching_is_counted_once(corpus, monkeypatch):
    loader, seconds = make_loader(corpus), 0.0
    next_step = loader.next_step

    def take_three_seconds():
        nonlocal seconds
        seconds += 3
        return next_step()

    monkeypatch.setattr(loader, "next_step", take_three_seconds)
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=lambda: seconds))
    ahead = DevicePrefetcher(loader, torch.device("cpu"))
    ahead.next_step()
    assert ahead.take_wait_time() == 3 and ahead.take_wait_time() == 0
    ahead.prefetch()
    assert ahead.take_wait_time() == 3
    ahead.next_step()
    assert ahead.take_wait_time() == 0  # the step was at hand


@pytest.mark.gpu
def test_copies_are_made_ahead_and_given_to_whoever_asks(corpus):
    device = torch.device("cuda", torch.cuda.current_device())
    plain, loader = make_loader(corpus, varlen=True), DevicePrefetcher(make_loader(corpus, varlen=True), device)
    for _ in range(5):
        loader.prefetch()
        for batch, expected in zip(loader.next_step(), plain.next_step(), strict=True):
            copy = batch.to(device)
            assert copy is batch.copy and copy.input_ids.device == device
            assert torch.equal(copy.labels.cpu(), expected.labels)
            assert torch.equal(copy.cu_seqlens.cpu(), expected.cu_seqlens)
