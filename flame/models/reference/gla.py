"""Gated linear attention (arXiv:2312.06635), chunked.

Recurrence per head, with state S [K, V] and a log decay g_t [K] per key channel:

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t

Within a chunk, o_i gathers v_j with weight sum_d q_id k_jd exp(G_id - G_jd), G the cumulated log decay. Splitting the
exponential as exp(G_i) exp(-G_j) overflows once a chunk's decay passes -88. Here the chunk is halved again and again:
each token of a second half attends to each token of the first half beside it, with the exponential split at the border
between the halves, exp(G_i - G_border) exp(G_border - G_j), both <= 1 for log decays <= 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.packing import (
    ChunkLayout,
    compute_dtype,
    document_lengths,
    final_states,
    initial_states,
)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention over packed documents.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; g: [B, T, H, K] log decay, none when None.
        scale: factor of the output, K**-0.5 by default.
        initial_state: [N, H, K, V], or [N, H, V, K] with `state_v_first`.
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        cu_seqlens_cpu: FLA's copy of `cu_seqlens`, not needed here.

    Returns:
        o [B, T, H, V] in q's dtype, and the final states (float32, laid out like `initial_state`) or None.
    """
    dtype, out_dtype = compute_dtype(q, k, v, g), q.dtype
    g = torch.zeros_like(k) if g is None else g
    layout = ChunkLayout.build(document_lengths(*q.shape[:2], cu_seqlens), q.device, chunk_size)

    def to_chunks(x: Tensor) -> Tensor:  # [B, T, H, D] -> [num_chunks, H, C, D]
        return layout.pad(x.to(dtype).flatten(0, 1)).transpose(1, 2)

    q_chunks = to_chunks(q) * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = initial_states(initial_state, layout, (k.shape[2], k.shape[3], v.shape[3]), state_v_first, like=q_chunks)
    o, finished = _scan_chunks(q_chunks, *map(to_chunks, (k, v, g)), state, layout.active)
    o = layout.unpad(o.transpose(1, 2)).view_as(v).to(out_dtype)
    return o, final_states(finished, layout, state_v_first) if output_final_state else None


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gla` behind the signature of FLA's recurrent kernel."""
    if gv is not None or reverse or options:
        raise UserError("the reference backend has gated linear attention with key decays (gk), forward in time, only")
    return chunk_gla(q, k, v, gk, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fused_chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`chunk_gla`; FLA has withdrawn its own kernel of this name."""
    return chunk_gla(q, k, v, g, **options)


def _scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, active: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all chunks and the states of finished documents, first finished first.

    Args:
        q (scaled), k, g: [M, H, C, K]; v: [M, H, C, V]; M chunks in `ChunkLayout` order.
        state: [N, H, K, V] at the documents' starts.
        active: documents with a chunk at each step.
    """
    # float64 keeps the differences of cumulated decays exact enough when a strong decay precedes weak ones.
    total = g.double().cumsum(2)
    from_start = total.to(q.dtype).exp()
    to_end = (total[:, :, -1:] - total).to(q.dtype).exp()
    writes = (k * to_end).transpose(-1, -2) @ v  # [M, H, K, V]
    decay = from_start[:, :, -1, :, None]

    states, finished = [], []
    for decay_step, write_step in zip(decay.split(active), writes.split(active), strict=True):
        if len(write_step) < len(state):
            finished.append(state[len(write_step) :])
            state = state[: len(write_step)]
        states.append(state)
        state = torch.addcmul(write_step, decay_step, state)
    finished.append(state)
    if not states:
        return torch.zeros_like(v), finished
    return (q * from_start) @ torch.cat(states) + _within_chunk(q, k, v, total), finished


def _within_chunk(q: Tensor, k: Tensor, v: Tensor, total: Tensor) -> Tensor:
    """Causal attention within chunks, [M, H, C, V]; `total` [M, H, C, K] is the inclusive cumulated log decay."""
    o = (q * k).sum(-1, keepdim=True) * v
    chunk_size = q.shape[2]
    half = chunk_size // 2
    while half >= 1:
        first, second = slice(None, half), slice(half, None)
        q_pairs, k_pairs, v_pairs, total_pairs = (x.unflatten(2, (-1, 2 * half)) for x in (q, k, v, total))
        border = total_pairs[..., half - 1 : half, :]
        q_second = q_pairs[..., second, :] * (total_pairs[..., second, :] - border).to(q.dtype).exp()
        k_first = k_pairs[..., first, :] * (border - total_pairs[..., first, :]).to(q.dtype).exp()
        seen = q_second @ k_first.transpose(-1, -2) @ v_pairs[..., first, :]  # [M, H, C / (2 half), half, V]
        o = o + F.pad(seen, (0, 0, half, 0)).flatten(2, 3)
        half //= 2
    return o
