"""Compiled blocks: the same gradients and names, graphs that serve any number of documents, kernels outside of them."""

from __future__ import annotations

import functools
import importlib
import json

import pytest
import torch
from transformers import AutoConfig

from flame.models import build_model, find_blocks, init_weights
from flame.models.backend import find_operator, setup_backend, uninstall, wrap_operator
from flame.models.compiled import prepare_operators_for_compile
from flame.models.loss import attach_training_forward
from flame.parallel.compile import compile_blocks
from flame.paths import find_resource

BOUNDS = ([0, 20, 48], [0, 10, 30, 48], [0, 48], [0, 1, 2, 3, 40, 48])


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    # Inductor takes seconds for each graph; tests/runs/test_compiled_runs.py has whole runs with it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    yield
    uninstall()
    torch.compiler.reset()


def make_model(family: str) -> torch.nn.Module:
    setup_backend("reference", "cpu")
    values = json.loads(find_resource(f"configs/debug/{family}.json").read_text())
    built = build_model(AutoConfig.for_model(**(values | {"vocab_size": 64})))
    attach_training_forward(built.model)
    built.model.to_empty(device="cpu")
    init_weights(built.model, built.recipe, 0, built.tied)
    return built.model.train()


def gradients(model: torch.nn.Module, bounds: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (1, bounds[-1]), generator=torch.Generator().manual_seed(len(bounds)))
    model.zero_grad()
    model(ids, labels=ids.roll(-1, 1), cu_seqlens=torch.tensor(bounds, dtype=torch.int32)).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", ["transformer", "gated_deltanet", "hgrn2", "samba"])
def test_gradients_and_names_stay_and_no_step_compiles_again(family):
    model = make_model(family)
    names = list(model.state_dict())
    plain = [gradients(model, bounds) for bounds in BOUNDS]
    compile_blocks(find_blocks(model))
    assert list(model.state_dict()) == names
    compiled = [gradients(model, BOUNDS[0])]
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled += [gradients(model, bounds) for bounds in BOUNDS[1:]]
    for expected, actual in zip(plain, compiled, strict=True):
        assert expected.keys() == actual.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(actual[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


def test_without_care_every_number_of_documents_would_compile_again():
    model = make_model("gated_deltanet")
    for _, block in find_blocks(model):
        block.forward = torch.compile(block.forward, backend="eager")
    gradients(model, BOUNDS[0])
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        gradients(model, BOUNDS[1])


def test_kernels_of_norms_are_plain_pytorch_in_graphs_and_kernels_outside():
    setup_backend("reference", "cpu")
    calls = []

    def kernel(original):
        def rms_norm(*args, **options):
            calls.append(torch.compiler.is_compiling())
            return original(*args, **options)

        return rms_norm

    wrap_operator("fla.modules.norm.layernorm", "rms_norm", kernel)
    prepare_operators_for_compile()
    prepare_operators_for_compile()  # as for a second stage of a pipeline
    norm = importlib.import_module("fla.modules").RMSNorm(8)
    x = torch.randn(3, 8)
    outside = norm(x)
    assert calls == [False]
    torch.testing.assert_close(torch.compile(norm, fullgraph=True)(x), outside)
    assert calls == [False]


def test_operators_over_documents_stay_outside_wherever_layers_have_them():
    setup_backend("reference", "cpu")
    prepare_operators_for_compile()
    for module, name in (
        ("fla.layers.gla", "chunk_gla"),
        ("fla.layers.attn", "flash_attn_varlen_func"),
        ("fla.layers.mamba", "selective_scan"),
        ("fla.layers.mamba2", "causal_conv1d"),
        ("fla.layers.mamba2", "ssd"),
        ("fla.modules.causal_conv1d.ops", "causal_conv1d"),
        ("fla.models.rwkv7.modeling_rwkv7", "token_shift"),
    ):
        assert hasattr(find_operator(module, name), "outside_of_graphs"), (module, name)
