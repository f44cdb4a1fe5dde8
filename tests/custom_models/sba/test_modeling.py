"""The stick-breaking transformer as a model: decoding, padding, documents, what flame finds in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from custom_models.sba import SBAConfig, SBAForCausalLM
from flame.models.build import build_model
from flame.models.flops import FlopCounter
from flame.models.init import init_weights
from flame.models.model_config import load_model_config

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def model() -> SBAForCausalLM:
    torch.manual_seed(0)
    return SBAForCausalLM(SBAConfig(**SMALL)).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(1))


def test_decoding_token_by_token_agrees_with_the_whole_row(model):
    row = tokens(2, 12)
    whole = model(row).logits
    outputs = model(row[:, :5], use_cache=True)
    cache = outputs.to_tuple()[-1]  # whose name depends on the release of transformers
    steps = [outputs.logits]
    for position in range(5, 12):
        steps.append(model(row[:, position : position + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_greedy_generation_is_the_same_with_and_without_a_cache(model):
    prompt = tokens(2, 6)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_cache = model.generate(prompt, use_cache=True, **options)
    without = model.generate(prompt, use_cache=False, **options)
    assert with_cache.shape == (2, 16)
    assert torch.equal(with_cache, without)


def test_padding_on_the_left_changes_nothing(model):
    prompt = tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    logits = model(padded, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(logits, model(prompt).logits, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    continued = model.generate(padded, attention_mask=mask, **options)[:, 3:]
    assert torch.equal(continued, model.generate(prompt, **options))


def test_documents_in_a_row_are_as_each_alone(model):
    row = tokens(1, 20)
    cu_seqlens = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    packed = model(row, cu_seqlens=cu_seqlens).logits
    alone = [model(row[:, start:end]).logits for start, end in ((0, 7), (7, 8), (8, 20))]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_remainder", [True, False])
def test_the_remainder_is_what_the_first_token_gets(use_remainder):
    attention = SBAForCausalLM(SBAConfig(**SMALL, use_remainder=use_remainder)).model.layers[0].attn
    x = torch.randn(1, 3, 32)
    first = attention(x, None, None, None)[:, 0]
    expected = attention.o_proj(attention.v_proj(x[:, 0])) if use_remainder else torch.zeros_like(first)
    torch.testing.assert_close(first, expected)


def test_loss_is_the_mean_over_the_next_tokens(model):
    row = tokens(1, 9)
    outputs = model(row, labels=row)
    expected = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], row[0, 1:])
    torch.testing.assert_close(outputs.loss, expected)
    assert model(row, logits_to_keep=1).logits.shape == (1, 1, 64)


def test_saved_and_reloaded_weights_give_the_same_logits(model, tmp_path):
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(reloaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="not a multiple of num_heads"):
        SBAConfig(hidden_size=30, num_heads=4)


def test_what_flame_finds(caplog):
    section = SimpleNamespace(config="configs/debug/sba.json", norm_type="", trust_remote_code=False)
    built = build_model(load_model_config(section))
    counter = FlopCounter(built.model)
    assert counter.uncounted == []
    assert {mixer.per_pair for mixer in counter.mixers} == {4 * 128}
    assert len(counter.mixers) == 4
    assert len(built.no_decay) == 9
    assert built.tied == [["model.embed_tokens.weight", "lm_head.weight"]]
    built.model.to_empty(device="cpu")
    init_weights(built.model, built.recipe, seed=1, tied=built.tied)
    assert built.model.model.layers[3].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(built.model.model.norm.weight, torch.ones(128))
    assert "initial weights:" not in caplog.text
