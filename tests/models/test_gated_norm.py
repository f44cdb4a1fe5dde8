"""Gated norms: numbers by Triton's interpreter, what Mamba-2's keeps, and what is left to FLA."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from flame.models import gated_norm
from flame.models.gated_norm import make_gated_rms_norm, make_layer_norm_gated_bwd

INTERPRETED = """
import torch
from flame.models.backend import import_fla
from flame.models.gated_norm import make_gated_rms_norm
from flame.models.reference.gated_group_norm import rmsnorm_fn as reference

import_fla()
ours = make_gated_rms_norm(None)
torch.manual_seed(0)
for batch, group_size, norm_before_gate in ((1, None, False), (2, 48, False), (2, 96, True)):
    columns, x, weight = torch.randn(batch, 5, 250), torch.randn(batch, 5, 96), torch.randn(96)
    gradient = torch.randn(batch, 5, 96)

    def run(function, dtype):
        leaves = [each.to(dtype).requires_grad_() for each in (columns, x, weight)]
        z = leaves[0][..., 16:112]
        options = dict(eps=1e-5, group_size=group_size, norm_before_gate=norm_before_gate)
        y = function(leaves[1], leaves[2], None, z=z, **options)
        return y, *torch.autograd.grad(y, leaves, gradient.to(dtype))

    for found, right in zip(run(ours, torch.float32), run(reference, torch.float64)):
        torch.testing.assert_close(found, right.float(), rtol=1e-5, atol=1e-5)

from flame.models import gated_norm as module

module.takes_rows = lambda x: True
module.ROW_PROGRAMS = 3
find = module.find_operator
module.find_operator = lambda home, name: (lambda index: 1) if "count" in name else find(home, name)
backward = module.make_layer_norm_gated_bwd(None)
for num_rows, activation in ((2, "swish"), (7, "sigmoid")):  # fewer rows than programs, and not a multiple
    x, g, dy, weight = (torch.randn(*shape) for shape in ((num_rows, 40), (num_rows, 40), (num_rows, 40), (40,)))
    leaves = [each.double().requires_grad_() for each in (x, g, weight)]
    rstd = (leaves[0].square().mean(-1) + 1e-5).rsqrt()
    gate = leaves[1].sigmoid() * (leaves[1] if activation == "swish" else 1)
    y = leaves[0] * rstd[:, None] * leaves[2] * gate
    exact = torch.autograd.grad(y, leaves, dy.double())
    options = dict(rstd=rstd.detach().float(), is_rms_norm=True)
    *found, dbias, dresidual = backward(dy, x, g, weight, None, activation, **options)
    assert dbias is None and dresidual is None
    for mine, right in zip(found, exact):
        torch.testing.assert_close(mine, right.float(), rtol=1e-5, atol=1e-5)
"""


def test_interpreted_they_give_the_norms_and_their_gradients():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=300)


def test_the_gate_is_kept_where_it_lies():
    from flame.models.backend import import_fla
    from flame.models.without_kernels import without_kernels

    import_fla()
    columns = torch.empty(1, 8, 80, device="meta", requires_grad=True)
    x, weight = torch.empty(1, 8, 32, device="meta"), torch.empty(32, device="meta")
    kept = []
    with without_kernels(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        make_gated_rms_norm(None)(x, weight, None, z=columns[..., :32])
    assert [each.stride() for each in kept if each.shape == (8, 32)] == [(32, 1), (80, 1)]


def test_norms_without_gates_and_with_biases_are_left_to_fla():
    calls = []
    norm = make_gated_rms_norm(lambda *args: calls.append(args))
    x = torch.empty(2, 8)
    norm(x, "weight", None, eps=1e-5)
    norm(x, "weight", "bias", x, group_size=4)
    assert calls == [(x, "weight", None, None, 1e-5, None, True), (x, "weight", "bias", x, 1e-6, 4, True)]


@pytest.mark.parametrize(
    "change",
    [
        {"bias": "bias"},
        {"dresidual": "gradient"},
        {"has_residual": True},
        {"is_rms_norm": False},
        {"weight": None},
        {"x_dtype": torch.float32},
        {"recompute_output": True},
        {"x": torch.empty(3, 128, dtype=torch.bfloat16, device="meta")},
        {"x": torch.empty(3, 256, device="meta")},
        {"x": torch.empty(0, 256, dtype=torch.bfloat16, device="meta")},
        {"x": torch.empty(3, 256, dtype=torch.bfloat16)},
    ],
)
def test_other_backwards_of_gated_norms_are_left_to_fla(change):
    x = torch.empty(3, 256, dtype=torch.bfloat16, device="meta")
    assert gated_norm.takes_rows(x)
    given = (
        {"x": x, "bias": None, "is_rms_norm": True} | dict.fromkeys(("dy", "g", "weight", "rstd"), "tensor") | change
    )
    names = inspect.signature(make_layer_norm_gated_bwd(None)).parameters
    calls = []
    make_layer_norm_gated_bwd(lambda *args: calls.append(dict(zip(names, args, strict=True))))(**given)
    assert all(calls[0][name] is x for name, x in given.items())
