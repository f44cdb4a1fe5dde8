import gzip
import json

import datasets
import pytest

from flame.data.columns import UnreadableRow
from flame.data.loading import load_rows
from flame.data.shards import ShardedSource, ShardReader
from flame.data.sources import DatasetSource, SourceSpec, TextSource, open_source
from flame.errors import UserError


def write_rows(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def open_stream(dataset, text_column: str = "", **options) -> ShardedSource:
    return open_source(SourceSpec(str(dataset), **options), text_column, streaming=True)


def read_all(source: ShardedSource, shard: int = 0, num_skipped: int = 0, window_rows: int = 2) -> list:
    reader = ShardReader(source, shard, num_skipped, window_rows)
    return [window[row] for window in reader for row in range(len(window))]


def test_each_file_is_a_shard(tmp_path):
    for number in range(3):
        write_rows(tmp_path / f"{number}.jsonl", [{"text": f"{number} {row}"} for row in range(3)])
    source = open_stream(tmp_path / "*.jsonl")
    assert (source.num_shards, source.column, source.is_tokenized) == (3, "text", False)
    assert read_all(source, 2) == ["2 0", "2 1", "2 2"]
    assert read_all(source, 1, num_skipped=2) == ["1 2"]
    assert len(source.first_values) == 3


@pytest.mark.parametrize("num_skipped, expected", [(4, []), (2, ["c"])])
def test_rows_passed_over_are_counted_also_behind_the_end(tmp_path, num_skipped, expected):
    source = open_stream(write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in "abc"]))
    reader = ShardReader(source, 0, num_skipped, window_rows=2)
    assert [window[row] for window in reader for row in range(len(window))] == expected
    assert reader.num_rows == 3


@pytest.mark.parametrize("suffix", ["parquet", "csv", "txt", "jsonl.gz", "arrow"])
def test_formats(tmp_path, suffix):
    rows = datasets.Dataset.from_dict({"text": ["a b", "c", "d"]})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        rows.to_parquet(path)
    elif suffix == "arrow":
        rows.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    elif suffix == "jsonl.gz":
        path.write_bytes(gzip.compress(b'{"text": "a b"}\n{"text": "c"}\n{"text": "d"}\n'))
    else:
        path.write_text(("text\n" if suffix == "csv" else "") + "a b\nc\nd\n")
    assert read_all(open_stream(path)) == ["a b", "c", "d"]


def test_tokenised_rows_and_other_columns(tmp_path):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"body": ["a", "b"], "input_ids": [[1, 2], None]}).to_parquet(path)
    source = open_stream(path)
    one, other = read_all(source)
    assert source.is_tokenized and one.tolist() == [1, 2] and other is None
    assert read_all(open_stream(path, text_column="body")) == ["a", "b"]
    with pytest.raises(UserError, match=r"no such column.*body, input_ids"):
        open_stream(path, text_column="txt")


def test_missing_values_come_as_none(tmp_path):
    rows = [{"text": None}] * 3 + [{"text": "a"}, {"text": None}]
    assert read_all(open_stream(write_rows(tmp_path / "rows.jsonl", rows))) == [None, None, None, "a", None]


def test_saved_folders_and_the_standard_library_are_read_in_place(tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    assert isinstance(open_stream(tmp_path / "saved"), DatasetSource)
    assert isinstance(open_stream("builtin:stdlib"), TextSource)


@pytest.mark.parametrize("content, message", [("", "it is empty"), ("\n", "no rows|JSON"), ('{"te\n', "JSON")])
def test_files_without_rows_are_refused(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        open_stream(tmp_path / "rows.jsonl")


def test_a_split_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="dev"):
        open_stream(write_rows(tmp_path / "rows.jsonl", [{"text": "a"}]), split="dev")


def test_a_broken_compressed_shard_ends_with_a_row_that_says_so(tmp_path):
    content = gzip.compress("".join(json.dumps({"text": f"{row} {row**9}"}) + "\n" for row in range(2000)).encode())
    (tmp_path / "0.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "1.jsonl.gz").write_bytes(content[: len(content) // 2])
    values = read_all(open_stream(tmp_path / "*.gz"), shard=1, window_rows=100)
    assert isinstance(values[-1], UnreadableRow) and "EOFError" in values[-1].reason


class FlakyDataset:
    """A dataset of one shard whose tables break off the first ``num_faults`` times, after two of them."""

    num_shards = 1

    def __init__(self, dataset, num_faults: int, error: Exception):
        self.dataset, self.num_faults, self.error = dataset, num_faults, error

    def shard(self, num_shards, index):
        return self

    def iter(self, batch_size):
        for number, table in enumerate(self.dataset.iter(batch_size=batch_size)):
            if number == 2 and self.num_faults:
                self.num_faults -= 1
                raise self.error
            yield table


@pytest.fixture
def flaky(tmp_path, monkeypatch):
    monkeypatch.setattr("flame.data.loading.FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": str(row)} for row in range(9)])

    def make(num_faults: int, error: Exception) -> ShardedSource:
        source = ShardedSource("rows", load_rows(SourceSpec(path), streaming=True).dataset)
        source.dataset = FlakyDataset(source.dataset, num_faults, error)
        return source

    return make


def test_a_network_fault_makes_the_shard_be_read_again_without_loss_or_doubles(flaky):
    assert read_all(flaky(2, ConnectionError("down"))) == [str(row) for row in range(9)]


def test_a_lasting_network_fault_is_an_error_and_not_a_bad_row(flaky):
    with pytest.raises(UserError, match="rows: shard 0 cannot be read: down"):
        read_all(flaky(100, ConnectionError("down")))


def test_damage_is_not_read_again(flaky):
    values = read_all(flaky(1, ValueError("bad bytes")))
    assert values[:4] == ["0", "1", "2", "3"] and values[4].reason == "it cannot be read (ValueError: bad bytes)"
    assert len(values) == 5
