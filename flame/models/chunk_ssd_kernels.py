"""Triton kernels of Mamba-2's scan, chunk by chunk; `flame/models/chunk_ssd.py` launches them.

Dao and Gu 2024, Transformers are SSMs (arXiv:2405.21060), section 6: each head's state S [P, N] decays by exp(dt_t A) a
token and gains dt_t x_t B_t^T. With G_t the log2 decays added up from the start of a chunk of BT tokens, to G_last at
its end, a chunk computes

    y_t = 2^G_t S_start C_t + sum_{j <= t} w_tj (C_t . B_j) x_j + D x_t      w_tj = 2^(G_t - G_j) dt_j
    S_end = 2^G_last S_start + sum_j 2^(G_last - G_j) dt_j x_j B_j^T

The gradients have the same form backwards. Heads that follow each other share a group of B and C, so products of B and
C alone, and sums over heads, are taken once a group.

Pointers: x, y [B, T, H, P] and B, C [B, T, G, N], rows [H, P] and [G, N] contiguous and, of some, a ``stride`` apart;
dt and decays (G) float32 [B, T, H]; A and D float32 [H]; states [chunks, H, P, N]. Packed documents come as in
`flame/models/chunks_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flame.models.chunks_kernels import LOG2E, locate_chunk, locate_document


@triton.jit(do_not_specialize=["T"])
def ssd_forward_kernel(
    x, B, C, dt, A, D, states, decays, y, s_first, s_last, cu_seqlens, chunk_offsets, order, T,
    stride_x, stride_B, stride_C,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A document's chunks one after the other, one head a program.

    Gives y, or ``states`` at the chunks' starts with ``decays``; the others are None. ``s_first`` and ``s_last``
    [documents, H, N, P], before the first token and after the last, and D may be None.
    """
    pid = tl.program_id(0)
    i_h = pid % H
    i_g = i_h // (H // G)
    i_n, start, length, first_chunk = locate_document(cu_seqlens, chunk_offsets, order, pid // H, T, BT)
    i_nh = i_n * H + i_h
    r = tl.arange(0, BT)
    o_p = tl.arange(0, P)
    o_n = tl.arange(0, N)
    p_x = r[:, None] * stride_x + o_p[None, :]
    p_y = r[:, None] * (H * P) + o_p[None, :]
    p_s = o_p[:, None] * N + o_n[None, :]
    p_final = i_nh * (N * P) + o_p[:, None] + o_n[None, :] * P
    x += start * stride_x + i_h * P
    B += start * stride_B + i_g * N
    C += start * stride_C + i_g * N
    b_A = tl.load(A + i_h) * LOG2E

    b_s = tl.zeros([P, N], dtype=tl.float32)
    if s_first is not None:
        b_s += tl.load(s_first + p_final)
    for i in tl.range(0, tl.cdiv(length, BT), num_stages=STAGES):
        i_t = tl.cast(i, tl.int64)
        m_t = r < length - i_t * BT
        b_x = tl.load(x + i_t * BT * stride_x + p_x, mask=m_t[:, None], other=0.0)
        b_B = tl.load(B + i_t * BT * stride_B + r[:, None] * stride_B + o_n[None, :], mask=m_t[:, None], other=0.0)
        p_t = (start + i_t * BT) * H + i_h + r * H
        b_dt = tl.load(dt + p_t, mask=m_t, other=0.0)
        b_g = b_dt * b_A
        b_G = tl.cumsum(b_g, 0)
        b_last = tl.sum(b_g, 0)
        if states is not None:
            tl.store(states + ((first_chunk + i_t) * H + i_h) * (P * N) + p_s, b_s.to(states.dtype.element_ty))
            tl.store(decays + p_t, b_G, mask=m_t)
        if y is not None:
            b_C = tl.load(C + i_t * BT * stride_C + r[:, None] * stride_C + o_n[None, :], mask=m_t[:, None], other=0.0)
            b_w = tl.where(r[:, None] <= r[None, :], b_G[None, :] - b_G[:, None], float("-inf"))  # [j, t]
            b_scores = tl.dot(b_B, tl.trans(b_C)) * tl.math.exp2(b_w) * b_dt[:, None]
            b_y = tl.dot(b_s.to(b_C.dtype), tl.trans(b_C)) * tl.math.exp2(b_G)[None, :]  # [P, t]
            b_y = tl.trans(tl.dot(tl.trans(b_x), b_scores.to(b_x.dtype), b_y))
            if D is not None:
                b_y += tl.load(D + i_h) * b_x
            p_first = ((start + i_t * BT) * H + i_h) * P
            tl.store(y + p_first + p_y, b_y.to(y.dtype.element_ty), mask=m_t[:, None])
        # Not x: of what it has computed, a compiler may get the transposed product wrong.
        b_written = (b_B * (b_dt * tl.math.exp2(b_last - b_G))[:, None]).to(b_x.dtype)
        b_s = tl.dot(tl.trans(b_x), b_written, b_s * tl.math.exp2(b_last))
    if s_last is not None:
        tl.store(s_last + p_final, b_s)


@triton.jit(do_not_specialize=["T"])
def ssd_backward_kernel(
    B, C, dt, decays, D, dy, dstates, dx, ds_last, ds_first, cu_seqlens, chunk_offsets, order, T,
    stride_B, stride_C, stride_dx,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `ssd_forward_kernel`, from the last chunk to the first: ``dstates`` at the chunks' ends, and dx.

    ``ds_last`` and ``ds_first`` [documents, H, N, P], of the final and initial states, and D may be None.
    """
    pid = tl.program_id(0)
    i_h = pid % H
    i_g = i_h // (H // G)
    i_n, start, length, first_chunk = locate_document(cu_seqlens, chunk_offsets, order, pid // H, T, BT)
    i_nh = i_n * H + i_h
    r = tl.arange(0, BT)
    o_p = tl.arange(0, P)
    o_n = tl.arange(0, N)
    p_y = r[:, None] * (H * P) + o_p[None, :]
    p_s = o_p[:, None] * N + o_n[None, :]
    p_final = i_nh * (N * P) + o_p[:, None] + o_n[None, :] * P
    B += start * stride_B + i_g * N
    C += start * stride_C + i_g * N
    num_chunks = tl.cdiv(length, BT)

    b_ds = tl.zeros([P, N], dtype=tl.float32)
    if ds_last is not None:
        b_ds += tl.load(ds_last + p_final)
    for i in tl.range(0, num_chunks, num_stages=STAGES):
        i_t = tl.cast(num_chunks - 1 - i, tl.int64)
        left = length - i_t * BT
        m_t = r < left
        b_B = tl.load(B + i_t * BT * stride_B + r[:, None] * stride_B + o_n[None, :], mask=m_t[:, None], other=0.0)
        b_C = tl.load(C + i_t * BT * stride_C + r[:, None] * stride_C + o_n[None, :], mask=m_t[:, None], other=0.0)
        p_first = ((start + i_t * BT) * H + i_h) * P
        b_dy = tl.load(dy + p_first + p_y, mask=m_t[:, None], other=0.0)
        p_t = (start + i_t * BT) * H + i_h + r * H
        b_dt = tl.load(dt + p_t, mask=m_t, other=0.0)
        b_G = tl.load(decays + p_t, mask=m_t, other=0.0)
        b_last = tl.load(decays + (start + i_t * BT + min(left, BT) - 1) * H + i_h)
        tl.store(dstates + ((first_chunk + i_t) * H + i_h) * (P * N) + p_s, b_ds.to(dstates.dtype.element_ty))
        m_w = (r[:, None] >= r[None, :]) & m_t[:, None]  # [t, j]
        b_w = tl.math.exp2(tl.where(m_w, b_G[:, None] - b_G[None, :], float("-inf"))) * b_dt[None, :]
        b_scores = tl.dot(b_C, tl.trans(b_B)) * b_w
        b_dx = tl.dot(b_ds.to(b_B.dtype), tl.trans(b_B)) * (tl.math.exp2(b_last - b_G) * b_dt)[None, :]  # [P, j]
        b_dx = tl.trans(tl.dot(tl.trans(b_dy), b_scores.to(b_dy.dtype), b_dx))
        if D is not None:
            b_dx += tl.load(D + i_h) * b_dy
        p_dx = (start + i_t * BT) * stride_dx + i_h * P + r[:, None] * stride_dx + o_p[None, :]
        tl.store(dx + p_dx, b_dx.to(dx.dtype.element_ty), mask=m_t[:, None])
        b_read = (b_C * tl.math.exp2(b_G)[:, None]).to(b_dy.dtype)
        b_ds = tl.dot(tl.trans(b_dy), b_read, b_ds * tl.math.exp2(b_last))
    if ds_first is not None:
        tl.store(ds_first + p_final, b_ds)


@triton.jit(do_not_specialize=["T"])
def ssd_gradient_kernel(
    own, other, own_values, other_values, states, starts, dt, decays, d_own, dg, d_rest,
    cu_seqlens, chunk_indices, T, stride_own, stride_other, stride_own_values, stride_other_values, stride_d_own,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of C or B, and its share of that of the natural log decays, one chunk and group a program.

    C is ``own`` with B, dy, x and the states at the chunks' starts behind it, ``starts`` None, and in ``d_rest``
    [chunks, H] a share of the gradient of D. B is ``own`` with C, x, dy, the gradients of the states at the chunks'
    ends, ``starts``, and in ``d_rest`` [B, T, H] what dt gets for scaling x. ``d_own`` [B, T, G, N]; ``dg`` [B, T, H].

    Scores are summed over a group's heads before they meet the other's rows. Neither kind of program needs them
    transposed: the compilers of Triton 3.4 to 3.7.0 get the product of a transposed result wrong.
    """
    OF_B: tl.constexpr = starts is not None
    i_c, i_g, first, left = locate_chunk(cu_seqlens, chunk_indices, tl.program_id(0), T, G, BT)
    r = tl.arange(0, BT)
    m_t = r < left
    o_p = tl.arange(0, P)
    o_n = tl.arange(0, N)
    last = min(left, BT) - 1
    m_w = m_t[:, None] & m_t[None, :] & ((r[:, None] <= r[None, :]) if OF_B else (r[:, None] >= r[None, :]))
    p_own = first * stride_own + i_g * N + r[:, None] * stride_own + o_n[None, :]
    p_other = first * stride_other + i_g * N + r[:, None] * stride_other + o_n[None, :]
    p_own_values = r[:, None] * stride_own_values + o_p[None, :]
    p_other_values = r[:, None] * stride_other_values + o_p[None, :]
    own_values += first * stride_own_values
    other_values += first * stride_other_values
    b_own = tl.load(own + p_own, mask=m_t[:, None], other=0.0)
    b_other = tl.load(other + p_other, mask=m_t[:, None], other=0.0)
    b_scores = tl.dot(b_own, tl.trans(b_other))
    b_sum = tl.zeros([BT, BT], dtype=tl.float32)
    b_d = tl.zeros([BT, N], dtype=tl.float32)
    for i in tl.range(0, H // G, num_stages=STAGES):
        i_h = i_g * (H // G) + i
        b_u = tl.load(own_values + i_h * P + p_own_values, mask=m_t[:, None], other=0.0)
        b_v = tl.load(other_values + i_h * P + p_other_values, mask=m_t[:, None], other=0.0)
        p_s = (i_c * H + i_h) * (P * N) + o_p[:, None] * N + o_n[None, :]
        b_s = tl.load(states + p_s)
        p_t = first * H + i_h + r * H
        b_dt = tl.load(dt + p_t, mask=m_t, other=0.0)
        b_G = tl.load(decays + p_t, mask=m_t, other=0.0)
        b_uv = tl.dot(b_u, tl.trans(b_v))
        b_through = tl.dot(b_u, b_s)
        if OF_B:
            b_last = tl.load(decays + (first + last) * H + i_h)
            b_uv *= tl.math.exp2(tl.where(m_w, b_G[None, :] - b_G[:, None], float("-inf")))
            b_through *= tl.math.exp2(b_last - b_G)[:, None]
            b_states = tl.sum(b_through * b_own, 1)
            b_row = b_states + tl.sum(b_uv * b_scores, 1)
            tl.store(d_rest + p_t, b_row, mask=m_t)
            b_sum += b_uv * b_dt[:, None]
            b_d += b_through * b_dt[:, None]
            b_start = tl.load(starts + p_s).to(tl.float32)
            b_end = tl.sum(b_states * b_dt, 0) + tl.math.exp2(b_last) * tl.sum(tl.sum(b_start * b_s, 1), 0)
            b_dG = tl.where(r == last, b_end, 0.0) - b_row * b_dt
        else:
            tl.store(d_rest + i_c * H + i_h, tl.sum(tl.sum(tl.where(r[:, None] == r[None, :], b_uv, 0.0), 1), 0))
            b_uv *= tl.math.exp2(tl.where(m_w, b_G[:, None] - b_G[None, :], float("-inf"))) * b_dt[None, :]
            b_through *= tl.math.exp2(b_G)[:, None]
            b_dG = tl.sum(b_through * b_own, 1) + tl.sum(b_uv * b_scores, 1)
            b_sum += b_uv
            b_d += b_through
        b_dg = tl.sum(tl.where(r[:, None] <= r[None, :], b_dG[None, :], 0.0), 1)  # G_t has g_j for all j <= t
        tl.store(dg + p_t, b_dg, mask=m_t)
    b_d = tl.dot(b_sum.to(b_other.dtype), b_other, b_d)
    p_d = first * stride_d_own + i_g * N + r[:, None] * stride_d_own + o_n[None, :]
    tl.store(d_own + p_d, b_d.to(d_own.dtype.element_ty), mask=m_t[:, None])
