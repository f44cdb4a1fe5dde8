"""The kernel of the gated backward step: numbers by Triton's interpreter, what is left to others, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

triton = pytest.importorskip("triton")

from flame.models import chunk_backward_kernels  # noqa: E402
from flame.models.chunk_backward import chunk_bwd_dqkwg  # noqa: E402
from flame.models.chunk_backward_kernels import (  # noqa: E402
    STAGES,
    choose_tiles,
    chunk_gradient_kernel,
    make_chunk_bwd_dqkwg,
    takes,
)

BT = 64


def step(
    bounds: list[int] | None,
    num_rows: int,
    widths: tuple[int, int],
    num_heads: tuple[int, int],
    *,
    state_v_first: bool = False,
    with_w: bool = True,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict:
    """Arguments of one step, as FLA's operators give them; g is made of decays of e^-strength a token and less."""
    torch.manual_seed(0)
    (key_dim, value_dim), (heads, v_heads) = widths, num_heads
    length = bounds[-1] if bounds else 150
    documents = [
        (row * length + a, row * length + b) for row in range(num_rows) for a, b in pairs(bounds or [0, length])
    ]
    chunks = [(n, c) for n, (a, b) in enumerate(documents) for c in range(-(-(b - a) // BT))]

    def draw(heads: int, width: int) -> torch.Tensor:
        return torch.randn(num_rows, length, heads, width)

    g = -strength * torch.rand(num_rows * length, v_heads)
    for n, c in chunks:
        a, b = documents[n]
        rows = slice(a + c * BT, min(a + (c + 1) * BT, b))
        g[rows] = g[rows].cumsum(0)
    states = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    shape = num_rows, len(chunks) // num_rows, v_heads, *states
    tensors = {"q": draw(heads, key_dim), "k": draw(heads, key_dim), "v": draw(v_heads, value_dim)}
    tensors |= {"do": draw(v_heads, value_dim), "h": torch.randn(shape), "dh": torch.randn(shape)}
    if with_w:
        tensors |= {"w": draw(v_heads, key_dim), "dv": draw(v_heads, value_dim)}
    given = {name: x.to(device, dtype) for name, x in tensors.items()}
    given |= {"g": g.view(num_rows, length, v_heads).to(device), "scale": 0.3, "state_v_first": state_v_first}
    if bounds:
        given["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
        given["chunk_indices"] = torch.tensor(chunks, dtype=torch.int32, device=device)
    return given


def pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


def exactly(given: dict) -> dict:
    """The same numbers in float64."""
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in given.items()
    }


def errors(given: dict) -> list[float]:
    """Relative distances of dq, dk, dw and dg from PyTorch's in float64."""
    found = make_chunk_bwd_dqkwg(None)(**given)
    right = chunk_bwd_dqkwg(**exactly(given))
    assert [x is None for x in found] == [x is None for x in right]
    assert found[3].dtype == torch.float32
    both = [(a.double(), b) for a, b in zip(found, right, strict=True) if a is not None]
    assert all(a.shape == b.shape for a, b in both)
    return [float((a - b).norm() / b.norm()) for a, b in both]


CASES = [
    # bounds, rows, (K, V), (heads of keys, of values), options
    ([0, 5, 69, 200], 1, (160, 96), (1, 1), {}),  # two tiles of keys, two of values; chunks of 5, 64, 64, 64 and 3
    ([0, 130], 1, (24, 40), (1, 3), {"state_v_first": True, "with_w": False}),
    (None, 2, (32, 64), (1, 2), {"strength": 20.0}),  # decays far below what float32 holds
]


def check_interpreted() -> None:
    """Run where Triton interprets its kernels."""
    from flame.models import chunk_backward_kernels as module
    from flame.models.backend import import_fla

    import_fla()
    module.takes = lambda *_: True
    for bounds, num_rows, widths, num_heads, options in CASES:
        found = errors(step(bounds, num_rows, widths, num_heads, **options))
        assert max(found) < 5e-6, (bounds, options, found)


def test_interpreted_it_gives_what_pytorch_does():
    code = "from tests.models.test_chunk_backward_kernels import check_interpreted; check_interpreted()"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)


def test_other_types_go_to_pytorch_and_steps_without_gates_to_fla():
    half, whole, on_cpu = (
        torch.empty(1, dtype=dtype, device=device)
        for dtype, device in ((torch.bfloat16, "meta"), (torch.float32, "meta"), (torch.bfloat16, "cpu"))
    )
    assert takes(half, half)
    assert not takes(half, whole)
    assert not takes(half, on_cpu)
    calls = []
    function = make_chunk_bwd_dqkwg(lambda *args, **options: calls.append(options))
    given = step([0, 70], 1, (16, 16), (1, 1))
    for mine, exact in zip(function(**given), chunk_bwd_dqkwg(**given), strict=True):
        assert torch.equal(mine, exact)
    assert not calls
    function(**{**given, "g": None}, g_gamma="decay of each head")
    assert calls[0]["g_gamma"] == "decay of each head"
    assert calls[0]["w"] is given["w"]
    assert "g" not in calls[0]


def test_longer_chunks_go_to_pytorch(monkeypatch):
    monkeypatch.setattr(chunk_backward_kernels, "takes", lambda *_: True)
    given = step([0, 60], 1, (16, 16), (1, 1)) | {"chunk_size": 128}
    for mine, exact in zip(make_chunk_bwd_dqkwg(None)(**given), chunk_bwd_dqkwg(**given), strict=True):
        assert torch.equal(mine, exact)


@pytest.mark.parametrize("with_w", [True, False])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 256), (256, 512), (128, 64)])
def test_it_fits_a_hopper_gpu(hopper, key_dim, value_dim, with_w):
    """Those of FLA's operators that have no w (`chunk_simple_gla`) give states in float32."""
    tile_keys, tile_values, num_warps = choose_tiles(key_dim, value_dim)
    x, floats, ints = (torch.empty(16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32))
    states, w = (x, x) if with_w else (floats, None)
    compiled = chunk_gradient_kernel.run(
        *(x, x, x, x, states, states, w, floats, x, x, w, floats, ints, ints, 0.1, 65_536, 65_536),
        **{"H": 6, "HV": 6, "K": key_dim, "V": value_dim, "BT": BT, "BK": tile_keys, "BV": tile_values},
        **{"STATE_V_FIRST": False, "STAGES": STAGES, "num_warps": num_warps, "grid": (1,), "warmup": True},
    )
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"state_v_first": True}, {"with_w": False}, {"strength": 20.0}])
@pytest.mark.parametrize(
    ("widths", "num_heads"), [((128, 256), (2, 2)), ((256, 512), (1, 1)), ((64, 64), (1, 4)), ((100, 72), (2, 2))]
)
def test_on_a_gpu_it_is_as_near_as_half_precision_allows(widths, num_heads, options):
    """5e-3: results and scores have 8 bits."""
    given = step([0, 700, 701, 1500], 1, widths, num_heads, dtype=torch.bfloat16, device="cuda", **options)
    assert max(errors(given)) < 5e-3
    states = {name: given[name].float() for name in ("h", "dh")}  # as Mamba-2's operator has them
    assert max(errors(given | states)) < 5e-3
