"""What is read from a config file is what the config's class says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from flame.model_file import SOFTMAX_FAMILIES, may_attend, read_model_file, says_heads
from flame.paths import PACKAGE_ROOT

CONFIGS = sorted(PACKAGE_ROOT.parent.glob("configs/*.json"))
PACKED = {"num_rows": 1, "num_tokens": 4096, "document_len": 512}


def layers_of_class(path):
    from flame.models.attention_choice import attention_layers
    from flame.models.model_config import load_model_config

    return attention_layers(
        load_model_config(SimpleNamespace(config=str(path), norm_type="", trust_remote_code=False)), **PACKED
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_files_say_what_their_classes_say(path):
    from flame.models.attention_choice import attention_layers

    values, expected = read_model_file(str(path)), layers_of_class(path)
    assert may_attend(str(path)) >= bool(expected)
    if says_heads(values):
        assert attention_layers(values, **PACKED) == expected


@pytest.mark.parametrize("family", SOFTMAX_FAMILIES)
@pytest.mark.parametrize("given", [{}, {"num_kv_heads": 2}, {"window_size": 16}], ids=str)
def test_what_a_file_may_lack_is_none_in_the_class(family, given, tmp_path):
    from flame.models.attention_choice import attention_layers

    values = {"model_type": family, "hidden_size": 64, "num_heads": 4, "num_hidden_layers": 3} | given
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    assert says_heads(values)
    assert attention_layers(values, **PACKED) == layers_of_class(path)
    for name in ("hidden_size", "num_heads", "num_hidden_layers"):
        assert not says_heads({key: value for key, value in values.items() if key != name})


def test_damaged_files_say_nothing(tmp_path):
    path = tmp_path / "model.json"
    for text in ("{", "[1]", "[" * 100_000):
        path.write_text(text)
        assert read_model_file(str(path)) is None
        assert not may_attend(str(path))
    assert not may_attend("a" * 300 + ".json")


def test_a_model_on_the_hub_may_have_attention():
    assert may_attend("someone/some-model")
