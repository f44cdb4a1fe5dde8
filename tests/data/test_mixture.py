import json
from collections import Counter

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data.mixture import Mixture
from flame.data.order import RowOrder
from flame.data.sources import TextSource
from flame.data.state import StreamState, merge_state_dicts
from flame.data.streams import DataPlan, StreamReader
from flame.data.tokenize import DocumentEncoder
from flame.errors import UserError

from .corpus import make_loader, numbered_texts, word_tokenizer


def make_plan(sizes: list[int], probabilities: list[float], num_streams=3, **options) -> DataPlan:
    """Sources of ``sizes`` rows of two words each; word 2n and 2n + 1 are those of the n-th row of all sources."""
    texts = numbered_texts([2] * sum(sizes))
    starts = np.cumsum([0, *sizes])
    sources = [TextSource(f"s{i}", texts[starts[i] : starts[i + 1]]) for i in range(len(sizes))]
    orders = [RowOrder(size, 42, index, "global", num_streams) for index, size in enumerate(sizes)]
    mixture = Mixture(probabilities, seed=42)
    return DataPlan(sources, orders, DocumentEncoder(word_tokenizer()), num_streams, 2, 2, mixture=mixture, **options)


def read_rows(plan: DataPlan, count: int, states: list[StreamState] | None = None) -> list[int]:
    """Rows of the first ``count`` sequences, each of which is one row."""
    states = states or [plan.start_state(number) for number in range(plan.num_streams)]
    reader = StreamReader(plan, list(range(plan.num_streams)), states)
    return [int(sequence.input_ids[0]) // 2 for sequence, _ in zip(reader, range(count), strict=False)]


def test_shares_are_those_asked_for_within_the_sampling_error():
    probabilities = [0.5, 0.3, 0.2]
    mixture = Mixture(probabilities, seed=1)
    counts = Counter(source for stream in range(100) for source in mixture.choose(stream, 0, 1000))
    for source, probability in enumerate(probabilities):
        deviation = (100_000 * probability * (1 - probability)) ** 0.5
        assert abs(counts[source] - 100_000 * probability) < 4 * deviation


def test_streams_seeds_and_draws_are_independent():
    choices = {
        (seed, stream): tuple(Mixture([0.5, 0.5], seed).choose(stream, 0, 64)) for seed in (1, 2) for stream in (0, 1)
    }
    assert len(set(choices.values())) == 4
    pairs = Counter(zip(choices[1, 0], choices[1, 1], strict=True))
    assert all(6 <= pairs[pair] <= 28 for pair in [(0, 0), (0, 1), (1, 0), (1, 1)])


def test_a_source_with_no_share_is_never_drawn():
    assert set(Mixture([0.0, 1.0, 0.0], 0).choose(0, 0, 100)) == {1}
    assert set(Mixture([0.5, 0.0, 0.5], 0).choose(0, 0, 100)) == {0, 2}


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    draw=st.integers(0, 10**12),
    count=st.integers(1, 50),
    cut=st.integers(0, 50),
)
def test_how_many_are_drawn_at_a_time_changes_nothing(weights, draw, count, cut):
    mixture, cut = Mixture(weights, seed=3), min(cut, count)
    assert mixture.choose(7, draw, count) == mixture.choose(7, draw, cut) + mixture.choose(7, draw + cut, count - cut)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    num_streams=st.integers(1, 5),
    max_epochs=st.integers(1, 3),
)
def test_every_row_of_every_source_is_used_once_per_epoch(sizes, weights, num_streams, max_epochs):
    plan = make_plan(sizes, weights[: len(sizes)], num_streams, max_epochs=max_epochs)
    states = [plan.start_state(number) for number in range(num_streams)]
    left = [number for number, state in enumerate(states) if not plan.is_finished(number, state)]
    reader = StreamReader(plan, left, [states[number] for number in left])
    sequences = list(reader)
    rows = Counter(int(sequence.input_ids[0]) // 2 for sequence in sequences)
    assert rows == {row: max_epochs for row in range(sum(sizes))}
    assert sum(sequence.is_last for sequence in sequences) == len(left)


@pytest.mark.parametrize("stop", [1, 5, 17, 40, 58])
def test_resume_is_exact_also_when_sources_have_ended(stop):
    plan = make_plan([5, 40, 15], [0.4, 0.3, 0.3], num_streams=1, max_epochs=1)
    sequences = list(StreamReader(plan, [0], [plan.start_state(0)]))
    state = StreamState.from_list(json.loads(json.dumps(sequences[stop - 1].state)))
    rest = list(StreamReader(plan, [0], [state]))
    assert [s.input_ids.tolist() for s in rest] == [s.input_ids.tolist() for s in sequences[stop:]]
    assert rest[-1].state == sequences[-1].state


def test_a_source_without_text_beside_one_with_text_does_no_harm():
    plan = make_plan([3, 3], [0.5, 0.5])
    plan.sources[0].texts = [""] * 3
    assert set(read_rows(plan, 50)) == {3, 4, 5}
    plan.sources[1].texts = [""] * 3
    with pytest.raises(UserError, match="s0, s1: no row holds any text"):
        read_rows(plan, 1)


def test_epochs_and_states_of_several_sources(tmp_path):
    for name, size in [("a", 10), ("b", 1000)]:
        datasets.Dataset.from_dict({"text": numbered_texts([4] * size)}).save_to_disk(tmp_path / name)
    names = [f"{tmp_path}/{name}" for name in "ab"]
    loader = make_loader(",".join(names), seq_len=4, batch_size=60, num_streams=60)
    for _ in range(20):
        loader.next_step()
    epochs = loader.epochs()
    assert 50 < epochs[names[0]] < 70 and 0.5 < epochs[names[1]] < 0.7  # 600 documents expected of each
    assert epochs[names[0]] * 10 + epochs[names[1]] * 1000 == pytest.approx(1200)
    state = merge_state_dicts([loader.state_dict()])
    assert state["fingerprint"]["order"]["probabilities"] == [0.5, 0.5]
    other = make_loader(",".join(names), seq_len=4, batch_size=60, num_streams=60, data_probs=[0.3, 0.7])
    with pytest.raises(UserError, match=r"data_probs: 0\.5, 0\.5 in the checkpoint, 0\.3, 0\.7 now"):
        other.load_state_dict(state)
