"""The backward of short convolutions: what FLA's window kernel is given, what is left to the other, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from flame.models import conv_backward
from flame.models.conv_backward import find_kernel, make_causal_conv1d_bwd


def arguments(num_rows: int = 1, width: int = 4, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> dict:
    x = torch.randn(num_rows, 150, 32, device=device).to(dtype)
    weight, bias = torch.randn(32, width, device=device).to(dtype), torch.randn(32, device=device).to(dtype)
    return {"x": x, "dy": torch.randn_like(x), "dht": None, "weight": weight, "bias": bias, "activation": "silu"}


@pytest.fixture
def function(monkeypatch):
    """The function, with a kernel that only says its name."""
    monkeypatch.setattr(conv_backward, "find_kernel", lambda: lambda *args, **options: ("kernel", args, options))
    return make_causal_conv1d_bwd(lambda *args, **options: ("original", args, options))


def test_arguments_arrive(function):
    given = arguments()
    name, (x, dy, dht), options = function(**given, chunk_indices="chunks", layout_fallback=True)
    assert name == "kernel"
    assert x is given["x"]
    assert dy is given["dy"]
    assert dht is None
    assert options["weight"] is given["weight"]
    assert options["bias"] is given["bias"]
    assert options["chunk_indices"] == "chunks"
    assert options["layout_fallback"]


@pytest.mark.parametrize(
    "change",
    [
        {"dht": torch.empty(1, 32, 4)},
        {"initial_state": torch.empty(1, 32, 4)},
        {"weight": None},
        {"weight": torch.empty(32, 5)},
        {"weight": torch.empty(16, 4)},
        {"activation": "gelu"},
        {"chunk_size": 32},
        {"x": torch.empty(1, 32, 150, device="meta").bfloat16().mT},
        {"x": torch.empty(1, 150, 4, 8, device="meta").bfloat16()},
        {"x": torch.empty(1, 150, 32, device="meta").double()},
        {"x": torch.empty(1, 150, 32).bfloat16()},
        {"dy": torch.empty(1, 149, 32, device="meta").bfloat16()},
    ],
)
def test_what_the_kernel_lacks_is_left_to_the_other(function, change):
    name, args, options = function(**{**arguments(), **change})
    assert name == "original"
    for key, value in change.items():
        assert ({"x": args[0], "dy": args[1], "dht": args[2]} | options)[key] is value


def test_packed_documents_are_one_row(function):
    bounds = torch.tensor([0, 7, 150])
    assert function(**arguments(), cu_seqlens=bounds)[0] == "kernel"
    assert function(**arguments(num_rows=2), cu_seqlens=bounds)[0] == "original"


@pytest.mark.parametrize(("capability", "is_there"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_other_gpus_keep_flas_function(monkeypatch, capability, is_there):
    pytest.importorskip("triton")
    assert find_kernel() is not None  # FLA has been imported by now, which asks for the GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (find_kernel() is not None) == is_there
    original = object()
    assert (make_causal_conv1d_bwd(original) is original) != is_there


def test_it_can_be_switched_off(monkeypatch):
    pytest.importorskip("triton")
    assert find_kernel() is not None  # for plans
    monkeypatch.setenv("FLA_CONV_GLUON", "0")
    assert find_kernel() is None


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [2, 4])
def test_on_a_gpu_it_gives_the_gradients(width, activation, packed):
    """Against the reference in float64; 5e-3: results and the recomputed output have 8 bits."""
    from flame.models.reference.convolution import causal_conv1d

    torch.manual_seed(0)
    given = arguments(1 if packed else 2, width, device="cuda") | {"activation": activation}
    bounds = torch.tensor([0, 1, 65, 150], device="cuda", dtype=torch.int32) if packed else None
    leaves = [given[name].double().requires_grad_() for name in ("x", "weight", "bias")]
    y, _ = causal_conv1d(*leaves, activation=activation, cu_seqlens=bounds)
    exact = torch.autograd.grad(y, leaves, given["dy"].double())
    assert find_kernel() is not None
    found = make_causal_conv1d_bwd(None)(**given, cu_seqlens=bounds)
    for mine, right in zip(found[:3], exact, strict=True):
        assert (mine.double() - right).norm() < 5e-3 * right.norm()
