"""Linear attention with one decay per head and token, chunked.

Recurrence per head, with state S [K, V] and log decay g_t:

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t

Sources: the scalar gate of Mamba-2 (arXiv:2405.21060) and, with a constant decay per head, retention
(arXiv:2307.08621). A chunk multiplies the causal products q k^T by exp of the log decays between two tokens, <= 1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flame.models.reference.packing import (
    ChunkLayout,
    compute_dtype,
    document_lengths,
    final_states,
    initial_states,
    scan_states,
)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with scalar decays over packed documents.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V].
        g: [B, T, H] log decay of every token.
        g_gamma: [H] constant log decay of every head, instead of or on top of `g`; none when both are None.
        scale: factor of the output, K**-0.5 by default.
        initial_state: [N, H, K, V], or [N, H, V, K] with `state_v_first`.
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        cu_seqlens_cpu: FLA's copy of `cu_seqlens`, not needed here.

    Returns:
        o [B, T, H, V] in q's dtype, and the final states (float32, laid out like `initial_state`) or None.
    """
    dtype = compute_dtype(q, k, v, g, g_gamma)
    log_decay = q.new_zeros(q.shape[:3], dtype=dtype) if g is None else g.to(dtype)
    if g_gamma is not None:
        log_decay = log_decay + g_gamma.to(dtype)
    layout = ChunkLayout.build(document_lengths(*q.shape[:2], cu_seqlens), q.device, chunk_size or 64)
    to_chunks = partial(layout.to_chunks, dtype=dtype)
    q_chunks = to_chunks(q) * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = initial_states(initial_state, layout, (k.shape[2], k.shape[3], v.shape[3]), state_v_first, like=q_chunks)
    o, finished = _attend(q_chunks, *map(to_chunks, (k, v, log_decay)), state, layout.active)
    o = layout.from_chunks(o, like=v).to(q.dtype)
    return o, final_states(finished, layout, state_v_first) if output_final_state else None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, active: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all chunks and the states of finished documents, first finished first.

    Args:
        q (scaled), k: [M, H, C, K]; v: [M, H, C, V]; g: [M, H, C]; M chunks in `ChunkLayout` order.
        state: [N, H, K, V] at the documents' starts.
        active: documents with a chunk at each step.
    """
    dtype, chunk_size = q.dtype, q.shape[2]
    # float64 keeps the differences of cumulated decays exact enough when a strong decay precedes weak ones.
    total = g.double().cumsum(-1)  # [M, H, C]
    from_start = total.to(dtype).exp()[..., None]
    to_end = (total[..., -1:] - total).to(dtype).exp()[..., None]
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).to(dtype).masked_fill(future, -torch.inf).exp()

    writes = (k * to_end).transpose(-1, -2) @ v  # [M, H, K, V]
    states, finished = scan_states(from_start[..., -1:, :], writes, state, active)
    return (q * from_start) @ states + (q @ k.transpose(-1, -2) * between) @ v, finished
