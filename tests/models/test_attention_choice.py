"""The softmax layers of a model's config, and choices that are remembered."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from flame.models import attention_choice
from flame.models.attention_choice import FILE, attention_layers, choose_attention
from flame.models.attention_speed import AttentionShape, Timing
from flame.models.backend import import_fla
from flame.models.model_config import load_model_config

SHAPE = AttentionShape(4, 2, 16, 1, 300, 64)
CPU = torch.device("cpu")
PACKED = {"num_rows": 1, "num_tokens": 8192, "document_len": 1024}


def layers_of(config, **changes):
    """(heads, heads of keys, head size, window) -> layers."""
    shapes = attention_layers(config, **(PACKED | changes))
    keys = {(s.num_heads, s.num_kv_heads, s.head_dim, s.window): number for s, number in shapes.items()}
    assert all((s.num_tokens, s.document_len) == (8192, (PACKED | changes)["document_len"]) for s in shapes)
    return keys


def shipped(name):
    import_fla()
    return load_model_config(SimpleNamespace(config=f"configs/{name}.json", norm_type="", trust_remote_code=False))


def test_layers_of_fla_models():
    assert layers_of(shipped("transformer_340M")) == {(16, 16, 64, None): 24}
    assert layers_of(shipped("gla_340M")) == {}
    hybrid, samba = shipped("hybrid_340M"), shipped("samba_1B")
    for config in (hybrid, samba):
        attn = config.attn
        head_dim = config.hidden_size // attn["num_heads"]
        kv_heads = attn.get("num_kv_heads") or attn["num_heads"]
        expected = {(attn["num_heads"], kv_heads, head_dim, attn.get("window_size")): len(attn["layers"])}
        assert layers_of(config) == expected
    assert samba.attn["window_size"]  # or the case tests nothing
    grouped = AutoConfig.for_model("transformer", hidden_size=64, num_heads=4, num_kv_heads=1, window_size=9)
    assert layers_of(grouped, num_shares=2) == {(2, 1, 16, 9): grouped.num_hidden_layers}


def test_layers_of_transformers_models():
    llama = LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert layers_of(llama) == {(4, 2, 16, None): 3}
    assert layers_of(llama, document_len=None) == {}  # rows that are not packed go to transformers' own attention
    gemma = AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1, head_dim=32, sliding_window=16
    )
    windows = {"full_attention": None, "sliding_attention": 16}
    assert layers_of(gemma) == Counter((4, 1, 32, windows[kind]) for kind in gemma.layer_types)
    assert len(layers_of(gemma)) == 2
    mistral = AutoConfig.for_model("mistral", num_hidden_layers=2, num_attention_heads=32, sliding_window=128)
    assert {key[3] for key in layers_of(mistral)} == {128}
    assert layers_of(AutoConfig.for_model("mamba")) == {}


@pytest.fixture
def measured(monkeypatch):
    """Shapes that were measured."""
    calls = []

    def measure(shape, backends, device, dtype):
        calls.append((shape, backends))
        return {"a": Timing(1.0, 2.0), "b": Timing(0.5, 1.0), "c": "broken"}

    monkeypatch.setattr(attention_choice, "measure_all", measure)
    return calls


def choose(folder, layers=None, backends=("b", "c"), dtype=torch.bfloat16):
    return choose_attention(layers or {SHAPE: 2}, list(backends), "a", CPU, dtype, folder)


def test_a_choice_is_measured_once(measured, tmp_path):
    folder = tmp_path / "new" / "cache"
    first, second = choose(folder), choose(folder)
    assert (first[0].backend, first[1], second[1]) == ("b", False, True)
    assert first[0] == second[0]
    assert measured == [(SHAPE, ["a", "b", "c"])]
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_another_job_or_machine_is_measured_again(measured, tmp_path, monkeypatch):
    choose(tmp_path)
    choose(tmp_path, {AttentionShape(4, 2, 16, 1, 300, 64, window=3): 2})
    choose(tmp_path, dtype=torch.float16)
    choose(tmp_path, backends=("b", "c", "d"))
    monkeypatch.setattr(attention_choice, "installed_version", lambda package: "another")
    choose(tmp_path)
    assert len(measured) == 5
    assert len(json.loads((tmp_path / FILE).read_text())) == 5


def test_what_could_not_be_measured_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_choice, "measure_all", lambda *_, **__: {"a": "out of memory", "b": Timing(1.0, 2.0)})
    choice, _ = choose(tmp_path, backends=("b",))
    assert (choice.backend, choice.left_out, [*tmp_path.iterdir()]) == ("a", {"a": "out of memory"}, [])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"key": 3}', '{"key": {"backend": "b"}}'])
def test_a_damaged_file_costs_measuring_again(measured, tmp_path, content):
    (tmp_path / FILE).write_text(content)
    assert [choose(tmp_path)[1], choose(tmp_path)[1]] == [False, True]


def test_a_folder_that_cannot_be_written_to_costs_measuring_again(measured, tmp_path):
    (tmp_path / "file").touch()
    assert choose(tmp_path / "file" / "cache")[0].backend == "b"


def test_hybrids_with_layers_of_several_kinds():
    kinds = [{"layers": [0, 2], "num_heads": 4, "num_kv_heads": 2}, {"layers": [1], "num_heads": 2, "window_size": 16}]
    config = AutoConfig.for_model("gla", hidden_size=64, num_hidden_layers=4, attn=kinds)
    assert layers_of(config) == {(4, 2, 16, None): 2, (2, 2, 32, 16): 1}


def test_models_with_softmax_attention_of_other_shapes_besides():
    attention = {"layers": [1], "num_heads": 4}
    assert layers_of(AutoConfig.for_model("gla", attn=dict(attention), hidden_size=64))
    assert not layers_of(AutoConfig.for_model("rodimus", attn=dict(attention), hidden_size=64))
