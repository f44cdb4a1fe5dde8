"""Rotary embeddings of whole heads: numbers by Triton's interpreter, what is compiled, and FLA's on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

from flame.host_copy import send_and_remember  # noqa: E402
from flame.models.rotary_kernels import (  # noqa: E402
    BLOCK_ELEMENTS,
    NUM_WARPS,
    make_rotary_embedding,
    positions_of,
    rotary_kernel,
)

INTERPRETED = """
import torch
from flame.models.reference.rotary import rotary_embedding as reference
from flame.models.rotary_kernels import make_rotary_embedding

ours = make_rotary_embedding(None)
angles = torch.rand(64, 8)
cos, sin = angles.cos(), angles.sin()
for batch, bounds, offset in ((2, None, 0), (1, [0, 5, 6, 40], 0), (1, [0, 40], 3), (2, None, 24)):
    cu_seqlens = bounds and torch.tensor(bounds, dtype=torch.int32)
    x = torch.randn(batch, 40, 3, 16, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    y = ours(x, cos, sin, seqlen_offsets=offset, cu_seqlens=cu_seqlens)
    expected = reference(twin, cos, sin, seqlen_offsets=offset, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(y, expected)
    gradient = torch.randn_like(y).transpose(1, 2).contiguous().transpose(1, 2)  # not contiguous
    y.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, twin.grad)
"""


def test_interpreted_they_turn_heads_and_their_gradients():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=300)


def test_they_move_16_bytes_at_a_time(hopper):
    x, positions = torch.empty(16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.int32)
    rows = BLOCK_ELEMENTS // 32
    compiled = rotary_kernel.run(
        *(x, x, x, positions, x, 65_536 * 16, 0),
        **{"H": 16, "R": 32, "ROWS": rows, "BACK": False, "num_warps": NUM_WARPS, "grid": (1,), "warmup": True},
    )
    lines = compiled.asm["ptx"].splitlines()
    wide = [line for line in lines if "global" in line and ".v4.b32" in line]
    assert len(wide) == 6  # cos, sin, two halves read, two written
    assert not any("global" in line and ".b16" in line for line in lines)


@pytest.mark.parametrize(
    "options",
    [
        {"interleaved": True},
        {"inplace": True},
        {"seqlen_offsets": torch.tensor([0])},
        {"seqlen_offsets": 60},  # beyond the table
        {"x": torch.ones(1, 8, 2, 32)},  # the table turns half of each head
        {"x": torch.ones(1, 8, 2, 16).bfloat16()},
        {"sin": torch.ones(7, 8)},  # shorter than the row
    ],
    ids=str,
)
def test_what_they_do_not_do_is_left_to_fla(options):
    given = []
    x, table = torch.ones(1, 8, 2, 16), torch.ones(64, 8)
    make_rotary_embedding(lambda *arguments: given.append(arguments))(**{"x": x, "cos": table, "sin": table} | options)
    assert len(given) == 1


def test_positions_are_made_once_for_the_layers_of_a_model():
    x = torch.ones(1, 9, 1, 16)
    bounds = send_and_remember(torch.tensor([0, 3, 9], dtype=torch.int32), torch.device("cpu"))
    assert positions_of(x, bounds).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert positions_of(x, bounds) is positions_of(x, bounds)
    assert positions_of(x, bounds.clone()).tolist() == positions_of(x, bounds).tolist()
    assert positions_of(torch.ones(2, 2, 1, 16), None).tolist() == [0, 1, 0, 1]


@pytest.mark.gpu
def test_on_a_gpu_they_agree_with_flas():
    """To the last bit but one: the same formulas in float32, which a compiler may contract in other places."""
    from fla.modules.rotary import rotary_embedding

    angles = torch.rand(512, 32, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    bounds = torch.tensor([0, 100, 101, 512], dtype=torch.int32, device="cuda")
    results = []
    for operator in (make_rotary_embedding(None), rotary_embedding):
        torch.manual_seed(0)
        x = torch.randn(1, 512, 16, 64, device="cuda").bfloat16().requires_grad_()
        y = operator(x, cos, sin, cu_seqlens=bounds)
        y.backward(torch.randn_like(y))
        results.append((y, x.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-5)
