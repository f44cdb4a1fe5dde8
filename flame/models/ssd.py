"""State space duality of Mamba-2 (arXiv:2405.21060) as linear attention with one decay per head and token.

Each head carries a state S [N, P], decayed by a scalar and written to by an outer product,

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t,

which is linear attention with queries C, keys B, values dt x and log decays dt A (section 3.1 and figure 4 there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flame.models.reference.packing import compute_dtype

LinearAttention = Callable[..., tuple[Tensor, Tensor | None]]


def make_ssd(linear_attention: LinearAttention) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`ssd` on that operator."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **options: Any) -> tuple:
        return ssd(x, dt, A, B, C, linear_attention, *args, **options)

    return scan


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    linear_attention: LinearAttention,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scan packed documents.

    Args:
        x: [B, T, H, P]; dt: [B, T, H] positive step sizes; A: [H], negative.
        B, C: [B, T, G, N]; the first H / G heads share the first group, and so on.
        linear_attention: FLA's `chunk_simple_gla` or the reference of that name.
        D: [H] or [H, P], of the skip connection: D x is added to y. None without.
        initial_state: [num_documents, H, N, P]; zeros by default.
        cu_seqlens: [num_documents + 1] bounds of one packed row, the last T; without it each row is a document.

    Returns:
        y [B, T, H, P] in x's dtype, and the final states [num_documents, H, N, P] (float32) or None.
    """

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple:
        keys, queries = (_repeat_groups(tensor, x.shape[2]) for tensor in (B, C))
        values = (x * dt[..., None]).to(x.dtype)
        options = dict(scale=1.0, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return linear_attention(queries, keys, values, g=dt * A, initial_state=state, **options)

    if torch.is_grad_enabled():
        # Repeated for every head, B and C are many times the size of x; the backward pass repeats them anew.
        once_more = dict(use_reentrant=False, preserve_rng_state=False)
        y, state = checkpoint(run, x, dt, A, B, C, initial_state, **once_more)
    else:
        y, state = run(x, dt, A, B, C, initial_state)
    return _add_skip(y, x, D), state


def ssd_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """`ssd` of rows of one token, T = 1, for decoding; always returns the states."""
    dtype = compute_dtype(x, dt, initial_state)
    num_heads = x.shape[2]
    keys, queries = (_repeat_groups(tensor, num_heads)[:, 0].to(dtype) for tensor in (B, C))  # [B, H, N]
    values = x[:, 0].to(dtype) * dt[:, 0, :, None]
    decay = torch.exp(dt[:, 0] * A)[..., None, None]
    state = initial_state * decay + keys[..., None] * values[:, :, None]
    y = (state * queries[..., None]).sum(-2)
    return _add_skip(y[:, None].to(x.dtype), x, D), state


def _add_skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    return y if D is None else torch.addcmul(y, x, D.to(x.dtype).view(x.shape[2], -1))


def _repeat_groups(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, G, N] -> [B, T, H, N]."""
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)
