"""flame.models.blocks: the repeated blocks, whatever they are called."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from flame.errors import UserError
from flame.models.blocks import SkippedBlock, find_blocks, independent_blocks, keep_blocks
from tests.models.families import FAMILIES, build_eagerly, tiny_config


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(model)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


class Backbone(nn.Module):
    def __init__(self, attribute: str):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        setattr(self, attribute, nn.ModuleList(Block() for _ in range(2)))
        self.heads = nn.ModuleList(nn.Linear(4, 64) for _ in range(4))


class Wrapper(nn.Module):
    def __init__(self, attribute: str):
        super().__init__()
        self.inner = Backbone(attribute)


@pytest.mark.parametrize("attribute", ["layers", "h", "blocks", "stages"])
def test_wrapped_0(attribute):
    assert names(Backbone(attribute)) == [f"{attribute}.0", f"{attribute}.1"]
    assert names(Wrapper(attribute)) == [f"inner.{attribute}.0", f"inner.{attribute}.1"]


def test_module_dict():
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": Block(), "1": Block()})
    assert names(model) == ["layers.0", "layers.1"]


def test_split_backbone():
    model = nn.Module()
    model.lower = nn.ModuleList([Block(), Block()])
    model.upper = nn.ModuleList([nn.Sequential(nn.Linear(4, 16))])
    assert names(model) == ["lower.0", "lower.1", "upper.0"]


def test_encoder_and_decoder():
    model = nn.Module()
    model.encoder, model.decoder = Backbone("layers"), Backbone("layers")
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_a_small_second_list_stays_with_the_rest():
    model = Backbone("layers")
    model.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    assert names(model) == ["layers.0", "layers.1"]


def test_blocks_that_share_weights_are_no_units():
    model = Backbone("layers")
    model.layers.extend([Block(), Block()])
    blocks = find_blocks(model)
    assert independent_blocks(model, blocks) == blocks
    model.layers[1].mlp.weight = model.layers[3].mlp.weight
    assert [name for name, _ in independent_blocks(model, blocks)] == ["layers.0", "layers.2"]
    model.extra = model.layers[0].mlp
    assert [name for name, _ in independent_blocks(model, blocks)] == ["layers.2"]
    model.layers[2].experts[0] = model.layers[1].experts[0]
    with pytest.raises(UserError, match="every block of Backbone shares weights"):
        independent_blocks(model, find_blocks(model))


def test_no_blocks_is_an_error():
    with pytest.raises(UserError, match="Sequential has no repeated blocks"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("config", "prefix"),
    [
        (LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4), "model.layers"),
        (GPT2Config(n_embd=32, n_layer=3, n_head=4), "transformer.h"),
    ],
)
def test_transformers_models(config, prefix):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert names(model) == [f"{prefix}.{i}" for i in range(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    from flame.models.init import build_recipe

    model, _ = build_recipe(functools.partial(build_eagerly, tiny_config(family)))
    blocks = find_blocks(model)
    assert len(blocks) >= 2
    inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    assert not any(".layers." in name for name in outside)


def blocks_named(model: nn.Module, numbers: range, stand_in=None) -> tuple[list[str], list[str]]:
    """Blocks and parameters of a model that keeps some of its blocks."""
    keep_blocks(model, numbers, stand_in)
    return names(model), [name for name, _ in model.named_parameters()]


def test_kept_blocks_have_the_names_they_had():
    whole = [name for name, _ in Backbone("layers").named_parameters()]
    model = Backbone("layers")
    blocks, parameters = blocks_named(model, range(1, 2))
    assert blocks == ["layers.1"]
    assert parameters == [name for name in whole if not name.startswith("layers.0.")]
    assert list(model.layers) == [model.layers[0]] == list(model.layers[:])


def test_blocks_of_two_lists_are_numbered_on():
    model = nn.Module()
    model.lower, model.upper = (nn.ModuleList([Block(), Block()]) for _ in range(2))
    assert blocks_named(model, range(1, 3))[0] == ["lower.1", "upper.0"]


def test_left_out_blocks_keep_their_places():
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=8)
    model = AutoModelForCausalLM.from_config(config)
    assert blocks_named(model, range(1, 2), lambda _: SkippedBlock())[0] == ["model.layers.1"]
    assert [type(layer) for layer in model.model.layers].count(SkippedBlock) == 2
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
