"""The generalised delta rule, whose state moves by a diagonal plus a low-rank matrix (RWKV-7), chunked.

Recurrence per head, with state S [K, V] and a log decay g_t [K] per key channel:

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   o_t = scale * S_t^T q_t

Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456), where q is called r, g is called w,
a is -kappa and b is kappa times the in-context learning rate. What token t reads before it writes is u_t = S_{t-1}^T
a_t. Within a chunk that starts from S, with G the cumulated log decay, the u_t solve a unit lower triangular system:

    u_t = (exp(G_{t-1}) a_t)^T S + sum_{j<t} [a_t . exp(G_{t-1} - G_j) k_j] v_j + [a_t . exp(G_{t-1} - G_j) b_j] u_j

after which the u_j count as values beside the v_j, with the b_j as their keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.packing import (
    ChunkLayout,
    compute_dtype,
    document_lengths,
    final_states,
    initial_states,
)


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Generalised delta rule over packed documents.

    Args:
        q, k, a, b: [B, T, H, K]; v: [B, T, H, V]; gk: [B, T, H, K] log decay, at most 0.
        scale: factor of the output, K**-0.5 by default.
        initial_state: [N, H, K, V].
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        chunk_size: 64 by default, a power of two.
        cu_seqlens_cpu, safe_gate, disable_recompute, lower_bound: hints for FLA's kernels, not needed here.

    Returns:
        o [B, T, H, V] in q's dtype, and the final states [N, H, K, V] (float32) or None.
    """
    if cp_context is not None:
        raise UserError("the reference backend does not have context parallelism for the generalised delta rule")
    dtype, out_dtype = compute_dtype(q, k, v, a, b, gk), q.dtype
    layout = ChunkLayout.build(document_lengths(*q.shape[:2], cu_seqlens), q.device, chunk_size or 64)
    to_chunks = partial(layout.to_chunks, dtype=dtype)
    q_chunks = to_chunks(q) * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = initial_states(initial_state, layout, (k.shape[2], k.shape[3], v.shape[3]), False, like=q_chunks)
    o, finished = _scan_chunks(q_chunks, *map(to_chunks, (k, v, a, b, gk)), state, layout.active)
    o = layout.from_chunks(o, like=v).to(out_dtype)
    return o, final_states(finished, layout, False) if output_final_state else None


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_dplr_delta_rule` behind the signature of FLA's recurrent kernel."""
    if reverse:
        raise UserError("the reference backend has the generalised delta rule forward in time only")
    return chunk_dplr_delta_rule(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7's form of the rule: the removal key kk [B, T, H, K] and the learning rate a give a := -kk, b := kk a."""
    return fused_recurrent_dplr_delta_rule(r, k, v, -kk, kk * a, w, scale, *args, **options)


def _scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, state: Tensor, active: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all chunks and the states of finished documents, first finished first.

    Args:
        q (scaled), k, a, b, g: [M, H, C, K]; v: [M, H, C, V]; M chunks in `ChunkLayout` order.
        state: [N, H, K, V] at the documents' starts.
        active: documents with a chunk at each step.
    """
    # float64 keeps the differences of cumulated decays exact enough when a strong decay precedes weak ones.
    through = g.double().cumsum(2)  # with the token's own decay
    before = through - g.double()
    from_start = through.to(q.dtype).exp()
    to_end = (through[:, :, -1:] - through).to(q.dtype).exp()
    q_products, a_products = _decayed_products(torch.stack([q, a]), torch.stack([through, before]), k, b, through)
    diagonal = torch.stack([(q * k).sum(-1), (q * b).sum(-1)]).diag_embed()
    q_k, q_b = q_products + diagonal  # [M, H, C, C]
    a_k, a_b = a_products

    right = torch.cat([a_k @ v, a * before.to(q.dtype).exp()], dim=-1)
    solved = torch.linalg.solve_triangular(-a_b, right, upper=False, unitriangular=True)
    u_own, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # u = u_own + w S, S the state at the chunk's start
    keys_to_end = torch.cat([k * to_end, b * to_end], dim=2).transpose(-1, -2)  # [M, H, K, 2 C]
    decay = from_start[:, :, -1, :, None]

    states, reads, finished = [], [], []
    inputs = zip(*(x.split(active) for x in (u_own, w, v, keys_to_end, decay)), strict=True)
    for u_step, w_step, v_step, key_step, decay_step in inputs:
        if len(u_step) < len(state):
            finished.append(state[len(u_step) :])
            state = state[: len(u_step)]
        states.append(state)
        read = u_step + w_step @ state
        reads.append(read)
        state = decay_step * state + key_step @ torch.cat([v_step, read], dim=2)
    finished.append(state)
    if not states:
        return torch.zeros_like(v), finished
    o = (q * from_start) @ torch.cat(states) + q_k @ v + q_b @ torch.cat(reads)
    return o, finished


def _decayed_products(rows: Tensor, rows_total: Tensor, k: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """sum_d x_id exp(X_id - G_jd) y_jd for j < i, else 0; for rows x in (q, a) and keys y in (k, b).

    A chunk is halved again and again. Second halves meet first ones with the exponential split at the border between
    them, where both factors are at most 1 (splitting it at the chunk's start would overflow).

    Args:
        rows: [2, M, H, C, K], with log decays `rows_total` (float64) that are at most those of the token before.
        k, b: [M, H, C, K]; total: their cumulated log decay, float64.

    Returns:
        [2 (q, a), 2 (k, b), M, H, C, C].
    """
    num_chunks, num_heads, chunk_size, _ = k.shape
    keys = torch.stack([k, b])
    # Squares on the diagonal, of a size that doubles: [2, 2, M, H, C / half, half, half].
    squares = k.new_zeros(2, 2, num_chunks, num_heads, chunk_size, 1, 1)
    half = 1
    while half < chunk_size:
        first, second = slice(None, half), slice(half, None)
        pairs_total = total.unflatten(2, (-1, 2 * half))
        border = pairs_total[..., half - 1 : half, :]
        late = (rows_total.unflatten(3, (-1, 2 * half))[..., second, :] - border).to(k.dtype).exp()
        early = (border - pairs_total[..., first, :]).to(k.dtype).exp()
        x = rows.unflatten(3, (-1, 2 * half))[..., second, :] * late  # [2, M, H, pairs, half, K]
        y = keys.unflatten(3, (-1, 2 * half))[..., first, :] * early
        products = x[:, None] @ y[None].transpose(-1, -2)
        upper_left, lower_right = squares.unflatten(4, (-1, 2)).unbind(5)
        upper = torch.cat([upper_left, torch.zeros_like(upper_left)], dim=-1)
        squares = torch.cat([upper, torch.cat([products, lower_right], dim=-1)], dim=-2)
        half *= 2
    return squares.squeeze(4)
