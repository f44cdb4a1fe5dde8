"""SwiGLU's kernels: their numbers by Triton's interpreter, what they compile to, and FLA's on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

from flame.models.swiglu_kernels import (  # noqa: E402
    BLOCK,
    NUM_WARPS,
    make_swiglu_backward,
    make_swiglu_forward,
    swiglu_backward_kernel,
    swiglu_forward_kernel,
)

INTERPRETED = """
import torch
import torch.nn.functional as F
from flame.models.swiglu_kernels import make_swiglu_backward, make_swiglu_forward

forward, backward = make_swiglu_forward(None), make_swiglu_backward(None)
for shape in ((3, 700), (1, 4096), (2, 2, 5)):
    x, y, g = torch.randn(3, *shape).unbind()
    x.requires_grad_(), y.requires_grad_()
    expected = F.silu(x) * y
    expected.backward(g)
    with torch.no_grad():
        torch.testing.assert_close(forward(x=x, y=y), expected)
        dx, dy, z = backward(x=x, y=y, g=g, use_weight=True)
    for got, right in ((dx, x.grad), (dy, y.grad), (z, expected.detach())):
        torch.testing.assert_close(got, right)
    assert len(backward(x=x, y=y, g=g)) == 2
"""


def test_interpreted_they_give_swiglu_and_its_gradients():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=300)


@pytest.mark.parametrize(("kernel", "num_pointers"), [(swiglu_forward_kernel, 3), (swiglu_backward_kernel, 6)])
def test_they_move_16_bytes_at_a_time(hopper, kernel, num_pointers):
    options = {"WITH_OUTPUT": True} if num_pointers == 6 else {}
    x = torch.empty(16, dtype=torch.bfloat16)
    compiled = kernel.run(
        *[x] * num_pointers, 65_536 * 2816, grid=(1,), warmup=True, BLOCK=BLOCK, num_warps=NUM_WARPS, **options
    )
    loads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
    assert len(loads) == num_pointers
    assert all(".v4.b32" in line for line in loads)


@pytest.mark.parametrize(("make", "names"), [(make_swiglu_forward, "xy"), (make_swiglu_backward, "xyg")])
def test_what_is_not_contiguous_is_left_to_fla(make, names):
    given = []
    x = torch.ones(6, 4).t()
    make(lambda **options: given.append(options))(**dict.fromkeys(names, x))
    assert given[0]["x"] is x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_they_agree_with_flas(dtype):
    """To the last bit but one: the same formulas in float32, which a compiler may contract in other places."""
    from fla.modules.activations import ops

    x, y, g = torch.randn(3, 333, 2816, device="cuda", dtype=dtype).unbind()
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(make_swiglu_forward(None)(x, y), ops.swiglu_fwd(x, y), **tolerance)
    ours = make_swiglu_backward(None)(x, y, g, use_weight=True)
    for own, theirs in zip(ours, ops.swiglu_fwdbwd(x, y, g, use_weight=True), strict=True):
        torch.testing.assert_close(own, theirs, **tolerance)
