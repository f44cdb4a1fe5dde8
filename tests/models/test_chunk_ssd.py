"""Mamba-2's own kernels: numbers by Triton's interpreter, what is left to FLA, and numbers on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

from flame.models import chunk_ssd  # noqa: E402
from flame.models.chunk_ssd_kernels import (  # noqa: E402
    ssd_backward_kernel,
    ssd_forward_kernel,
    ssd_gradient_kernel,
)
from flame.models.chunks import BT  # noqa: E402
from flame.models.reference.simple_gla import chunk_simple_gla  # noqa: E402
from flame.models.ssd import make_ssd  # noqa: E402

NUM_HEADS, HEAD_DIM = 4, 64


def inputs(num_tokens: int, num_groups: int = 2, state_size: int = 128, batch: int = 1, **options) -> dict:
    """Of the scan; x, B and C are columns of one matrix, as in the layer."""
    widths = [NUM_HEADS * HEAD_DIM, num_groups * state_size, num_groups * state_size]
    rows = torch.randn(batch, num_tokens, sum(widths), **options)
    x, B, C = rows.split(widths, dim=-1)
    return {
        "x": x.unflatten(-1, (NUM_HEADS, HEAD_DIM)),
        "dt": torch.rand(batch, num_tokens, NUM_HEADS, device=rows.device),
        "A": -torch.rand(NUM_HEADS, device=rows.device) - 1 / 64,
        "B": B.unflatten(-1, (num_groups, state_size)),
        "C": C.unflatten(-1, (num_groups, state_size)),
        "D": torch.randn(NUM_HEADS, device=rows.device),
    }


def errors(function, given: dict, **options) -> dict[str, float]:
    """Relative distances of outputs and gradients from those of the recurrence in float64."""

    def run(function, dtype):
        tensors = {name: x.to(dtype or x.dtype).detach().requires_grad_() for name, x in given.items()}
        y, final = function(**tensors, **options)
        torch.manual_seed(1)
        loss = (y * torch.randn(y.shape).to(y)).sum()
        if final is not None:
            loss = loss + (final * torch.randn(final.shape).to(final)).sum()
        results = {"y": y} | ({} if final is None else {"final": final})
        return results | dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))

    right = run(make_ssd(chunk_simple_gla), torch.float64)
    found = run(function, None)
    return {name: ((found[name] - right[name]).norm() / right[name].norm()).item() for name in right}


def check_interpreted() -> None:
    """Short and long documents, lengths that chunks do not divide, several rows, also of one token, initial and final
    states, one group and several, with skips and without, and decays by which little outlasts a chunk, or a token."""
    from flame.models.backend import import_fla

    import_fla()
    chunk_ssd.takes = lambda *_: True
    ours = chunk_ssd.make_chunk_ssd(None)
    torch.manual_seed(0)
    for strength, documents, batch, num_groups, state_size, with_states in (
        (0.1, [0, 100, 137], 1, 1, 128, False),
        (1.0, [0, 5, 70], 1, 2, 64, True),
        (100.0, [0, 64, 134], 1, 4, 64, True),
        (0.1, 70, 2, 1, 64, True),
        (1.0, 1, 3, 2, 64, True),
    ):
        bounds = documents if isinstance(documents, list) else None
        given = inputs(bounds[-1] if bounds else documents, num_groups, state_size, batch)
        given["A"] = given["A"] * strength
        if num_groups == 4:
            del given["D"]
        num_documents = len(bounds) - 1 if bounds else batch
        if with_states:
            given["initial_state"] = torch.randn(num_documents, NUM_HEADS, state_size, HEAD_DIM)
        cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        found = errors(ours, given, output_final_state=with_states, cu_seqlens=cu_seqlens)
        # Strong decays are sums far from zero, whose rounding their exponentials multiply.
        assert max(found.values()) < (3e-3 if strength > 10 else 2e-5), (strength, found)


def test_interpreted_they_give_the_recurrence_and_its_gradients():
    code = "from tests.models.test_chunk_ssd import check_interpreted; check_interpreted()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=600)


def test_they_fit_a_hopper_gpu(hopper):
    """A multiprocessor has 228 KiB of shared memory, of which a program takes 1 KiB besides."""
    for kernel, args, options in launches():
        shared = kernel.run(*args, grid=(1,), warmup=True, **options).metadata.shared
        at_once = 1 if kernel is ssd_gradient_kernel else 2
        assert at_once * (shared + 1024) <= 228 * 1024


def launches() -> list[tuple]:
    """The kernels with what mamba2_340M gives them."""
    x, g, bounds = torch.empty(16, dtype=torch.bfloat16), torch.empty(16), torch.empty(16, dtype=torch.int32)
    offsets = torch.empty(16, dtype=torch.int64)
    sizes = dict(H=32, G=1, P=HEAD_DIM, N=128, BT=BT)
    passes = sizes | dict(STAGES=chunk_ssd.STATE_STAGES, num_warps=chunk_ssd.STATE_WARPS)
    gradients = sizes | dict(STAGES=chunk_ssd.GRADIENT_STAGES, num_warps=chunk_ssd.GRADIENT_WARPS)
    documents, rows = (bounds, offsets, bounds, 65_536), (2304, 2304, 2304)
    return [
        (ssd_forward_kernel, (x, x, x, g, g, g, None, None, x, None, None, *documents, *rows), passes),
        (ssd_forward_kernel, (x, x, x, g, g, None, x, g, None, None, None, *documents, *rows), passes),
        (ssd_backward_kernel, (x, x, g, g, g, x, x, x, None, None, *documents, *rows), passes),
        *(
            (
                ssd_gradient_kernel,
                (x, x, x, x, x, starts, g, g, x, g, g, bounds, bounds, 65_536, 2304, 2304, 2048, 2304, 2304),
                gradients,
            )
            for starts in (None, x)
        ),
    ]


@pytest.mark.parametrize(
    ("change", "of"),
    [
        ({"x": lambda x: x.float()}, "float32 heads"),
        ({"x": lambda x: x[..., :32]}, "narrow heads"),
        ({"B": lambda x: x[..., :32], "C": lambda x: x[..., :32]}, "small states"),
        ({"D": lambda x: x[:, None].expand(-1, HEAD_DIM)}, "skips of channels"),
        ({name: lambda x: x[:, :, [0, 1, 1]] for name in ("B", "C")}, "groups that do not divide the heads"),
        ({"initial_state": lambda _: torch.empty(2, NUM_HEADS, 128, HEAD_DIM)}, "states of other documents"),
    ],
)
def test_what_the_kernels_do_not_take_is_left_to_fla(change, of):
    calls = []
    scan = chunk_ssd.make_chunk_ssd(lambda *args: calls.append(args))
    given = inputs(8, device="meta", dtype=torch.bfloat16)
    changed = given | {name: function(given.get(name)) for name, function in change.items()}
    scan(**changed, output_final_state=True)
    assert calls[0][6:] == (changed.get("initial_state"), True, None), of


def test_planned_for_a_hopper_gpu_they_keep_nothing_but_their_inputs(monkeypatch):
    from flame.models.without_kernels import without_kernels

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = inputs(8, device="meta", dtype=torch.bfloat16)
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    kept = []
    with without_kernels(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y, _ = chunk_ssd.make_chunk_ssd(None)(**given)
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in given.values())
    assert y.shape == given["x"].shape


@pytest.mark.gpu
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("strength", [0.1, 1.0, 16.0])
def test_on_a_gpu_they_are_near_the_recurrence(strength, num_groups):
    """5e-3: scores within a chunk, states and results are bfloat16. What A gets is a small sum of large ones."""
    from flame.models.backend import import_fla

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels for Hopper GPUs")
    import_fla()
    torch.manual_seed(0)
    given = inputs(1500, num_groups, device="cuda")
    given = {name: x.bfloat16() if name in ("x", "B", "C") else x for name, x in given.items()}
    given["A"] = given["A"] * strength
    given["initial_state"] = torch.randn(3, NUM_HEADS, 128, HEAD_DIM, device="cuda")
    bounds = torch.tensor([0, 700, 701, 1500], device="cuda", dtype=torch.int32)
    found = errors(chunk_ssd.make_chunk_ssd(None), given, output_final_state=True, cu_seqlens=bounds)
    assert found.pop("A") < 3e-2
    assert max(found.values()) < 5e-3
