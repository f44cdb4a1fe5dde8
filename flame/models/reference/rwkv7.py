"""What RWKV-7 (arXiv:2503.14456) computes around its recurrence, element by element.

All compute in float32 (float64 for float64 input) and return the dtype of their first argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flame.models.reference.packing import compute_dtype


def fused_addcmul_rwkv7(
    hidden_states: Tensor,
    delta: Tensor,
    xr: Tensor,
    xw: Tensor,
    xk: Tensor,
    xv: Tensor,
    xa: Tensor,
    xg: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The six mixtures x + delta * mix of each token with its predecessor (delta: predecessor minus token).

    Args:
        hidden_states, delta: [B, T, D]; the mixes: [1, 1, D].

    Returns:
        [B, T, D] for each mix, None for a missing xg.
    """
    dtype = compute_dtype(hidden_states)
    x, difference = hidden_states.to(dtype), delta.to(dtype)
    mixes = (None if mix is None else mix.to(dtype) for mix in (xr, xw, xk, xv, xa, xg))
    return tuple(None if mix is None else torch.addcmul(x, difference, mix).to(hidden_states.dtype) for mix in mixes)


def fused_k_rwkv7(
    k: Tensor, a: Tensor, ka: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """The written key k (1 + (a - 1) ka) of k, a [B, T, D] and ka [D]; the document bounds are not needed here."""
    dtype = compute_dtype(k)
    return (k.to(dtype) * (1 + (a.to(dtype) - 1) * ka.to(dtype))).to(k.dtype)


def gate_output_correction(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """(o + bonus) g, where a head's bonus is its v times the weighted product of r and k.

    Args:
        o, g: [B, T, H * V]; r, k: [B, T, H, K]; v: [B, T, H, V]; r_k: [H, K].
    """
    dtype = compute_dtype(o)
    o_heads, r, k, r_k, v, gate = (x.to(dtype) for x in (o, r, k, r_k, v, g))
    bonus = (r * k * r_k).sum(-1, keepdim=True) * v  # [B, T, H, V]
    return ((o_heads + bonus.flatten(2)) * gate).to(o.dtype)
