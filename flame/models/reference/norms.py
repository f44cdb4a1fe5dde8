"""Normalisations of FLA's modules: RMS, layer and group norm, their gated forms, and the l2 norm.

All compute in float32 (float64 for float64 input) and return the input's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.packing import compute_dtype


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension."""
    y = x.to(compute_dtype(x))
    y = y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()
    return y.to(output_dtype or x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm (or RMS norm) of x + residual.

    Args:
        x, residual: [..., D]; weight, bias: [D] or None.
        prenorm: also return the sum that was normalised, in the residual's dtype (else x's, or float32 with
            `residual_in_fp32`).
    """
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups=1)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm (arXiv:1910.07467) of x + residual; arguments as in `layer_norm`."""
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True, num_groups=1)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer or RMS norm within each of `num_groups` equal parts of the last dimension; weight and bias are [D]."""
    total, residual_out = _add_residual(x, residual, residual_in_fp32)
    y = _normalize(total, weight, bias, eps, is_rms_norm, num_groups).to(x.dtype)
    return (y, residual_out) if prenorm else y


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """`group_norm` followed by a linear layer [D_out, D] in x's dtype."""
    y = group_norm(x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)
    y, residual_out = y if prenorm else (y, None)
    y = F.linear(y, linear_weight.to(y.dtype), None if linear_bias is None else linear_bias.to(y.dtype))
    return (y, residual_out) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    is_rms_norm: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """norm(x + residual) * activation(g), with activation swish, silu or sigmoid; x and g are [..., D]."""
    total, residual_out = _add_residual(x, residual, residual_in_fp32)
    y = _normalize(total, weight, bias, eps, is_rms_norm, num_groups=1)
    y = (y * _gate(activation, g.to(y.dtype))).to(x.dtype)
    return (y, residual_out) if prenorm else y


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm_gated` with layer norm."""
    return rms_norm_gated(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps, is_rms_norm=False)


def _gate(activation: str, g: Tensor) -> Tensor:
    if activation in ("swish", "silu"):
        return F.silu(g)
    if activation == "sigmoid":
        return g.sigmoid()
    raise UserError(f"a gated norm's activation is swish, silu or sigmoid, got {activation!r}")


def _add_residual(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> tuple[Tensor, Tensor]:
    total = x.to(compute_dtype(x, residual))
    if residual is None:
        return total, total if residual_in_fp32 else x
    total = total + residual.to(total.dtype)
    return total, total.to(residual.dtype)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_rms_norm: bool, num_groups: int
) -> Tensor:
    shape = x.shape
    y = x.unflatten(-1, (num_groups, -1))
    weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
    if num_groups == 1 and is_rms_norm:
        y = F.rms_norm(x, shape[-1:], weight, eps)
        return y if bias is None else y + bias
    if num_groups == 1:
        return F.layer_norm(x, shape[-1:], weight, bias, eps)
    if not is_rms_norm:
        y = y - y.mean(-1, keepdim=True)
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).view(shape)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
