"""Retention of RetNet (arXiv:2307.08621): linear attention whose head h decays by 1 - 2^(-5 - h) a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.packing import compute_dtype
from flame.models.reference.simple_gla import chunk_simple_gla


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention over packed documents; arguments and results as in `chunk_simple_gla`."""
    return chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=retention_decay(q.shape[2], q.device).to(compute_dtype(q, k, v)),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


fused_chunk_retention = chunk_retention


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, reverse: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`chunk_retention` behind the signature of FLA's recurrent kernel."""
    if reverse:
        raise UserError("the reference backend has retention forward in time only")
    return chunk_retention(q, k, v, scale, **options)


def retention_decay(num_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Log decay a token of every head, float64 [H] (section 2.2 of the paper)."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(num_heads, dtype=torch.float64, device=device)))
