"""Gated linear attention's own kernels: numbers by Triton's interpreter, what is left to FLA, and FLA's on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

from flame.host_copy import send_and_remember  # noqa: E402
from flame.models.chunk_bounds import longest_first  # noqa: E402
from flame.models.chunk_gla import (  # noqa: E402
    GRADIENT_STAGES,
    NUM_WARPS,
    OUTPUT_STAGES,
    PREPARE_REGISTERS,
    STATE_STAGES,
    TILE,
    make_chunk_gla,
    takes,
)
from flame.models.chunk_gla_kernels import gla_gradient_kernel, gla_prepare_kernel, gla_state_kernel  # noqa: E402
from flame.models.chunks import BT  # noqa: E402

# Against the recurrence in float64: short and long documents, lengths that chunks do not divide, several rows, initial
# and final states, and gates so strong that a chunk is computed pair by pair.
INTERPRETED = """
import torch
import torch.nn.functional as F
from flame.models import chunk_gla as module
from flame.models.backend import import_fla
from flame.models.reference.gla import chunk_gla as reference

import_fla()
module.takes = lambda *_: True
ours = module.make_chunk_gla(None)
torch.manual_seed(0)
for strength, bounds, batch, with_states in (
    (1 / 16, [0, 100, 137], 1, False),
    (1.0, [0, 5, 70], 1, True),
    (40.0, [0, 64, 134], 1, True),
    (1 / 16, None, 2, True),
):
    T = bounds[-1] if bounds else 70
    cu_seqlens = bounds and torch.tensor(bounds, dtype=torch.int32)
    q, k, v, g = (torch.randn(batch, T, 2, width) for width in (128, 128, 192, 128))  # tiles of both kinds of channels
    g = F.logsigmoid(g) * strength
    h0 = torch.randn(len(bounds) - 1 if bounds else batch, 2, 192, 128) if with_states else None
    inputs = [x.requires_grad_() for x in (q, k, v, g, h0) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    options = {"scale": 0.3, "output_final_state": with_states, "state_v_first": True, "cu_seqlens": cu_seqlens}

    def run(function, inputs, initial_state):
        o, final = function(*inputs[:4], initial_state=initial_state, **options)
        torch.manual_seed(1)
        loss = (o * torch.randn(o.shape).to(o)).sum()
        if final is not None:
            loss = loss + (final * torch.randn(final.shape).to(final)).sum()
        return [o, *([final] if final is not None else []), *torch.autograd.grad(loss, inputs)]

    found = run(ours, inputs, h0)
    right = run(reference, exact, None if h0 is None else exact[4])
    names = ["o", *(["final"] if with_states else []), "dq", "dk", "dv", "dg", "dinitial"]
    for name, a, b in zip(names, found, right):
        error = float((a - b).norm() / b.norm())
        # The decays of strong gates are sums far from zero, whose rounding their exponentials multiply.
        assert error < (2e-4 if strength > 10 else 2e-5), (strength, name, error)
"""


def test_interpreted_they_give_the_recurrence_and_its_gradients():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=600)


def inputs(num_tokens: int, key_dim: int = 128, value_dim: int = 256, **options) -> list[torch.Tensor]:
    """q, k, v, g of four heads."""
    widths = (key_dim, key_dim, value_dim, key_dim)
    q, k, v, g = (torch.randn(1, num_tokens, 4, width, **options) for width in widths)
    return [q, k, v, F.logsigmoid(g) / 16]


@pytest.mark.parametrize(
    ("change", "of"),
    [
        (lambda q, k, v, g: (q, k, v, g.float()), "float32 gates"),
        (lambda q, k, v, g: (q[..., :32], k[..., :32], v, g[..., :32]), "narrow keys"),
        (lambda q, k, v, g: (q, k, v[..., :100], g), "values in no tiles"),
        (lambda q, k, v, g: (q, k[:, :, :1], v, g), "shared keys"),
    ],
)
def test_what_the_kernels_do_not_take_is_left_to_fla(change, of):
    given = inputs(8, device="meta", dtype=torch.bfloat16)
    assert takes(*given)
    changed = change(*given)
    assert not takes(*changed), of
    calls = []
    make_chunk_gla(lambda *args: calls.append(args))(*changed, scale=0.5, cu_seqlens="bounds")
    assert calls[0][4:] == (0.5, None, False, False, "bounds", None)


@pytest.mark.parametrize(
    "options",
    [
        {"output_final_state": True},  # in the other layout
        {"initial_state": torch.empty(1, 4, 256, 128).half(), "state_v_first": True},
        {"initial_state": torch.empty(2, 4, 256, 128), "state_v_first": True},
        {"initial_state": torch.empty(1, 4, 256, 128), "cu_seqlens": torch.tensor([0, 3, 8]), "state_v_first": True},
    ],
)
def test_states_that_fla_refuses_or_has_otherwise_are_left_to_it(options):
    calls = []
    given = inputs(8, device="meta", dtype=torch.bfloat16)
    make_chunk_gla(lambda *args: calls.append(args))(*given, **options)
    assert len(calls) == 1


def test_plans_take_the_kernels_of_this_machines_gpu(monkeypatch):
    given = inputs(8, device="meta", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        assert takes(*given) == expected


def test_documents_by_length():
    bounds = torch.tensor([0, 3, 10, 11, 18], dtype=torch.int32)
    for known in (bounds, send_and_remember(bounds, torch.device("cpu"))):
        order = longest_first(known)
        assert order.tolist() == [1, 3, 0, 2]
        assert order.dtype == torch.int32


def test_they_fit_a_hopper_gpu(hopper):
    """Two blocks or more in the shared memory of a multiprocessor, 228 KiB."""
    x, decay, bounds = torch.empty(16, dtype=torch.bfloat16), torch.empty(16), torch.empty(16, dtype=torch.int32)
    offsets, shape = torch.empty(16, dtype=torch.int64), {"H": 4, "K": 128, "BT": BT, "num_warps": NUM_WARPS}
    launch = {"grid": (1,), "warmup": True, **shape}
    values = {"V": 256, "BV": TILE}
    compiled = [
        gla_state_kernel.run(
            *(x, x, decay, x, None, None, None, decay, None, None, None, None, 65_536),
            **{"BACKWARD": False, "STAGES": STATE_STAGES, **values, **launch},
        ),
        gla_prepare_kernel.run(
            x, x, x, x, x, x, decay, bounds, bounds, 0.1, 65_536, BK=TILE, maxnreg=PREPARE_REGISTERS, **launch
        ),
        gla_state_kernel.run(
            *(x, x, decay, None, x, x, x, None, None, bounds, offsets, bounds, 65_536),
            **{"BACKWARD": False, "STAGES": OUTPUT_STAGES, **values, **launch},
        ),
        gla_state_kernel.run(
            *(x, x, decay, x, x, x, x, None, None, bounds, offsets, bounds, 65_536),
            **{"BACKWARD": True, "STAGES": OUTPUT_STAGES, **values, **launch},
        ),
        gla_gradient_kernel.run(
            *[x] * 10, bounds, bounds, 0.1, 65_536, BK=TILE, STAGES=GRADIENT_STAGES, **values, **launch
        ),
    ]
    assert max(each.metadata.shared for each in compiled) <= 113 * 1024  # each takes 1 KiB besides


@pytest.mark.gpu
@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("strength", [1.0, 16.0, 640.0])
def test_on_a_gpu_they_are_near_the_recurrence(strength, key_dim):
    """5e-3: scores within a chunk and all results are bfloat16. docs/numerics.md has FLA's own distances."""
    from flame.models.backend import import_fla
    from flame.models.reference.gla import chunk_gla as reference

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels for Hopper GPUs")
    import_fla()
    torch.manual_seed(0)
    bounds = torch.tensor([0, 700, 701, 1500], device="cuda", dtype=torch.int32)
    given = [x.bfloat16() for x in inputs(1500, key_dim, device="cuda")]
    given[3] = given[3] * strength
    initial, gradient = torch.randn(3, 4, 256, key_dim, device="cuda"), torch.randn(1, 1500, 4, 256, device="cuda")

    def run(function, *tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        options = {"output_final_state": True, "state_v_first": True, "cu_seqlens": bounds}
        o, final = function(*leaves[:4], initial_state=leaves[4], **options)
        loss = (o * gradient).sum() + final.sum()
        return [x.double() for x in (o, final, *torch.autograd.grad(loss, leaves))]

    exact = run(reference, *(x.double() for x in (*given, initial)))
    for own, right in zip(run(make_chunk_gla(None), *given, initial), exact, strict=True):
        assert (own - right).norm() < 5e-3 * right.norm()
