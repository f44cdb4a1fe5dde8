"""Mamba-2's gated norm on rows that lie apart: numbers by Triton's interpreter, and what it keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from flame.models.gated_norm import make_gated_rms_norm

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
"""


def test_interpreted_it_gives_the_norm_and_its_gradients():
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
