"""Gated norms by FLA's kernels, with less to read and more at a time.

Mamba-2's gate is columns of the input projection's result. FLA's kernels take rows that lie apart, but FLA copies them
together first and keeps the copy for the backward: 256 MiB a layer of mamba2_340M for 65,536 tokens.

The backward of the other gated norms takes heads of up to 512 channels by tiles of rows, one program on each
multiprocessor: 0.71 ms for gated_deltanet_1B's 393,216 heads of 512 on an H200. FLA's kernel for wider ones takes rows,
each by one warp here, as 16 programs on each: 0.51 ms, the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from flame.models.backend import find_operator
from flame.models.chunks import is_on_hopper

_HOME = "fla.modules.norm.layernorm_gated"
_HEADS_HOME = "fla.modules.norm.fused_norm_gate"

ROW_WIDTHS = range(256, 513)  # channels that a warp takes as they are loaded; of fewer some lanes would idle
ROW_PROGRAMS = 16  # on each multiprocessor


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


def make_layer_norm_gated_bwd(original: Callable) -> Callable:
    """FLA's `layer_norm_gated_bwd`; norms that are not RMS norms with a weight alone are left to it."""

    def layer_norm_gated_bwd(
        dy: Tensor,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        activation: str = "swish",
        eps: float = 1e-5,
        mean: Tensor | None = None,
        rstd: Tensor | None = None,
        dresidual: Tensor | None = None,
        has_residual: bool = False,
        is_rms_norm: bool = False,
        x_dtype: torch.dtype | None = None,
        recompute_output: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x, g, weight, bias and residual.

        Args:
            dy, x, g: [N, D]; weight: [D]; rstd: [N] float32.
        """
        is_more = bias is not None or dresidual is not None or has_residual or recompute_output
        if is_more or not is_rms_norm or weight is None or x_dtype not in (None, x.dtype) or not takes_rows(x):
            return original(
                dy, x, g, weight, bias, activation, eps, mean, rstd, dresidual, has_residual, is_rms_norm, x_dtype,
                recompute_output,
            )  # fmt: skip
        num_rows, width = x.shape
        count = find_operator(_HEADS_HOME, "get_multiprocessor_count")(x.device.index)
        num_programs = min(ROW_PROGRAMS * count, num_rows)
        dx, dg = torch.empty_like(x), torch.empty_like(g)
        dweight = weight.new_empty(num_programs, width, dtype=torch.float32)
        kernel = find_operator(_HEADS_HOME, "layer_norm_gated_bwd_kernel_row").fn.fn  # without FLA's choice of warps
        with torch.cuda.device_of(x):
            kernel[(num_programs,)](
                x, g, weight, None, None, dy, dx, dg, dweight, None, None, None, None, rstd, num_rows,
                triton.cdiv(num_rows, num_programs), D=width, BD=triton.next_power_of_2(width), ACTIVATION=activation,
                IS_RMS_NORM=True, STORE_DRESIDUAL=False, HAS_DRESIDUAL=False, HAS_WEIGHT=True, HAS_BIAS=False,
                RECOMPUTE_OUTPUT=False, num_warps=1,
            )  # fmt: skip
        return dx, dg, dweight.sum(0).to(weight.dtype), None, None

    return layer_norm_gated_bwd


def takes_rows(x: Tensor) -> bool:
    """Whether rows are as wide, their elements as narrow, and the GPU of the kind, as this was measured with."""
    is_known = x.shape[-1] in ROW_WIDTHS and x.dtype in (torch.float16, torch.bfloat16) and len(x) > 0
    return is_known and is_on_hopper(x)
