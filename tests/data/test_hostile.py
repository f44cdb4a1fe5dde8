"""Folders from elsewhere that bring code: it is not run, whatever it hides in."""

from __future__ import annotations

import json
import os
import pickle

import datasets
import pytest

from flame.data.sources import SourceSpec, open_source
from flame.data.tokenize import load_tokenizer
from flame.errors import UserError

from .corpus import word_tokenizer


class Command:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path):
    """What hostile code would make; that it can is tried at once."""
    pickle.loads(pickle.dumps(Command(tmp_path / "tried")))
    assert (tmp_path / "tried").exists()
    return tmp_path / "ran"


def plant(folder, marker) -> None:
    """Pickles under the names by which some library or other has read them."""
    for name in ("cache.pkl", "tokenizer.pkl", "vocab.bin", "data.pt", "tokenizer.model", "indices.pickle"):
        (folder / name).write_bytes(pickle.dumps(Command(marker)))


def test_a_tokenizers_own_code_is_not_run(tmp_path, marker):
    folder = tmp_path / "tokenizer"
    word_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["code.Hostile", "code.Hostile"]}, "tokenizer_class": "Hostile"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Hostile: pass\n")
    plant(folder, marker)
    try:
        load_tokenizer(str(folder))
    except UserError as error:
        assert "tokenizer_path" in str(error)
    assert not marker.exists()


def test_a_datasets_script_is_not_run(tmp_path, marker):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "corpus.py").write_text(f"open({str(marker)!r}, 'w')\n")
    plant(folder, marker)
    with pytest.raises(UserError):
        open_source(SourceSpec(str(folder)))
    assert not marker.exists()


def test_pickles_beside_rows_are_not_read(tmp_path, marker):
    folder = tmp_path / "corpus"
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(folder)
    plant(folder, marker)
    assert open_source(SourceSpec(str(folder))).read([1]) == ["b"]
    assert not marker.exists()
