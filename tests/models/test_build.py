"""flame.models.build: what comes with a built model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig

from flame.errors import UserError
from flame.models.backend import setup_backend
from flame.models.build import build_model, check_positions, no_decay_names
from tests.models.families import FAMILIES, build_eagerly, tiny_config


@pytest.fixture(autouse=True)
def backend():
    setup_backend("reference", "cpu")


def test_on_meta_in_float32():
    config = tiny_config("GatedDeltaNet")
    config.dtype = torch.bfloat16  # what a hub config may say; masters are float32 all the same
    built = build_model(config)
    assert {p.dtype for p in built.model.parameters()} == {torch.float32}
    assert all(p.is_meta for p in built.model.parameters())
    assert built.tied == []


def test_tied_names():
    assert build_model(tiny_config("GLA", tie_word_embeddings=True)).tied == [
        ["model.embeddings.weight", "lm_head.weight"]
    ]


def test_large_models_need_no_memory():
    config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, vocab_size=128256)
    built = build_model(config)
    assert sum(p.numel() for p in built.model.parameters()) > 5e9


def test_no_decay():
    names = build_model(tiny_config("GatedDeltaNet")).no_decay
    assert {name.rpartition(".layers.0.")[2] for name in names if ".layers.0." in name} == {
        "attn_norm.weight",
        "mlp_norm.weight",
        "attn.A_log",
        "attn.dt_bias",
        "attn.o_norm.weight",
    }
    assert "model.norm.weight" in names
    assert "model.embeddings.weight" not in names


@pytest.mark.parametrize("family", FAMILIES)
def test_no_decay_holds_what_the_family_marks(family):
    eager = build_eagerly(tiny_config(family))
    names = no_decay_names(eager)
    for name, parameter in eager.named_parameters():
        if getattr(parameter, "_no_weight_decay", False) or parameter.ndim < 2:
            assert name in names
    assert build_model(eager.config).no_decay == names
    assert len(names) < len(list(eager.parameters()))


class Marks(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(1, 1, 8))
        self.decay = nn.Parameter(torch.zeros(8, 8))
        self.decay._no_weight_decay = True
        self.A_log = nn.Parameter(torch.zeros(8, 8))
        self.gate = nn.Linear(8, 1)
        self.norm = nn.LayerNorm((4, 8))


def test_no_decay_by_shape_mark_and_name():
    assert no_decay_names(Marks()) == {"mix", "decay", "A_log", "gate.bias", "norm.weight", "norm.bias"}


def test_refused_values_are_the_users():
    config = tiny_config("GatedDeltaNet")
    config.expand_v = 0.7
    with pytest.raises(UserError, match="no gated_deltanet model can be built"):
        build_model(config)


@pytest.mark.parametrize(
    ("family", "values", "reason"),
    [
        ("GLA", {"feature_map": "elu"}, r"KeyError: 'elu', in .*ACT2FN\[feature_map\]"),
        ("RetNet", {"hidden_act": "sqrelu"}, r"KeyError: 'sqrelu', in .*gate_fn"),
        ("Samba", {"rescale_prenorm_residual": True}, r"AttributeError: 'SambaConfig'.*'num_layers', in .*num_layers"),
        ("DeltaNet", {"qk_norm": None}, r"AssertionError, in assert self\.qk_norm in"),
    ],
)
def test_a_refusal_without_words_shows_the_line_that_refused(family, values, reason):
    with pytest.raises(UserError, match=reason):
        build_model(tiny_config(family, **values))


def test_documents_longer_than_learned_positions_are_refused():
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    model = build_model(config).model
    check_positions(model, 16, "training.seq_len")
    with pytest.raises(UserError, match=r"training\.seq_len = 17.*wpe.*end at 16"):
        check_positions(model, 17, "training.seq_len")
