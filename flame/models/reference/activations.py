"""Element-wise activations of FLA's layers and MLPs, computed in float32 and returned in the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.models.reference.packing import compute_dtype


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def swish(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(x)


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """log sigmoid(x) / temperature."""
    return F.logsigmoid(x) / temperature


def sqrelu(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv:2109.08668)."""
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """GELU, tanh approximation."""
    return F.gelu(x, approximate="tanh")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias, tanh approximation."""
    return F.gelu(x + bias, approximate="tanh")


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """swish(x) * y (arXiv:2002.05202)."""
    dtype = compute_dtype(x)
    return (F.silu(x.to(dtype)) * y.to(dtype)).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y), weight, bias)


def sigmoidglu(x: Tensor, y: Tensor) -> Tensor:
    """sigmoid(x) * y."""
    dtype = compute_dtype(x)
    return (x.to(dtype).sigmoid() * y.to(dtype)).to(x.dtype)


def sigmoidglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(sigmoidglu(x, y), weight, bias)


def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    """gate(x) * y with gate x^(power / (sqrt(x) + 1)) sigmoid(x) for x > 0 and swish(x) else."""
    dtype = compute_dtype(x)
    gate_in, positive = x.to(dtype), x > 0
    # The branch that is not taken gets 1 as its base: its gradient must stay finite, since 0 * inf is NaN.
    base = torch.where(positive, gate_in, 1.0)
    power_gate = base ** (power / (base.sqrt() + 1)) * gate_in.sigmoid()
    return (torch.where(positive, power_gate, F.silu(gate_in)) * y.to(dtype)).to(x.dtype)


def powglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0) -> Tensor:
    return F.linear(powglu(x, y, power), weight, bias)
