"""flame.models.mixers: formulas against counts by hand, and mixers that declare themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flame.errors import UserError
from flame.models.backend import setup_backend
from flame.models.build import build_model
from flame.models.flops import FlopCounter
from flame.models.mixers import MixerFlops, find_mixers, mixer_flops
from flame.models.model_config import load_model_config
from tests.models.test_flops import meta_model

# Forward FLOPs per token of one mixer, numbers kept per sequence and per token, from the sizes in the config file.
SHIPPED = {
    # 8 heads of 128 x 128 (d_k = d_v = 1024 / 8), k.S, k(x)u, q.S
    "delta_net_340M": (6 * 8 * 128 * 128, 8 * 128 * 128, 0),
    "gated_deltanet_340M": (6 * 6 * 128 * 256, 6 * 128 * 256, 0),
    "kda_340M": (6 * 8 * 128 * 128, 8 * 128 * 128, 0),
    # 4 heads of 128 x 256, k(x)v and q.S
    "gla_340M": (4 * 4 * 128 * 256, 4 * 128 * 256, 0),
    "retnet_340M": (4 * 4 * 256 * 512, 4 * 256 * 512, 0),
    "hgrn2_340M": (4 * 8 * 128 * 128, 8 * 128 * 128, 0),
    # 4 heads, 64 slots, d_k = d_v = 256
    "gsa_340M": (4 * 4 * 64 * 512, 4 * 64 * 512, 0),
    # d_inner = 2 x 1024, N = 16 and 128
    "mamba_340M": (4 * 2048 * 16, 2048 * 16, 0),
    "mamba2_340M": (4 * 2048 * 128, 2048 * 128, 0),
    # 16 heads of 64 x 64; beside the state the shifted token of two layers
    "rwkv7_400M": (8 * 16 * 64 * 64, 16 * 64 * 64 + 2 * 1024, 0),
    "transformer_340M": (0, 0, 2 * 1024),
}


def build(name: str) -> nn.Module:
    setup_backend("reference", "cpu")
    section = SimpleNamespace(config=f"configs/{name}.json", norm_type="", trust_remote_code=False)
    return build_model(load_model_config(section)).model


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_by_hand(name):
    mixers = find_mixers(build(name))
    per_token, state, cache = SHIPPED[name]
    assert {(mixer.per_token, mixer.state, mixer.cache) for mixer in mixers} == {(per_token, state, cache)}
    assert all(mixer.formula and mixer.source for mixer in mixers)


def test_samba_by_hand():
    mixers = find_mixers(build("samba_1B"))
    scan, attention = mixers[0], mixers[1]
    assert (scan.per_token, scan.per_pair) == (4 * 4096 * 16, 0)
    assert (attention.per_token, attention.per_pair, attention.window) == (0, 4 * 2048, 2048)
    assert attention.kept(65_536) == 2048 * 2 * 2048
    # The hundredth query sees 100 keys, each later one at most 2,048.
    assert attention.forward(torch.tensor([100])) == 4 * 2048 * 5050


def test_block_sparse_attention_by_hand():
    model = meta_model("MoBA", moba_chunk_size=8, moba_topk=2)
    mixer = FlopCounter(model).mixers[0]
    # 20 tokens in blocks of 8: pairs in the own block, 8 more from one earlier block, a mean key for each earlier one.
    own, extra, means = 36 + 36 + 10, 8 * (8 + 4), 8 + 2 * 4
    assert mixer.forward(torch.tensor([20])) == 4 * 64 * (own + extra) + 2 * 64 * means


def test_log_linear_attention_by_hand():
    mixer = FlopCounter(meta_model("LogLinearMamba2")).mixers[0]
    # Tokens 0 to 3: a write and a read of its own state each, and 0 + 1 + 1 + 2 earlier states.
    assert mixer.forward(torch.tensor([4])) == 2 * (128 * 16) * (4 * 2 + 4)


def test_mixture_of_memories_counts_projections_as_often_as_they_are_used():
    model = meta_model("Mom")
    flops = FlopCounter(model)
    layer = model.model.layers[0].attn
    memory = 3 * 2 * 4 * 16 * layer.head_v_dim
    visits = layer.topk + layer.shared_mem
    passed = (layer.topk - layer.num_memories) * sum(
        each[0].weight.numel() for each in (layer.k_proj, layer.v_proj, layer.b_proj, layer.a_proj)
    )
    passed += (visits - 1) * layer.q_proj.weight.numel()
    assert flops.mixers[0].per_token == visits * memory + 2 * passed


class Declares(nn.Module):
    """A mixer of somebody's own, with a linear layer whose FLOPs are counted anyway."""

    def __init__(self, declared):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.inner = nn.ModuleList()
        self.declared = declared

    def mixer_flops(self):
        return self.declared


@pytest.mark.parametrize("declared", [MixerFlops(per_pair=8, window=3), {"per_pair": 8, "window": 3}])
def test_a_module_declares_its_own(declared):
    mixer = mixer_flops(Declares(declared))
    assert (mixer.per_token, mixer.per_pair, mixer.window) == (0, 8, 3)
    assert mixer.source == "Declares.mixer_flops"


def test_what_lies_inside_a_mixer_belongs_to_it():
    outer = Declares({"per_token": 1})
    outer.inner.append(Declares({"per_token": 5}))
    assert [mixer.per_token for mixer in find_mixers(nn.Sequential(outer))] == [1]


@pytest.mark.parametrize("declared", [7, {"per_tokens": 1}])
def test_a_wrong_declaration_is_refused(declared):
    with pytest.raises(UserError, match=r"Declares\.mixer_flops"):
        mixer_flops(Declares(declared))
