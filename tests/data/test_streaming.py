"""Whole loaders over streamed sources."""

import functools
import gzip
import http.server
import json
import threading

import datasets
import pytest
import torch

from flame.data.state import merge_state_dicts
from flame.errors import UserError

from .corpus import make_loader, numbered_texts, write_shards
from .ranks import Ranks, run_ranks, step_hashes

LENGTHS = [5, 40, 1, 17, 3, 9, 26, 2, 11, 8]


@pytest.fixture(autouse=True)
def little_read_ahead(monkeypatch):
    """Tiny corpora would be passed over hundreds of times to fill the usual read-ahead."""
    monkeypatch.setattr("flame.data.streams.TOKENS_PER_BATCH", 256)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_file_of_a_hundred_lines_gives_every_row_once_per_pass(tmp_path, num_workers):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in numbered_texts([4] * 100)))
    loader = make_loader(str(path), seq_len=4, batch_size=50, num_workers=num_workers, streaming=True, num_streams=960)
    passes = []
    for _ in range(3):
        rows = [batch.input_ids[:, 0] // 4 for step in range(2) for batch in loader.next_step()]
        passes.append(torch.cat(rows).tolist())
        assert sorted(passes[-1]) == list(range(100))
    assert passes[0] != passes[1]
    loader.close()


@pytest.mark.parametrize("sizes", [[3], [7, 12, 0, 20, 5], [2] * 30])
@pytest.mark.parametrize("max_epochs", [1, 2])
def test_every_target_is_trained_on_once_per_epoch(tmp_path, sizes, max_epochs):
    lengths = [9, 3, 4, 30, 2]
    corpus = write_shards(tmp_path / "shards", sizes, lengths)
    steps, _ = run_ranks(corpus, 1, streaming=True, max_epochs=max_epochs)
    targets = [target for step in steps for batch in step for target in batch.labels.flatten().tolist()]
    lengths = (lengths * sum(sizes))[: sum(sizes)]
    starts = {sum(lengths[:row]) for row in range(len(lengths))}
    expected = [token for token in range(sum(lengths)) if token not in starts] * max_epochs
    assert sorted(target for target in targets if target != -100) == sorted(expected)
    assert all(batch.num_valid for step in steps for batch in step)


def test_the_end_is_the_same_for_any_number_of_ranks_and_after_a_resume(tmp_path):
    corpus = write_shards(tmp_path / "shards", [4, 9, 11], LENGTHS)
    expected, end = run_ranks(corpus, 1, streaming=True)
    for dp_size in (2, 3):
        steps, state = run_ranks(corpus, dp_size, streaming=True)
        assert step_hashes(steps) == step_hashes(expected) and state["streams"] == end["streams"]
    for stop in (1, 3, len(expected) - 1):
        head, state = run_ranks(corpus, 2, max_steps=stop, streaming=True)
        tail, state = run_ranks(corpus, 4, state=state, streaming=True)
        assert step_hashes(head + tail) == step_hashes(expected) and state["streams"] == end["streams"]


def test_sources_end_one_by_one(tmp_path):
    datasets.Dataset.from_dict({"text": numbered_texts([4] * 50)}).save_to_disk(tmp_path / "saved")
    shards = write_shards(tmp_path / "shards", [3, 8], [4])
    options = {"streaming": True, "data_probs": [0.2, 0.8], "seq_len": 4, "max_epochs": 2}
    steps, _ = run_ranks(f"{tmp_path}/saved,{shards}", 3, **options)
    targets = [target for step in steps for batch in step for target in batch.labels.flatten().tolist()]
    counts = [targets.count(4 * row + 1) for row in range(50)]
    assert counts == [4] * 11 + [2] * 39  # rows 0 to 10 are in both


def test_epochs_are_counted_in_whole_shards(tmp_path):
    corpus = write_shards(tmp_path / "shards", [6, 6], [4])
    loader = make_loader(corpus, streaming=True, max_epochs=2, num_streams=12, seq_len=4)
    with pytest.raises(StopIteration):
        while True:
            loader.next_step()
    assert loader.epochs() == {corpus: 2.0}


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_bad_rows_are_named_with_their_shard_or_skipped_and_counted(tmp_path, on_bad_row):
    (tmp_path / "0.jsonl").write_text('{"text": "1 2"}\n')
    (tmp_path / "1.jsonl").write_text('{"text": "3 4"}\n{"text": null}\n')
    options = {"seq_len": 2, "num_streams": 2, "shuffle": "none", "on_bad_row": on_bad_row}
    loader = make_loader(f"{tmp_path}/*.jsonl", streaming=True, **options)
    if on_bad_row == "skip":
        for _ in range(4):
            assert set(loader.next_step()[0].input_ids.flatten().tolist()) <= {1, 2, 3, 4}
        assert loader.num_skipped_rows > 0
        return
    with pytest.raises(UserError, match=r"row 1 of shard 1 .*column text: the value is missing"):
        for _ in range(4):
            loader.next_step()


def test_a_broken_compressed_shard_stops_the_run_or_loses_its_rest(tmp_path):
    lines = "".join(json.dumps({"text": f"{row % 1000} {row % 997}"}) + "\n" for row in range(3000)).encode()
    (tmp_path / "0.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1 2"}\n'))
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(lines)[:4000])
    options = {"streaming": True, "seq_len": 2, "num_streams": 1, "shuffle": "none"}
    with pytest.raises(UserError, match=r"shard 1 .*column text: it cannot be read \(EOFError"):
        make_loader(f"{tmp_path}/*.gz", **options).next_step()
    loader = make_loader(f"{tmp_path}/*.gz", on_bad_row="skip", **options)
    for _ in range(10):
        loader.next_step()
    assert loader.num_skipped_rows > 0


def test_a_state_of_other_shards_is_refused(tmp_path):
    corpus = write_shards(tmp_path / "one", [5, 5], LENGTHS)
    state = merge_state_dicts([make_loader(corpus, streaming=True).state_dict()])
    with pytest.raises(UserError, match=r"\d+ bytes in the checkpoint, \d+ now"):
        make_loader(write_shards(tmp_path / "three", [5, 5], [3]), streaming=True).load_state_dict(state)
    make_loader(write_shards(tmp_path / "moved", [5, 5], LENGTHS), streaming=True).load_state_dict(state)


def test_a_later_shard_that_changed_is_noticed(tmp_path):
    """No row of it is read when a run starts."""
    corpus = write_shards(tmp_path / "rows", [5, 5, 5], LENGTHS)
    state = merge_state_dicts([make_loader(corpus, streaming=True).state_dict()])
    last = tmp_path / "rows" / "2.jsonl"
    content = last.read_text()
    last.write_text(content + json.dumps({"text": "7 8"}) + "\n")
    with pytest.raises(UserError, match=r"rows/\*.jsonl\*: \d+ bytes in the checkpoint, \d+ now"):
        make_loader(corpus, streaming=True).load_state_dict(state)
    last.write_text(content)
    make_loader(corpus, streaming=True).load_state_dict(state)
    last.rename(tmp_path / "rows" / "1z.jsonl")
    with pytest.raises(UserError, match="as many files as in the checkpoint, with other names"):
        make_loader(corpus, streaming=True).load_state_dict(state)


def test_positions_that_mean_something_else_cannot_be_ignored(tmp_path):
    corpus = write_shards(tmp_path / "two", [5, 5], LENGTHS)
    more = write_shards(tmp_path / "three", [5, 5, 5], LENGTHS)
    options = {"ignore_data_fingerprint": True}
    streamed, saved = (
        merge_state_dicts([make_loader(corpus, streaming=streaming).state_dict()]) for streaming in (True, False)
    )
    with pytest.raises(UserError, match=r"is not streamed now, but was up to"):
        make_loader(corpus, **options).load_state_dict(streamed)
    with pytest.raises(UserError, match=r"is streamed now, but was not up to"):
        make_loader(corpus, streaming=True, **options).load_state_dict(saved)
    with pytest.raises(UserError, match="2 shards in the checkpoint, 3 now"):
        make_loader(more, streaming=True, **options).load_state_dict(streamed)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_worker_processes_read_parquet(tmp_path, num_workers):
    for number in range(3):
        rows = datasets.Dataset.from_dict({"text": numbered_texts([4] * 20)})
        rows.to_parquet(tmp_path / f"{number}.parquet")
    corpus = f"{tmp_path}/*.parquet"
    expected = Ranks(corpus, 1, streaming=True).step_hashes(3)
    ranks = Ranks(corpus, 2, streaming=True, num_workers=num_workers)
    assert ranks.step_hashes(3) == expected
    ranks.close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path):
    """A folder served on this machine: (folder, address)."""
    pytest.importorskip("aiohttp", reason="datasets reads http addresses with it")
    handler = functools.partial(_Handler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "served", f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_remote_shards_give_what_local_ones_do(server, num_workers):
    folder, address = server
    local = write_shards(folder, [7, 9, 5], LENGTHS)
    files = [f"{address}/{number}.jsonl{'.gz' if number % 2 else ''}" for number in range(3)]
    expected = Ranks(local, 1, streaming=True).step_hashes(3)
    ranks = Ranks("json", 1, streaming=True, num_workers=num_workers, data_files=files)
    (source,) = ranks.loaders[0].plan.sources
    assert source.file_sizes() == [path.stat().st_size for path in sorted(folder.iterdir())]
    assert ranks.step_hashes(3) == expected
    ranks.close()


def test_a_dataset_may_be_an_address(server):
    folder, address = server
    write_shards(folder, [3], [4])
    loader = make_loader(f"{address}/0.jsonl", streaming=True, seq_len=4, batch_size=3)
    assert sorted(loader.next_step()[0].input_ids[:, 0].tolist()) == [0, 4, 8]
