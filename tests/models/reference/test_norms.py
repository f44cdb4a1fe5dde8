from __future__ import annotations

import pytest
import torch

from flame.errors import UserError
from flame.models.reference import norms
from tests.models.reference.recurrences import DTYPES, TOLERANCE, assert_same_with_gradients


def make_inputs(*names):
    torch.manual_seed(0)
    shapes = {"x": (4, 3, 8), "g": (4, 3, 8), "residual": (4, 3, 8), "weight": (8,), "bias": (8,)}
    return {name: torch.randn(shapes[name], dtype=torch.float64) for name in names}


def normalized(x, weight, bias, eps, center, num_groups=1):
    x = x.unflatten(-1, (num_groups, -1))
    if center:
        x = x - x.mean(-1, keepdim=True)
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight + bias


@DTYPES
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norm_with_residual_returns_the_sum(name, dtype):
    def run(**inputs):
        return getattr(norms, name)(**inputs, eps=1e-3, prenorm=True)

    def expected(x, residual, weight, bias):
        total = x + residual
        return normalized(total, weight, bias, 1e-3, center=name == "layer_norm"), total

    inputs = make_inputs("x", "residual", "weight", "bias")
    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_group_norm(is_rms_norm, dtype):
    def run(**inputs):
        return (norms.group_norm(**inputs, eps=1e-3, is_rms_norm=is_rms_norm, num_groups=2),)

    def expected(x, weight, bias):
        return (normalized(x, weight, bias, 1e-3, not is_rms_norm, num_groups=2),)

    assert_same_with_gradients(run, expected, make_inputs("x", "weight", "bias"), TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_norm_before_a_linear_layer(is_rms_norm, dtype):
    def run(linear_weight, linear_bias, residual, weight, bias, x):
        options = dict(residual=residual, eps=1e-3, prenorm=True, is_rms_norm=is_rms_norm)
        return norms.layer_norm_linear(x, weight, bias, linear_weight, linear_bias, **options)

    def expected(linear_weight, linear_bias, residual, weight, bias, x):
        total = x + residual
        return normalized(total, weight, bias, 1e-3, not is_rms_norm) @ linear_weight.T + linear_bias, total

    inputs = make_inputs("x", "residual", "weight", "bias")
    inputs |= {"linear_weight": torch.randn(5, 8).double(), "linear_bias": torch.randn(5).double()}
    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("name", ["rms_norm_gated", "layer_norm_gated"])
def test_gated_norm(name, activation, dtype):
    def run(**inputs):
        return getattr(norms, name)(**inputs, activation=activation, eps=1e-3, prenorm=True)

    def expected(x, g, residual, weight, bias):
        gate = g.sigmoid() * (1 if activation == "sigmoid" else g)
        total = x + residual
        return normalized(total, weight, bias, 1e-3, center=name == "layer_norm_gated") * gate, total

    inputs = make_inputs("x", "g", "residual", "weight", "bias")
    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


@DTYPES
def test_l2norm(dtype):
    def expected(x):
        return (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),)

    assert_same_with_gradients(lambda x: (norms.l2norm(x),), expected, make_inputs("x"), TOLERANCE[dtype], dtype)


def test_zero_vectors_are_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    (norms.l2norm(x).sum() + norms.rms_norm(x, None, None).sum()).backward()
    assert torch.isfinite(x.grad).all()


def test_dtypes_of_output_and_residual():
    x, residual = torch.randn(2, 8).bfloat16(), torch.randn(2, 8)
    y, total = norms.rms_norm(x, None, None, residual, prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    y, total = norms.rms_norm(x, None, None, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    _, total = norms.rms_norm(x, None, None, prenorm=True)
    assert total is x
    assert norms.l2norm(x, output_dtype=torch.float32).dtype == torch.float32


def test_unknown_activation_is_refused():
    x = torch.randn(2, 8)
    with pytest.raises(UserError, match="swish, silu or sigmoid, got 'gelu'"):
        norms.rms_norm_gated(x, x, None, None, activation="gelu")
