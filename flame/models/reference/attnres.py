"""Attention residuals (arXiv:2603.15031): each layer reads a softmax mixture of the earlier layers' outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.models.reference.packing import compute_dtype


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sum of the residuals weighted by softmax over sources of scale * query . rms_norm(residual).

    Args:
        query: D elements; residuals: L sources [..., D]; rms_weight: [D].
        output_rms_weight: [D], also RMS-normalise the sum with this weight.
        checkpoint_level: FLA's memory setting of the backward pass, not needed here.

    Returns:
        [..., D] in the sources' dtype, and with `return_weights` the weights [L, ...].
    """
    dtype = compute_dtype(*residuals)
    sources = torch.stack([r.to(dtype) for r in residuals])  # [L, ..., D]
    dims = sources.shape[-1:]
    keys = F.rms_norm(sources, dims, rms_weight.flatten().to(dtype), rms_eps)
    weights = (keys @ query.flatten().to(dtype) * scale).softmax(0)  # [L, ...]
    mixed = (weights[..., None] * sources).sum(0)
    if output_rms_weight is not None:
        mixed = F.rms_norm(mixed, dims, output_rms_weight.to(dtype), rms_eps)
    mixed = mixed.to(residuals[0].dtype)
    return (mixed, weights) if return_weights else mixed
