"""Kimi delta attention (arXiv:2510.26692): the gated delta rule with a decay per key channel, chunked.

Recurrence per value head, with state S [K, V], log decays g_t [K] and writing strength b_t:

    S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T,   u_t = b_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)
    o_t = scale * S_t^T q_t

As in delta_rule.py the u_t of a chunk solve a unit lower triangular system. Its entries, and the weights of the
output, are products sum_d x_id k_jd exp(G_id - G_jd) with G the cumulated log decay: they do not factor safely over
the whole chunk and are built from blocks, as in gla.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.delta_rule import check_heads, scan_writes, solve_writes, writing_strength
from flame.models.reference.gla import Decays
from flame.models.reference.norms import l2norm
from flame.models.reference.packing import (
    ChunkLayout,
    compute_dtype,
    document_lengths,
    final_states,
    initial_states,
)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention over packed documents.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V]; HV a multiple of H: value head i reads query and key head i // (HV // H).
        g: [B, T, HV, K] log decays, or with `use_gate_in_kernel` the input of `channel_gate`.
        beta: [B, T, HV] writing strength, or its logit with `use_beta_sigmoid_in_kernel` (doubled by
            `allow_neg_eigval`).
        scale: factor of the output, K**-0.5 by default.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`.
        A_log, dt_bias, lower_bound: of `channel_gate`, for `use_gate_in_kernel`.
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        safe_gate, disable_recompute, cu_seqlens_cpu: choices of FLA's kernels, which do not change the result.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final states (float32, laid out like `initial_state`) or None.
    """
    refused = [name for name, value in options.items() if value]
    if refused:
        raise UserError(f"the reference Kimi delta attention does not have {', '.join(refused)}")
    check_heads(k, v)
    dtype = compute_dtype(q, k, v, g, beta)
    beta = writing_strength(beta.to(dtype), use_beta_sigmoid_in_kernel, allow_neg_eigval)
    g, out_dtype = g.to(dtype), q.dtype
    if use_gate_in_kernel:
        g = channel_gate(g, A_log, dt_bias, lower_bound)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.to(dtype)), l2norm(k.to(dtype))
    layout = ChunkLayout.build(document_lengths(*q.shape[:2], cu_seqlens), q.device, chunk_size)
    to_chunks = partial(layout.to_chunks, dtype=dtype, num_heads=v.shape[2])
    q_chunks = to_chunks(q) * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = initial_states(initial_state, layout, (v.shape[2], k.shape[3], v.shape[3]), state_v_first, like=q_chunks)
    decays = Decays(to_chunks(g))
    o, finished = _attend(q_chunks, to_chunks(k), to_chunks(v), decays, to_chunks(beta), state, layout.active)
    o = layout.from_chunks(o, like=v).to(out_dtype)
    return o, final_states(finished, layout, state_v_first) if output_final_state else None


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` behind the name of FLA's recurrent kernel."""
    return chunk_kda(q, k, v, g, beta, **options)


def channel_gate(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """Log decays -exp(A_log) softplus(x + dt_bias), or lower_bound * sigmoid(exp(A_log) (x + dt_bias)).

    Args:
        x: [..., H, K]; A_log: [H], may be None (0) with a lower bound; dt_bias: [H * K] or None.
        lower_bound: most negative log decay a token.
    """
    if A_log is None and lower_bound is None:
        raise UserError("use_gate_in_kernel needs A_log or lower_bound")
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).view(x.shape[-2:])
    rate = 1.0 if A_log is None else A_log.to(x.dtype).exp()[:, None]
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, decays: Decays, beta: Tensor, state: Tensor, active: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all chunks and the states of finished documents, first finished first.

    Args:
        q (scaled), k: [M, H, C, K]; v: [M, H, C, V]; beta: [M, H, C]; M chunks in `ChunkLayout` order.
        decays: of K channels.
        state: [N, H, K, V] at the documents' starts.
        active: documents with a chunk at each step.
    """
    attention, products = decayed_products(torch.stack([q, k]), k, decays)
    from_start, beta = decays.from_start(), beta[..., None]
    u_own, w = solve_writes(products * beta, v * beta, k * from_start * beta)
    keys_to_end = (k * decays.to_end()).transpose(-1, -2)
    states, writes, finished = scan_writes(u_own, w, keys_to_end, decays.whole()[..., None], state, active)
    return (q * from_start) @ states + attention @ writes, finished


def decayed_products(x: Tensor, k: Tensor, decays: Decays) -> Tensor:
    """[..., i, j] = sum_d x_id k_jd exp(G_id - G_jd) for j <= i, else 0: [..., M, H, C, C].

    Blocks on the diagonal grow from single tokens: two neighbours of size `half` and the products of the second's
    tokens with the first's make one of twice the size.

    Args:
        x: [..., M, H, C, K]; k: [M, H, C, K].
    """
    blocks = (x * k).sum(-1)[..., None, None]  # [..., M, H, C, 1, 1]
    half = 1
    while half < k.shape[2]:
        before, after = decays.around_borders(half)
        x_second = x.unflatten(-2, (-1, 2 * half))[..., half:, :] * after
        k_first = k.unflatten(-2, (-1, 2 * half))[..., :half, :] * before
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        lower = torch.cat([x_second @ k_first.transpose(-1, -2), second], dim=-1)
        blocks = torch.cat([F.pad(first, (0, half)), lower], dim=-2)  # [..., C / (2 half), 2 half, 2 half]
        half *= 2
    return blocks.squeeze(-3)
