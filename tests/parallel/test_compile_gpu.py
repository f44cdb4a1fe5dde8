"""Compiled blocks and float8 on a GPU, with FLA's Triton kernels in bfloat16: the gradients of plain blocks."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from flame.config import ActivationCheckpoint, Float8
from flame.models import build_model, find_blocks, init_weights
from flame.models.backend import REFERENCE_FAMILIES, setup_backend, uninstall
from flame.models.loss import attach_training_forward
from flame.parallel.compile import compile_blocks
from flame.parallel.float8 import convert_to_float8
from flame.parallel.recompute import recompute_blocks
from flame.paths import find_resource
from tests.models.families import FAMILIES, tiny_config

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
# Packed rows of 512 tokens; the first two differ in what automatic dynamic shapes look at.
BOUNDS = ([0, 200, 512], [0, 100, 300, 512], [0, 512], [0, 5, 70, 71, 400, 512])


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    yield
    uninstall()
    torch.compiler.reset()


def debug_config(family: str) -> PretrainedConfig:
    values = json.loads(find_resource(f"configs/debug/{family}.json").read_text())
    return AutoConfig.for_model(**(values | {"vocab_size": 128}))


def make_model(config: PretrainedConfig, float8: Float8 | None = None, attention: str = "varlen") -> nn.Module:
    setup_backend("triton", "cuda", attention, context_len=512)
    built = build_model(config)
    if float8 is not None:
        convert_to_float8(find_blocks(built.model), float8, GPU)
    attach_training_forward(built.model)
    built.model.to_empty(device=GPU)
    init_weights(built.model, built.recipe, 0, built.tied)
    return built.model.to(torch.bfloat16).train()


def gradients(model: nn.Module, bounds: list[int]) -> torch.Tensor:
    """All gradients in one vector, after the loss per token."""
    generator = torch.Generator().manual_seed(len(bounds))
    ids = torch.randint(0, 100, (1, bounds[-1]), generator=generator).to(GPU)
    model.zero_grad()
    loss = model(ids, labels=ids.roll(-1, 1), cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=GPU))
    loss.backward()
    parts = [each.grad.float().flatten() for each in model.parameters() if each.grad is not None]
    return torch.cat([loss.detach().float().view(1) / bounds[-1], *parts])


def compare(expected: torch.Tensor, actual: torch.Tensor, tolerance: float) -> None:
    assert actual.isfinite().all()
    assert actual[0].item() == pytest.approx(expected[0].item(), abs=2e-2)
    assert float((actual[1:] - expected[1:]).norm() / expected[1:].norm()) < tolerance


@pytest.mark.parametrize("family", [*REFERENCE_FAMILIES, "hybrid"])
def test_gradients_stay_and_no_step_compiles_again(family):
    model = make_model(debug_config(family))
    plain = [gradients(model, bounds) for bounds in BOUNDS]
    compile_blocks(find_blocks(model))
    compiled = [gradients(model, bounds) for bounds in BOUNDS[:2]]
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled += [gradients(model, bounds) for bounds in BOUNDS[2:]]
    for expected, actual in zip(plain, compiled, strict=True):
        compare(expected, actual, 5e-2)


def test_flex_attention_compiles_once():
    """Also where blocks keep attention's outputs and compute the rest again."""
    config = debug_config("transformer")
    model = make_model(config)
    plain = [gradients(model, bounds) for bounds in BOUNDS]
    model = make_model(config, attention="flex")
    compile_blocks(find_blocks(model))
    recompute_blocks(find_blocks(model), ActivationCheckpoint(mode="selective", selective_ac_option="op"))
    actual = [gradients(model, bounds) for bounds in BOUNDS[:2]]
    with torch.compiler.set_stance("fail_on_recompile"):
        actual += [gradients(model, bounds) for bounds in BOUNDS[2:]]
    for expected, each in zip(plain, actual, strict=True):
        compare(expected, each, 5e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_fla_can_be_traced(family, monkeypatch):
    """Without code generation, which takes long: what is traced, and what stays outside of graphs."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    try:
        model = make_model(tiny_config(family))
        expected = gradients(model, BOUNDS[0])
    except Exception as error:  # whatever FLA says: then there is nothing to compare with
        pytest.skip(f"does not train without the compiler: {error}")
    compile_blocks(find_blocks(model))
    compare(expected, gradients(model, BOUNDS[0]), 5e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float8_products_are_near_those_in_bfloat16(recipe, compiled):
    expected = gradients(make_model(debug_config("transformer")), BOUNDS[0])
    model = make_model(debug_config("transformer"), Float8(recipe_name=recipe))
    if compiled:
        compile_blocks(find_blocks(model), exact_casts=recipe.startswith("rowwise"))
    actual = gradients(model, BOUNDS[0])
    compare(expected, actual, 0.3)
    assert not torch.equal(actual, expected), "nothing was rounded"
