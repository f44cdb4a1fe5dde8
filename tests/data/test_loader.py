import json
import time

import datasets
import pytest
import torch

from flame.data.batch import combine_digests
from flame.data.state import merge_state_dicts
from flame.errors import UserError

from .corpus import EOS, make_loader, numbered_texts, word_tokenizer
from .ranks import Ranks

LENGTHS = [5, 40, 1, 17, 3, 9, 26, 2, 11, 8] * 7
GLOBAL_BATCH = 24


@pytest.fixture
def corpus(tmp_path) -> str:
    datasets.Dataset.from_dict({"text": numbered_texts(LENGTHS)}).save_to_disk(tmp_path / "corpus")
    return str(tmp_path / "corpus")


@pytest.mark.parametrize("varlen", [True, False])
def test_order_is_the_same_for_any_ranks_and_split_of_the_batch(corpus, varlen):
    expected = Ranks(corpus, 1, varlen=varlen).step_hashes(10)
    assert len(set(expected)) == 10
    for dp_size, accumulation in [(1, 4), (2, 1), (3, 2), (4, 3), (12, 1)]:
        assert Ranks(corpus, dp_size, accumulation, varlen=varlen).step_hashes(10) == expected


def test_dp_change_and_three_resumes_in_a_row(corpus):
    expected = Ranks(corpus, 1, varlen=True).step_hashes(16)
    first = Ranks(corpus, 2, varlen=True)
    hashes, state = first.step_hashes(4), first.save()
    for dp_size, accumulation in [(4, 2), (1, 1), (3, 1)]:
        ranks = Ranks(corpus, dp_size, accumulation, varlen=True).load(state)
        hashes += ranks.step_hashes(4)
        state = ranks.save()
    assert hashes == expected


def test_resume_where_the_ranks_do_not_divide_the_position(corpus):
    """A batch of 2 sequences on one rank leaves a position that 12 ranks do not divide."""
    one = make_loader(corpus, batch_size=2)
    for _ in range(5):
        one.next_step()
    state = merge_state_dicts([one.state_dict()])
    ranks = Ranks(corpus, 12).load(state)
    (digest,) = ranks.step_hashes(1)
    digests = {}
    for _ in range(GLOBAL_BATCH // 2):
        (batch,) = one.next_step()
        digests.update(zip(batch.numbers, batch.digests, strict=True))
    assert digest == combine_digests(digests)


def test_worker_count_changes_nothing_and_may_change_at_resume(corpus):
    expected = Ranks(corpus, 1, varlen=True).step_hashes(8)
    two = Ranks(corpus, 2, num_workers=2, varlen=True)
    assert two.step_hashes(4) == expected[:4]
    state = two.save()
    two.close()
    three = Ranks(corpus, 1, num_workers=3, varlen=True).load(state)
    assert three.step_hashes(4) == expected[4:]
    three.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_null_row_is_named_by_whoever_meets_it(tmp_path, num_workers):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": null}\n{"text": "3 4"}\n')
    loader = make_loader(str(path), num_workers=num_workers, num_streams=3)
    with pytest.raises(UserError, match=r"rows.jsonl: row 1 .*column text: the value is missing"):
        for _ in range(3):
            loader.next_step()
    loader.close()


def test_null_rows_can_be_skipped_and_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": null}\n{"text": "3 4"}\n')
    loader = make_loader(str(path), seq_len=2, num_streams=3, batch_size=4, on_bad_row="skip")
    for _ in range(3):
        (batch,) = loader.next_step()
        assert set(batch.input_ids.flatten().tolist()) <= {1, 2, 3, 4}
    assert loader.num_skipped_rows > 0
    assert loader.state_dict()["streams"].keys() == {"0", "1", "2"}


def test_mixed_rows_of_a_json_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": 5}\n')
    with pytest.raises(UserError, match=r"(?i)column.*text"):
        loader = make_loader(str(path), num_streams=1)
        for _ in range(3):
            loader.next_step()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_file_of_a_hundred_lines_gives_every_row_once_per_pass(tmp_path, num_workers):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in numbered_texts([4] * 100)))
    loader = make_loader(str(path), seq_len=4, batch_size=50, num_workers=num_workers)
    for _ in range(3):
        rows = [batch.input_ids[:, 0] // 4 for step in range(2) for batch in loader.next_step()]
        assert sorted(torch.cat(rows).tolist()) == list(range(100))
    assert loader.epochs() == {str(path): 3.0}
    loader.close()


@pytest.mark.parametrize("frame", ["bare", "tokenizer", "with EOS"])
def test_pretokenised_rows_give_the_batches_of_online_ones(tmp_path, frame):
    tokenizer = word_tokenizer(eos_token="<eos>")
    texts = numbered_texts(LENGTHS)
    closing = [EOS] if frame == "with EOS" else []
    rows = [tokenizer(text, add_special_tokens=frame != "bare")["input_ids"] + closing for text in texts]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "online")
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "ready")
    online, ready = (
        make_loader(str(tmp_path / name), tokenizer=tokenizer, varlen=True) for name in ("online", "ready")
    )
    for _ in range(10):
        assert online.next_step()[0].digests == ready.next_step()[0].digests


def test_token_ids_outside_the_vocabulary_are_named(tmp_path):
    datasets.Dataset.from_dict({"input_ids": [[1, 5000]]}).save_to_disk(tmp_path / "rows")
    with pytest.raises(UserError, match=r"row 0 .*token id 5000 is outside the tokenizer's 0 to 2001"):
        make_loader(str(tmp_path / "rows")).next_step()


def test_ranks_must_divide_the_streams(corpus):
    with pytest.raises(UserError, match=r"7 data-parallel ranks.*num_streams 60.*1, 2, 3, 4, 5, 6, 10, 12"):
        make_loader(corpus, 0, 7)


@pytest.mark.parametrize("change", [{"seq_len": 16}, {"seed": 1}, {"varlen": True, "context_len": 4}])
def test_a_state_of_other_data_is_refused_unless_asked_for(corpus, change):
    state = merge_state_dicts([make_loader(corpus).state_dict()])
    with pytest.raises(UserError, match=f"{next(iter(change))}: .* in the checkpoint, .* now"):
        make_loader(corpus, **change).load_state_dict(state)
    make_loader(corpus, **change, ignore_data_fingerprint=True).load_state_dict(state)


def test_a_state_with_other_streams_is_refused_always(corpus):
    state = merge_state_dicts([make_loader(corpus).state_dict()])
    with pytest.raises(UserError, match="has 60 streams"):
        make_loader(corpus, num_streams=30, ignore_data_fingerprint=True).load_state_dict(state)


def test_resume_takes_the_same_time_at_any_step():
    loader = make_loader("builtin:stdlib")
    state = merge_state_dicts([loader.state_dict()])
    state["num_sequences"] = 2 * 10**9
    state["streams"] = [[100, 10**9, 0, 10**9] for _ in state["streams"]]
    started = time.process_time()
    loader.load_state_dict(state)
    loader.next_step()
    assert time.process_time() - started < 5


def test_batch_size_default(corpus):
    assert make_loader(corpus, batch_size=0).next_step()[0].input_ids.shape == (8, 8)
    assert make_loader(corpus, batch_size=0, varlen=True).next_step()[0].input_ids.shape == (1, 8)


def test_context_len_is_no_longer_than_the_sequence(corpus):
    loader = make_loader(corpus, varlen=True, batch_size=1, context_len=2048)
    assert loader.next_step()[0].cu_seqlens[-1] == 8
    pieces = make_loader(corpus, varlen=True, batch_size=8, context_len=3).next_step()[0].cu_seqlens.diff()
    assert pieces.max() <= 3
