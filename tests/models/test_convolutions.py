"""Short convolutions: what FLA's window kernels are given, what is left to the others, and numbers on a GPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from flame.models import convolutions  # noqa: E402
from flame.models.convolutions import find_kernels, make_causal_conv1d_bwd, make_causal_conv1d_fwd  # noqa: E402


def arguments(num_rows: int = 1, width: int = 4, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> dict:
    x = torch.randn(num_rows, 150, 32, device=device).to(dtype)
    weight, bias = torch.randn(32, width, device=device).to(dtype), torch.randn(32, device=device).to(dtype)
    return {"x": x, "dy": torch.randn_like(x), "dht": None, "weight": weight, "bias": bias, "activation": "silu"}


class Kernels:
    """In the place of FLA's: they say only what they were given."""

    def __init__(self):
        self.launched = []

    def causal_conv1d_fwd_gluon(self, **options):
        return "kernel", options

    @property
    def causal_conv1d_bwd_kernel(self):
        return self

    causal_conv1d_bwd_kernel_dwdb = causal_conv1d_bwd_kernel

    def __getitem__(self, grid):
        return lambda **options: self.launched.append((grid, options))


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    monkeypatch.setattr(convolutions, "find_kernels", lambda: found)
    return found


def forward(given: dict) -> tuple[str, dict]:
    """Who computes it, and what of."""
    given = {"residual": None} | {name: x for name, x in given.items() if name not in ("dy", "dht")}
    return make_causal_conv1d_fwd(lambda **options: ("original", options))(**given)


def test_arguments_arrive(kernels):
    given = arguments() | {"chunk_indices": torch.empty(5, 2), "cu_seqlens": torch.tensor([0, 7, 150])}
    name, options = forward(given | {"residual": given["dy"], "layout_fallback": True})
    assert name == "kernel"
    assert options["residual"] is given["dy"]
    assert options["chunk_indices"] is given["chunk_indices"]
    assert options["layout_fallback"]
    dx, dweight, dbias, dresidual, dinitial = make_causal_conv1d_bwd(None)(**given, residual=given["x"])
    (grid, options), (_, sums) = kernels.launched
    assert grid == (1, 5, 1)
    assert options["x"] is given["x"]
    assert options["chunk_indices"] is given["chunk_indices"]
    assert options["dx"] is dx
    assert (sums["dw"] is dweight, sums["db"] is dbias, sums["NP"]) == (True, True, 5)
    assert dresidual is given["dy"]
    assert dinitial is None


CHANGES = [
    {"initial_state": torch.empty(1, 32, 4)},
    {"weight": torch.empty(32, 5)},
    {"weight": torch.empty(16, 4)},
    {"activation": "gelu"},
    {"chunk_size": 32},
    {"x": torch.empty(1, 32, 150, device="meta").bfloat16().mT},
    {"x": torch.empty(1, 150, 4, 8, device="meta").bfloat16()},
    {"x": torch.empty(1, 150, 32, device="meta").double()},
    {"x": torch.empty(1, 150, 32).bfloat16()},
]


@pytest.mark.parametrize("change", [*CHANGES, {"output_final_state": True}])
def test_what_the_forward_lacks_is_left_to_the_other(kernels, change):
    name, options = forward({**arguments(), **change})
    assert name == "original"
    for key, value in change.items():
        assert options[key] is value


@pytest.mark.parametrize(
    "change",
    [
        *CHANGES,
        {"dht": torch.empty(1, 32, 4)},
        {"weight": None},
        {"dy": torch.empty(1, 149, 32, device="meta").bfloat16()},
    ],
)
def test_what_the_backward_lacks_is_left_to_the_other(kernels, change):
    options = make_causal_conv1d_bwd(lambda **options: options)(**{**arguments(), **change})
    assert not kernels.launched
    for key, value in change.items():
        assert options[key] is value


def test_packed_documents_are_one_row(kernels):
    bounds = {"cu_seqlens": torch.tensor([0, 7, 150])}
    assert forward(arguments() | bounds)[0] == "kernel"
    assert forward(arguments(num_rows=2) | bounds)[0] == "original"
    assert make_causal_conv1d_bwd(lambda **_: "original")(**arguments(num_rows=2) | bounds) == "original"


@pytest.mark.parametrize(("capability", "is_there"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_other_gpus_keep_flas_function(monkeypatch, capability, is_there):
    assert find_kernels() is not None  # FLA has been imported by now, which asks for the GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (find_kernels() is not None) == is_there
    original = object()
    assert (make_causal_conv1d_bwd(original) is original) != is_there
    assert (make_causal_conv1d_fwd(original) is original) != is_there


def test_it_can_be_switched_off(monkeypatch):
    assert find_kernels() is not None  # for plans
    monkeypatch.setenv("FLA_CONV_GLUON", "0")
    assert find_kernels() is None


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [2, 4])
def test_on_a_gpu_they_give_the_reference(width, activation, packed):
    """Against the reference in float64; 5e-3: results and the recomputed output have 8 bits."""
    from flame.models.reference.convolution import causal_conv1d

    torch.manual_seed(0)
    given = arguments(1 if packed else 2, width, device="cuda") | {"activation": activation}
    bounds = torch.tensor([0, 1, 65, 150], device="cuda", dtype=torch.int32) if packed else None
    leaves = [given[name].double().requires_grad_() for name in ("x", "weight", "bias")]
    y, _ = causal_conv1d(*leaves, activation=activation, cu_seqlens=bounds)
    exact = torch.autograd.grad(y, leaves, given["dy"].double())
    assert find_kernels() is not None
    own, _ = forward(given | {"cu_seqlens": bounds})
    assert (own.double() - y).norm() < 5e-3 * y.norm()
    found = make_causal_conv1d_bwd(None)(**given, cu_seqlens=bounds)
    for mine, right in zip(found[:3], exact, strict=True):
        assert (mine.double() - right).norm() < 5e-3 * right.norm()
