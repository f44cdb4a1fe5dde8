"""Models native to transformers in stages: proved on a small copy, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from custom_models.sba import SBAConfig, SBAForCausalLM
from flame.errors import UserError
from flame.models.backend import setup_backend, uninstall
from flame.models.build import BuiltModel
from flame.models.init import build_recipe, tied_groups
from flame.parallel import stage_trial
from flame.parallel.stage_outline import Outline
from flame.parallel.stage_trial import some_of_each_kind, try_stages
from tests.models.native import tiny_native

# What each does besides calling blocks that take and give hidden states.
FAMILIES = {
    "llama": "nothing but rotary tables",
    "gemma": "scales its embeddings",
    "gemma3_text": "has tables and masks for two kinds of layers",
    "gpt2": "adds learned positions",
    "opt": "adds learned positions, and its last norm stands before its blocks",
    "gpt_neo": "has blocks that return tuples",
    "bamba": "has blocks that return pairs, of two kinds",
    "falcon_h1": "scales its embeddings, and has blocks that return tuples",
    "qwen3_next": "has layers of linear attention",
    "qwen3_moe": "has experts",
}


@pytest.fixture(autouse=True, scope="module")
def reference_backend():
    setup_backend("reference", "cpu")
    yield
    uninstall()


def attempt(model_type: str, dtype: torch.dtype = torch.float32, varlen: bool = True) -> Outline:
    return attempt_model(functools.partial(tiny_native, model_type), dtype, varlen)


def attempt_model(build: Callable[[], nn.Module], dtype: torch.dtype, varlen: bool) -> Outline:
    model, recipe = build_recipe(build)
    built = BuiltModel(model, recipe, tied_groups(model), frozenset())
    return try_stages(built, torch.device("cpu"), dtype, 0, varlen)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_that_run_in_stages(model_type):
    attempt(model_type)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_in_bfloat16(model_type):
    attempt(model_type, torch.bfloat16)


def test_a_custom_model_whose_decoder_takes_token_ids_only():
    config = SBAConfig(hidden_size=32, num_hidden_layers=3, num_heads=2, intermediate_size=48, vocab_size=64)
    attempt_model(lambda: SBAForCausalLM(config), torch.float32, varlen=True)


def test_what_runs_before_the_blocks_is_seen():
    assert attempt("opt").before == {"embed_tokens", "embed_positions"}
    assert attempt("bloom", varlen=False).before == {"word_embeddings", "word_embeddings_layernorm"}


@pytest.mark.parametrize(
    ("model_type", "varlen", "message"),
    [
        ("zamba2", True, "computes something else in stages than whole"),  # every block is given the embeddings
        ("mpt", True, "mixes packed documents"),
        ("bert", False, "is not causal"),
    ],
)
def test_others_are_refused(model_type, varlen, message):
    with pytest.raises(UserError, match=message):
        attempt(model_type, varlen=varlen)


def test_states_that_do_not_arrive_are_seen(monkeypatch):
    """Were a stage given something else than what the one before has handed on, the trial must fail."""

    def lose(part: nn.Module, x: Tensor, *args, **kwargs) -> Tensor:
        return stage_states(part, x if x.dtype == torch.int64 else x.roll(1, 1), *args, **kwargs)

    stage_states = stage_trial.stage_states
    monkeypatch.setattr(stage_trial, "stage_states", lose)
    with pytest.raises(UserError, match="computes something else"):
        attempt("llama")


def test_every_kind_of_block_is_tried():
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
    assert some_of_each_kind(tiny_native("qwen3_next", num_hidden_layers=5, layer_types=layers)) == [0, 1, 3]
