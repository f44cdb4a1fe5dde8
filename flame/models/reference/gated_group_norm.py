"""Norms of groups of channels with a SiLU gate before or after them, as in Mamba-2 (arXiv:2405.21060, section 6.3)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flame.models.reference.norms import group_norm
from flame.models.reference.packing import compute_dtype


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """norm(x) silu(z), or norm(x silu(z)), with the norm taken over groups of `group_size` channels.

    Args:
        x, z: [..., D]; no gate when `z` is None. weight, bias: [D].
        group_size: channels that are normalised together, all by default.

    Returns:
        [..., D] in x's dtype, computed in float32 (float64 for float64 input).
    """
    out_dtype, dtype = x.dtype, compute_dtype(x, z)
    x, gate = x.to(dtype), None if z is None else F.silu(z.to(dtype))
    if gate is not None and not norm_before_gate:
        x = x * gate
    num_groups = 1 if group_size is None else x.shape[-1] // group_size
    y = group_norm(x, weight, bias, eps=eps, is_rms_norm=is_rms_norm, num_groups=num_groups)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(out_dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`layernorm_fn` with the root mean square norm."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm=True)
