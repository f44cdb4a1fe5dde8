import datasets
import numpy as np
import pytest

from flame.data.fingerprint import relative_names, source_fingerprint
from flame.data.sources import DatasetSource, TextSource


def test_fingerprint_knows_the_content_not_the_place(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": ["a", "b"]})
    dataset.save_to_disk(tmp_path / "saved")
    moved = DatasetSource("rows", datasets.load_from_disk(str(tmp_path / "saved")))
    assert source_fingerprint(DatasetSource("rows", dataset)) == source_fingerprint(moved)
    assert source_fingerprint(TextSource("rows", ["a", "b"])) == source_fingerprint(moved)
    assert source_fingerprint(TextSource("rows", ["a", "c"])) != source_fingerprint(moved)
    tokens = datasets.Dataset.from_dict({"input_ids": [np.arange(3), np.arange(2)]})
    assert source_fingerprint(DatasetSource("rows", tokens))["column"] == "input_ids"


def test_fingerprint_of_rows_that_are_bad():
    assert source_fingerprint(TextSource("rows", ["a", None])) != source_fingerprint(TextSource("rows", ["a", ""]))


@pytest.mark.parametrize(
    "files, names",
    [
        (["/data/a/0.jsonl", "/data/b/0.jsonl"], ["a/0.jsonl", "b/0.jsonl"]),
        (["hf://datasets/a/b@77f/0.parquet", "hf://datasets/a/b@77f/1.parquet"], ["0.parquet", "1.parquet"]),
        (["/data/0.jsonl"], ["0.jsonl"]),
        (["/data/0.jsonl", "https://host/0.jsonl"], ["/data/0.jsonl", "https://host/0.jsonl"]),
        ([], []),
    ],
)
def test_names_do_not_tell_where_the_files_lie(files, names):
    assert relative_names(files) == names
