"""The delta rule and its gated form, chunked.

Recurrence per head, with state S [K, V], log decay g_t (0 without gate) and writing strength b_t:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = b_t (v_t - (exp(g_t) S_{t-1})^T k_t),   o_t = scale * S_t^T q_t

Sources: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv:2406.06484) and "Gated
Delta Networks" (arXiv:2412.06464). Within a chunk the u_t solve a unit lower triangular system (the WY form), so a
chunk costs one batched triangular solve and a few matrix products. Decays enter only as exp of a sum of log decays
between two positions, which is <= 0: nothing overflows however strong the decay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.norms import l2norm
from flame.models.reference.packing import (
    ChunkLayout,
    compute_dtype,
    document_lengths,
    final_states,
    initial_states,
)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over packed documents.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V]; HV a multiple of H: value head i reads query and key head i // (HV // H).
        g: [B, T, HV] log decay, or with `use_gate_in_kernel` the input x of -exp(A_log) softplus(x + dt_bias).
        beta: [B, T, HV] writing strength, or its logit with `use_beta_sigmoid_in_kernel` (doubled by
            `allow_neg_eigval`, which lets eigenvalues reach -1, arXiv:2411.12537).
        scale: factor of the output, K**-0.5 by default.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`.
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        cu_seqlens_cpu, chunk_indices: FLA's precomputed forms of `cu_seqlens`, not needed here.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final states (float32, laid out like `initial_state`) or None.
    """
    if cp_context is not None:
        raise UserError("the reference backend does not have context parallelism for the gated delta rule")
    dtype, out_dtype = compute_dtype(q, k, v, g, beta), q.dtype
    check_heads(k, v)
    beta = writing_strength(beta.to(dtype), use_beta_sigmoid_in_kernel, allow_neg_eigval)
    g = g.to(dtype)
    if use_gate_in_kernel:
        g = decay_gate(g, A_log.to(dtype), None if dt_bias is None else dt_bias.to(dtype))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.to(dtype)), l2norm(k.to(dtype))
    layout = ChunkLayout.build(document_lengths(*q.shape[:2], cu_seqlens), q.device, chunk_size)
    to_chunks = partial(layout.to_chunks, dtype=dtype, num_heads=v.shape[2])
    q_chunks = to_chunks(q) * (k.shape[-1] ** -0.5 if scale is None else scale)
    state = initial_states(initial_state, layout, (v.shape[2], k.shape[3], v.shape[3]), state_v_first, like=q_chunks)
    o, finished = _scan_chunks(q_chunks, *map(to_chunks, (k, v, g, beta)), state, layout.active)
    o = layout.from_chunks(o, like=v).to(out_dtype)
    return o, final_states(finished, layout, state_v_first) if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` behind the signature of FLA's recurrent kernel; g and beta default to 0 and 1."""
    if gk is not None or gv is not None or args:
        raise UserError("the reference gated delta rule has scalar decays (g) and takes its options by keyword only")
    g = v.new_zeros(v.shape[:3]) if g is None else g
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return chunk_gated_delta_rule(q, k, v, g, beta, **options)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule without decay: `chunk_gated_delta_rule` with g = 0, states [N, H, K, V]."""
    return chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=v.new_zeros(v.shape[:3]),
        beta=v.new_ones(v.shape[:3]) if beta is None else beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


fused_recurrent_delta_rule = chunk_delta_rule


def decay_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """Log decay -exp(A_log) softplus(x + dt_bias) of Mamba-2 (arXiv:2405.21060) and the gated delta net, [..., H]."""
    return -A_log.exp() * F.softplus(x if dt_bias is None else x + dt_bias)


def check_heads(k: Tensor, v: Tensor) -> None:
    """Refuse value heads that do not share key heads evenly; k [B, T, H, K], v [B, T, HV, V]."""
    if v.shape[2] % k.shape[2]:
        raise UserError(f"{v.shape[2]} value heads is not a multiple of {k.shape[2]} key heads")


def writing_strength(beta: Tensor, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Tensor:
    """beta, or from its logit sigmoid(beta), doubled with `allow_neg_eigval`."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise UserError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    return beta.sigmoid() * (2 if allow_neg_eigval else 1) if use_beta_sigmoid_in_kernel else beta


def _scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, active: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all chunks and the states of finished documents, first finished first.

    Args:
        q (scaled), k: [M, H, C, K]; v: [M, H, C, V]; g, beta: [M, H, C]; M chunks in `ChunkLayout` order.
        state: [N, H, K, V] at the documents' starts.
        active: documents with a chunk at each step.
    """
    dtype, chunk_size = q.dtype, q.shape[2]
    # Differences of the cumulated decay are formed in float64: in float32 a strong decay early in the chunk (a sum of
    # -1000 and more) would leave the later, weak ones with an absolute error of 1e-4 in the exponent.
    total = g.double().cumsum(-1)  # [M, H, C], sum of log decays from the chunk's start through each token
    from_start = total.to(dtype).exp()
    to_end = (total[..., -1:] - total).to(dtype).exp()
    ones = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device)
    between = (total[..., :, None] - total[..., None, :]).to(dtype)
    between = between.masked_fill(ones.triu(1), -torch.inf).exp()  # [M, H, C, C], 0 above the diagonal

    system = k @ k.transpose(-1, -2) * between * beta[..., None]
    u_own, w = solve_writes(system, v * beta[..., None], k * (beta * from_start)[..., None])
    keys_to_end = (k * to_end[..., None]).transpose(-1, -2)
    states, writes, finished = scan_writes(u_own, w, keys_to_end, from_start[..., -1, None, None], state, active)
    attention = q @ k.transpose(-1, -2) * between
    return (q * from_start[..., None]) @ states + attention @ writes, finished


def solve_writes(system: Tensor, values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """What a chunk writes as a function of the state S at its start: u = u_own - w S.

    Args:
        system: [M, H, C, C] decayed products of keys times beta of the row; only what is below the diagonal counts.
        values: [M, H, C, V] times beta; keys: [M, H, C, K] times beta and the decay since the chunk's start.

    Returns:
        u_own [M, H, C, V] and w [M, H, C, K].
    """
    right = torch.cat([values, keys], dim=-1)
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    return solved.split([values.shape[-1], keys.shape[-1]], dim=-1)


def scan_writes(
    u_own: Tensor, w: Tensor, keys_to_end: Tensor, decay: Tensor, state: Tensor, active: list[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """States [M, H, K, V] at the chunks' starts, writes u [M, H, C, V], and finished documents' states.

    Args:
        u_own, w: of `solve_writes`; keys_to_end: [M, H, K, C]; decay: [M, H, K or 1, 1] through the whole chunk.
        state: [N, H, K, V] at the documents' starts.
        active: documents with a chunk at each step.
    """
    states, writes, finished = [u_own.new_zeros(0, *state.shape[1:])], [u_own[:0]], []
    inputs = zip(*(x.split(active) for x in (u_own, w, keys_to_end, decay)), strict=True)
    for u_step, w_step, key_step, decay_step in inputs:
        if len(u_step) < len(state):
            finished.append(state[len(u_step) :])
            state = state[: len(u_step)]
        states.append(state)
        write = u_step - w_step @ state
        writes.append(write)
        state = decay_step * state + key_step @ write
    finished.append(state)
    return torch.cat(states), torch.cat(writes), finished
