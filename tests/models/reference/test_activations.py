from __future__ import annotations

import math

import pytest
import torch

from flame.models.reference import activations
from tests.models.reference.recurrences import DTYPES, TOLERANCE, assert_same_with_gradients


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def powlu_gate(x):
    base = x.clamp_min(1e-300)
    return torch.where(x > 0, base ** (3 / (base.sqrt() + 1)), x) * x.sigmoid()


UNARY = {
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "swish": lambda x: x / (1 + (-x).exp()),
    "logsigmoid": lambda x: -(1 + (-x).exp()).log(),
    "sqrelu": lambda x: x.clamp_min(0) ** 2,
    "gelu": tanh_gelu,
}
GATED = {
    "swiglu": lambda x, y: x * x.sigmoid() * y,
    "sigmoidglu": lambda x, y: x.sigmoid() * y,
    "powglu": lambda x, y: powlu_gate(x) * y,
}


def make_inputs(*names):
    torch.manual_seed(0)
    shapes = {"x": (4, 6), "y": (4, 6), "weight": (3, 6), "bias": (3,)}
    return {name: 2 * torch.randn(shapes[name], dtype=torch.float64) for name in names}


@DTYPES
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype):
    run = getattr(activations, name)
    assert_same_with_gradients(
        lambda x: (run(x),), lambda x: (UNARY[name](x),), make_inputs("x"), TOLERANCE[dtype], dtype
    )


@DTYPES
@pytest.mark.parametrize("name", GATED)
def test_gated_and_its_linear_form(name, dtype):
    gated, linear = getattr(activations, name), getattr(activations, f"{name}_linear")

    def run(x, y, weight, bias):
        return gated(x, y), linear(x, y, weight, bias)

    def expected(x, y, weight, bias):
        z = GATED[name](x, y)
        return z, z @ weight.T + bias

    inputs = make_inputs("x", "y", "weight", "bias")
    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


def test_powglu_is_finite_at_zero_and_below():
    x = torch.tensor([-50.0, -1e-30, 0.0, 1e-30, 50.0], requires_grad=True)
    activations.powglu(x, torch.ones(5)).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_bias_gelu_and_temperature():
    x, bias = torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(activations.bias_gelu(x, bias), tanh_gelu(x + bias))
    torch.testing.assert_close(activations.logsigmoid(x, 16.0), x.sigmoid().log() / 16)
