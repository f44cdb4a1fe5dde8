"""Mamba-2's gated RMS norm with the gate as it lies in memory, by FLA's kernels.

The gate is columns of the input projection's result. FLA's kernels take rows that lie apart, but FLA copies them
together first and keeps the copy for the backward: 256 MiB a layer of mamba2_340M for 65,536 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flame.models.backend import find_operator

_HOME = "fla.modules.norm.layernorm_gated"


def make_gated_rms_norm(original: Callable) -> Callable:
    """FLA's `rmsnorm_fn`; norms with a bias or without a gate, which read nothing but whole tensors, are left to it."""

    def rmsnorm_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor | None = None,
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
    ) -> Tensor:
        """As `flame.models.reference.gated_group_norm.rmsnorm_fn`."""
        if bias is not None or z is None:
            return original(x, weight, bias, z, eps, group_size, norm_before_gate)
        return _GatedRMSNorm.apply(
            x, weight, z, dict(eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)
        )

    return rmsnorm_fn


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, z: Tensor, options: dict[str, Any]) -> Tensor:
        x_rows, z_rows = _rows(x), _rows(z)
        with torch.cuda.device_of(x):
            forward = find_operator(_HOME, "layer_norm_fwd")
            y, _, rstd = forward(x_rows, weight, None, z=z_rows, is_rms_norm=True, **options)
        ctx.save_for_backward(x_rows, weight, z_rows, rstd)
        ctx.options = options
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, z, rstd = ctx.saved_tensors
        with torch.cuda.device_of(x):
            backward = find_operator(_HOME, "layer_norm_bwd")
            dx, dweight, _, dz = backward(
                _rows(dy), x, weight, None, mean=None, rstd=rstd, z=z, is_rms_norm=True, **ctx.options
            )
        return dx.view(dy.shape), dweight, dz.view(dy.shape), None


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [N, D] with rows that are each contiguous."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()
