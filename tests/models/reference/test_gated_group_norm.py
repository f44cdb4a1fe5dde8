from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flame.models.reference.gated_group_norm import layernorm_fn, rmsnorm_fn


def by_hand(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm):
    gate = z * torch.sigmoid(z)
    groups = (x if norm_before_gate else x * gate).unflatten(-1, (-1, group_size))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight
    y = y if bias is None else y + bias
    return y * gate if norm_before_gate else y


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("group_size", [4, 12])
@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_it_is_the_formula(is_rms_norm, group_size, norm_before_gate):
    torch.manual_seed(0)
    x, z, weight = (torch.randn(*shape, dtype=torch.float64) for shape in [(2, 5, 12), (2, 5, 12), (12,)])
    bias = None if is_rms_norm else torch.randn(12, dtype=torch.float64)
    function = rmsnorm_fn if is_rms_norm else layernorm_fn
    y = function(x, weight, bias, z, 1e-5, group_size, norm_before_gate)
    expected = by_hand(x, weight, bias, z, 1e-5, group_size, norm_before_gate, is_rms_norm)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_without_gate_and_groups():
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    torch.testing.assert_close(rmsnorm_fn(x, weight, None), F.rms_norm(x, (8,), weight, 1e-6))


def test_bfloat16_is_computed_in_float32():
    x, z, weight = (torch.randn(*shape).bfloat16() for shape in [(3, 8), (3, 8), (8,)])
    y = rmsnorm_fn(x, weight, None, z, group_size=4)
    assert torch.equal(y, rmsnorm_fn(x.float(), weight.float(), None, z.float(), group_size=4).bfloat16())
