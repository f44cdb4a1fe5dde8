"""flame.models.flops: FLOPs against PyTorch's own counter, and their growth with the length."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from flame.models.build import build_model
from flame.models.flops import FlopCounter, flops_per_token, linear_flops, num_parameters
from flame.models.init import build_recipe
from flame.models.model_config import load_model_config
from tests.models.families import FAMILIES, build_eagerly, tiny_config

LLAMA = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}


def meta_model(family: str, **overrides):
    return build_recipe(functools.partial(build_eagerly, tiny_config(family, **overrides)))[0]


def shipped(name: str):
    section = SimpleNamespace(config=f"configs/{name}.json", norm_type="", trust_remote_code=False)
    return build_model(load_model_config(section)).model


@pytest.mark.parametrize("tied", [False, True])
def test_llama_against_pytorch_counter(tied):
    config = LlamaConfig(vocab_size=100, num_key_value_heads=2, tie_word_embeddings=tied, **LLAMA)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    seq_len = 48
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, seq_len, dtype=torch.long)).logits.sum().backward()

    flops = FlopCounter(model)
    # The eager attention computes all pairs, not the causal ones only.
    all_pairs = sum(mixer.per_pair for mixer in flops.mixers) * seq_len**2
    expected = 3 * (flops.linear * seq_len + all_pairs)
    # The first block's input needs no gradient below the embedding; rotary tables are matrix products too.
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-3)
    assert flops.uncounted == []


def test_transformer_by_hand():
    model = meta_model("Transformer", vocab_size=128)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embeddings" not in name)
    lengths = torch.tensor([7, 1, 24])
    pairs = 7 * 8 / 2 + 1 + 24 * 25 / 2
    assert FlopCounter(model).training(lengths) == 3 * (2 * weights * 32 + 2 * 4 * 64 * pairs)


def test_tied_output_projection_counts():
    assert linear_flops(meta_model("Transformer", tie_word_embeddings=True)) == linear_flops(meta_model("Transformer"))


@pytest.mark.parametrize("name", ["gla_340M", "gated_deltanet_340M", "delta_net_340M"])
def test_mfu_is_linear_in_length(name):
    model = shipped(name)
    assert flops_per_token(model, 65_536) == flops_per_token(model, 1_024)
    # 6 per matrix weight, plus a few per cent for convolutions and the recurrence.
    assert 1.0 < flops_per_token(model, 65_536) / (6 * num_parameters(model)) < 1.06


def test_document_borders_count():
    flops = FlopCounter(meta_model("Transformer"))
    packed = SimpleNamespace(input_ids=torch.zeros(1, 64), cu_seqlens=torch.tensor([0, 16, 64], dtype=torch.int32))
    rows = SimpleNamespace(input_ids=torch.zeros(2, 32), cu_seqlens=None)
    assert flops.step([packed]) == flops.training(torch.tensor([16, 48]))
    assert flops.step([rows, packed]) == flops.training(torch.tensor([32, 32, 16, 48]))


def test_gated_delta_net_by_hand():
    model = meta_model("GatedDeltaNet", hidden_size=64, num_heads=4, head_dim=16, expand_v=2)
    assert [mixer.per_token for mixer in FlopCounter(model).mixers] == [6 * 4 * 16 * 32] * 2


def test_hybrid_counts_each_layer_by_its_kind():
    model = meta_model("GLA", num_hidden_layers=4, attn={"layers": [1, 3], "num_heads": 4, "window_size": 16})
    mixers = FlopCounter(model).mixers
    assert [mixer.per_pair > 0 for mixer in mixers] == [False, True, False, True]
    assert [mixer.window for mixer in mixers] == [None, 16, None, 16]


def test_routed_experts_count_as_far_as_they_are_used():
    config = MixtralConfig(vocab_size=100, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, **LLAMA)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    dense = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim >= 2 and "experts" not in name and "embed" not in name
    )
    assert linear_flops(model) == 2 * (dense + experts / 4)


def test_num_parameters():
    model = meta_model("Transformer", tie_word_embeddings=True)
    assert num_parameters(model) - num_parameters(model, embeddings=False) == 128 * 64
    assert num_parameters(model) == sum(p.numel() for p in model.parameters())


# No formula: how much it attends to depends on a chunk length that it draws anew at every step.
UNCOUNTED = {"CAT"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_counted(family, caplog):
    flops = FlopCounter(meta_model(family))
    assert flops.linear > 0
    assert bool(flops.uncounted) == (family in UNCOUNTED)
    assert ("only the linear layers" in caplog.text) == (family in UNCOUNTED)
    assert len(flops.mixers) >= flops.model.config.num_hidden_layers or family in UNCOUNTED
