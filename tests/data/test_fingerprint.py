import datasets
import numpy as np

from flame.data.fingerprint import source_fingerprint
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
