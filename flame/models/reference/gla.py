"""Gated linear attention (arXiv:2312.06635), chunked.

Recurrence per head, with state S [K, V], a log decay g_t [K] per key channel and, in its general form, one h_t [V] per
value channel:

    S_t = diag(exp(g_t)) S_{t-1} diag(exp(h_t)) + k_t v_t^T,   o_t = scale * S_t^T q_t

Within a chunk, o_i gathers v_j with weight sum_d q_id k_jd exp(G_id - G_jd), G the cumulated log decay. Splitting the
exponential as exp(G_i) exp(-G_j) overflows once a chunk's decay passes -88. Here the chunk is halved again and again:
each token of a second half attends to each token of the first half beside it, with the exponential split at the border
between the halves, exp(G_i - G_border) exp(G_border - G_j), both <= 1 for log decays <= 0. Decays of value channels
split in the same way, onto v_j and o_i.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.packing import (
    ChunkLayout,
    compute_dtype,
    document_lengths,
    final_states,
    initial_states,
    scan_states,
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
    return _gated_linear_attention(
        q, k, v, g, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, chunk_size
    )


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
    """`chunk_gla` behind the signature of FLA's recurrent kernel, with log decays gv [B, T, H, V] of value channels."""
    if reverse or options:
        raise UserError("the reference backend has gated linear attention forward in time only, without g and g_gamma")
    return _gated_linear_attention(q, k, v, gk, gv, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def _gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    dtype, out_dtype = compute_dtype(q, k, v, gk, gv), q.dtype
    layout = ChunkLayout.build(document_lengths(*q.shape[:2], cu_seqlens), q.device, chunk_size)
    to_chunks = partial(layout.to_chunks, dtype=dtype)

    def decays(g: Tensor | None) -> Decays | None:
        return None if g is None else Decays(to_chunks(g))

    q_chunks = to_chunks(q) * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = initial_states(initial_state, layout, (k.shape[2], k.shape[3], v.shape[3]), state_v_first, like=q_chunks)
    o, finished = _attend(q_chunks, to_chunks(k), to_chunks(v), decays(gk), decays(gv), state, layout.active)
    o = layout.from_chunks(o, like=v).to(out_dtype)
    return o, final_states(finished, layout, state_v_first) if output_final_state else None


class Decays:
    """Factors exp(difference of cumulated log decays) within chunks.

    Args:
        g: [M, H, C, D] log decays.
    """

    def __init__(self, g: Tensor) -> None:
        # float64 keeps the differences of cumulated decays exact enough when a strong decay precedes weak ones.
        self.total = g.double().cumsum(2)
        self.dtype = g.dtype

    def from_start(self) -> Tensor:
        """From the state at the chunk's start to each token, [M, H, C, D]."""
        return self.total.to(self.dtype).exp()

    def to_end(self) -> Tensor:
        """From each token to the chunk's end, [M, H, C, D]."""
        return (self.total[:, :, -1:] - self.total).to(self.dtype).exp()

    def whole(self) -> Tensor:
        """Through the whole chunk, [M, H, D]."""
        return self.total[:, :, -1].to(self.dtype).exp()

    def around_borders(self, half: int) -> tuple[Tensor, Tensor]:
        """From first halves of blocks of 2 `half` tokens to the border, from there to the second halves.

        Both are [M, H, C / (2 half), half, D].
        """
        pairs = self.total.unflatten(2, (-1, 2 * half))
        border = pairs[..., half - 1 : half, :]
        before, after = border - pairs[..., :half, :], pairs[..., half:, :] - border
        return before.to(self.dtype).exp(), after.to(self.dtype).exp()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, gk: Decays | None, gv: Decays | None, state: Tensor, active: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all chunks and the states of finished documents, first finished first.

    Args:
        q (scaled), k: [M, H, C, K]; v: [M, H, C, V]; M chunks in `ChunkLayout` order.
        gk: of K channels; gv: of V channels.
        state: [N, H, K, V] at the documents' starts.
        active: documents with a chunk at each step.
    """
    k_end, v_end, q_start, decay = k, v, q, q.new_ones(len(q), 1, 1, 1)
    if gk is not None:
        k_end, q_start, decay = k * gk.to_end(), q * gk.from_start(), gk.whole()[..., :, None]
    if gv is not None:
        v_end, decay = v * gv.to_end(), decay * gv.whole()[..., None, :]
    states, finished = scan_states(decay, k_end.transpose(-1, -2) @ v_end, state, active)
    before = q_start @ states
    if gv is not None:
        before = before * gv.from_start()
    return before + _within_chunk(q, k, v, gk, gv), finished


def _within_chunk(q: Tensor, k: Tensor, v: Tensor, gk: Decays | None, gv: Decays | None) -> Tensor:
    """Causal attention within chunks, [M, H, C, V]."""
    o = (q * k).sum(-1, keepdim=True) * v
    half = q.shape[2] // 2
    while half >= 1:
        q_pairs, k_pairs, v_pairs = (x.unflatten(2, (-1, 2 * half)) for x in (q, k, v))
        q_second, k_first, v_first = q_pairs[..., half:, :], k_pairs[..., :half, :], v_pairs[..., :half, :]
        if gk is not None:
            before, after = gk.around_borders(half)
            q_second, k_first = q_second * after, k_first * before
        if gv is not None:
            before, after = gv.around_borders(half)
            v_first = v_first * before
        seen = q_second @ k_first.transpose(-1, -2) @ v_first  # [M, H, C / (2 half), half, V]
        if gv is not None:
            seen = seen * after
        o = o + F.pad(seen, (0, 0, half, 0)).flatten(2, 3)
        half //= 2
    return o
