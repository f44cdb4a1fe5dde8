"""One global order: the same sequences for any layout, and after any number of resumes at other layouts."""

import itertools

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flame.data import workers
from flame.errors import UserError

from .corpus import numbered_texts, write_shards
from .ranks import Ranks

LENGTHS = [5, 40, 1, 17, 3, 9, 26, 2, 11, 8, 4, 4, 30]
SHARD_SIZES = [7, 12, 3, 20, 5]
NUM_STEPS = 12
DP_SIZES, NUM_WORKERS, ACCUMULATIONS = [1, 2, 3, 4, 8], [0, 1, 3], [1, 3]
OPTIONS = {"num_streams": 24, "varlen": True}


KINDS = {
    "map-style": ("{saved}", {}),
    "blocks": ("{saved}", {"shuffle": "block"}),
    "mixture": ("{saved},{few}", {"data_probs": [0.7, 0.3]}),
    "streaming": ("{shards}", {"streaming": True}),
    "one shard": ("{shard}", {"streaming": True, "shuffle": "none"}),
    "mixed": ("{saved},{shards},{shard}", {"streaming": True, "data_probs": [0.5, 0.3, 0.2]}),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    texts = numbered_texts(LENGTHS * 3)
    for name, rows in {"saved": texts, "few": texts[:7]}.items():
        datasets.Dataset.from_dict({"text": rows}).save_to_disk(folder / name)
    shards = write_shards(folder / "shards", SHARD_SIZES, LENGTHS)
    shard = write_shards(folder / "shard", [10], LENGTHS)
    return {"saved": f"{folder}/saved", "few": f"{folder}/few", "shards": shards, "shard": shard}


@pytest.fixture(autouse=True, scope="module")
def light():
    """Many windows and blocks in few rows, and workers that share the work as processes do, but in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flame.data.shard_order.WINDOW_ROWS", 4)
        patch.setattr("flame.data.order.BLOCK_ROWS", 5)
        patch.setattr("flame.data.streams.TOKENS_PER_BATCH", 64)
        patch.setattr(
            workers, "_start_worker", lambda reader, messages_ahead, persistent: workers._WorkerDataset(reader)
        )
        yield


@pytest.fixture(scope="module")
def expected(light, corpora) -> dict[str, list[str]]:
    """The hashes of each kind's steps, over several epochs, on one rank without workers."""
    hashes = {}
    for kind, (corpus, options) in KINDS.items():
        ranks = Ranks(corpus.format(**corpora), 1, **OPTIONS, **options)
        hashes[kind] = ranks.step_hashes(NUM_STEPS)
        assert len(set(hashes[kind])) == NUM_STEPS and max(ranks.loaders[0].epochs().values()) > 2, kind
    return hashes


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_same_sequences(kind, corpora, expected):
    corpus, options = KINDS[kind]
    for dp_size, num_workers in itertools.product(DP_SIZES, NUM_WORKERS):
        accumulation = ACCUMULATIONS[(dp_size + num_workers) % 2] if 24 % (3 * dp_size) == 0 else 1
        ranks = Ranks(corpus.format(**corpora), dp_size, accumulation, num_workers=num_workers, **OPTIONS, **options)
        assert ranks.step_hashes(4) == expected[kind][:4], (dp_size, num_workers, accumulation)


LAYOUTS = st.tuples(st.sampled_from(DP_SIZES), st.sampled_from(NUM_WORKERS), st.sampled_from(ACCUMULATIONS))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(legs=st.lists(st.tuples(st.integers(1, 4), LAYOUTS), min_size=2, max_size=4))
def test_resumes_in_a_row_at_other_layouts_change_nothing(kind, legs, corpora, expected):
    corpus, options = KINDS[kind]
    hashes, state = [], None
    for num_steps, (dp_size, num_workers, accumulation) in legs:
        accumulation = accumulation if 24 % (accumulation * dp_size) == 0 else 1
        ranks = Ranks(corpus.format(**corpora), dp_size, accumulation, num_workers=num_workers, **OPTIONS, **options)
        if state:
            ranks.load(state)
        hashes += ranks.step_hashes(min(num_steps, NUM_STEPS - len(hashes)))
        state = ranks.save()
    assert hashes == expected[kind][: len(hashes)]


def test_another_number_of_datasets_is_refused_even_without_a_fingerprint(corpora):
    one = Ranks(corpora["saved"], 1, **OPTIONS)
    one.step_hashes(2)
    options = OPTIONS | {"ignore_data_fingerprint": True}
    two = Ranks("{saved},{few}".format(**corpora), 1, **options)
    with pytest.raises(UserError, match="names 2 datasets, the checkpoint's data state is of 1"):
        two.load(one.save())
