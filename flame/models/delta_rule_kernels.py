"""Triton kernels of the gated delta rule, chunk by chunk; `flame/models/delta_rule.py` launches them.

Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), section 3.3. A head's state h [K, V] decays and is written to
by beta_t k_t (v_t - h^T k_t)^T. Within a chunk of BT tokens all writes are known from the state at its start, by w and
u, which FLA's kernels compute (the WY representation). With G_t the log2 decays added up from the start of the chunk to
token t, and G_last those of all of it,

    n_t = u_t - h_start^T w_t,                                   A_tj = scale 2^(G_t - G_j) q_t . k_j  for j <= t,
    o_t = scale 2^G_t h_start^T q_t + sum_{j <= t} A_tj n_j,
    h_end = 2^G_last h_start + sum_j k'_j n_j^T,                 k'_j = 2^(G_last - G_j) k_j.

The gradient of the state comes back the same way,

    dn_j = dh_end^T k'_j + sum_{t >= j} A_tj do_t,
    dh_start = 2^G_last dh_end + sum_t (scale 2^G_t q_t do_t^T - w_t dn_t^T).

States are held as [V, K], so that they are the left operand of every product and need not leave their registers; two
halves of the keys' channels take fewer registers than one whole. Matrices come as TMA descriptors, which also takes the
addresses out of the registers: rows past a document's end are then those of the next one, whose products with the
masked operand are zero, and rows past the last are zeros. Only NaN times zero is NaN: from the queries and keys of a
document it gets into the gradients of the one before, as it gets into those of all weights. Pointers are to contiguous
tensors: q, k, w [B, T, H, K], u, o, do [B, T, H, V], G, beta [B, T, H], A [B, T, H, BT], decay [chunks, H], states
[chunks, H, K, V], or [..., V, K] with ``STATE_V_FIRST``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flame.models.chunks_kernels import locate_chunk, locate_document


@triton.jit
def delta_prepare_kernel(
    q, k, g, q_decayed, k_decayed, A, decay, cu_seqlens, chunk_indices, q_scale, scale, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """q 2^G ``q_scale``, k', A and 2^G_last, one chunk and head a program."""
    i_c, i_h, first, left = locate_chunk(cu_seqlens, chunk_indices, tl.program_id(0), T, H, BT)
    r = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_t = r < left
    p_g = first * H + i_h + r * H
    b_G = tl.load(g + p_g, mask=m_t, other=0.0).to(tl.float32)
    b_last = tl.load(g + (first + min(left, BT) - 1) * H + i_h).to(tl.float32)
    b_up = tl.math.exp2(b_G) * q_scale
    b_down = tl.math.exp2(tl.where(m_t, b_last - b_G, 0.0))
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in tl.static_range(0, K, BK):
        p_k = (first * H + i_h) * K + r[:, None] * (H * K) + (i_k + o_k)[None, :]
        b_q = tl.load(q + p_k, mask=m_t[:, None], other=0.0)
        b_k = tl.load(k + p_k, mask=m_t[:, None], other=0.0)
        b_A = tl.dot(b_q, tl.trans(b_k), b_A)
        tl.store(q_decayed + p_k, (b_q * b_up[:, None]).to(q_decayed.dtype.element_ty), mask=m_t[:, None])
        tl.store(k_decayed + p_k, (b_k * b_down[:, None]).to(k_decayed.dtype.element_ty), mask=m_t[:, None])
    # Only pairs in order: exponents of the others may be anything.
    m_A = (r[:, None] >= r[None, :]) & m_t[:, None]
    b_A = tl.where(m_A, b_A * tl.math.exp2(b_G[:, None] - b_G[None, :]) * scale, 0.0)
    p_A = (first * H + i_h) * BT + r[:, None] * (H * BT) + r[None, :]
    tl.store(A + p_A, b_A.to(A.dtype.element_ty), mask=m_t[:, None])
    tl.store(decay + i_c * H + i_h, tl.math.exp2(b_last))


@triton.jit
def delta_state_kernel(
    k_decayed, w, u, decay, h, n, q_decayed, A, o, h_first, h_last, cu_seqlens, chunk_offsets, order, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    STATE_V_FIRST: tl.constexpr, WAIT_FOR_Q: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A document's chunks one after the other, one head and BV channels of the values a program.

    Gives h_start and n of each chunk, or, with q 2^G and A, its o; what is not wanted is None, as ``h_first`` and
    ``h_last`` [N, H, K, V] may be, the states before the first chunk and after the last. k', w, u, q and A come as
    descriptors of matrices [tokens, H x channels] in blocks [BT, K / 2], [BT, BV] and [BT, BT], h as one of
    [chunks x H x K, V] in blocks [K / 2, BV], or [chunks x H x V, K] in blocks [BV, K / 2]. With ``WAIT_FOR_Q`` q is
    not loaded ahead.
    """
    NV: tl.constexpr = V // BV
    BK: tl.constexpr = K // 2
    pid = tl.program_id(0)
    i_v = pid % NV * BV
    i_h = pid // NV % H
    i_n, start, length, first_chunk = locate_document(cu_seqlens, chunk_offsets, order, pid // (NV * H), T, BT)
    r = tl.arange(0, BT)
    p_v = r[None, :] * (H * V) + (i_v + tl.arange(0, BV))[:, None]
    row = start.to(tl.int32)
    first_state = (first_chunk * H + i_h).to(tl.int32)
    p_0, p_1 = _state_offsets(i_n * H + i_h, i_v, K, V, BV, STATE_V_FIRST)
    b_0 = tl.zeros([BV, BK], dtype=tl.float32)
    b_1 = tl.zeros([BV, BK], dtype=tl.float32)
    if h_first is not None:
        b_0 += tl.load(h_first + p_0).to(tl.float32)
        b_1 += tl.load(h_first + p_1).to(tl.float32)
    for i_t in tl.range(0, tl.cdiv(length, BT), num_stages=STAGES):
        t = row + i_t * BT
        m_t = r < length - i_t * BT
        i_s = first_state + i_t * H
        tile_v = ((start + i_t * BT) * H + i_h) * V
        b_decay = tl.load(decay + i_s)
        b_w0 = w.load([t, i_h * K])
        b_w1 = w.load([t, i_h * K + BK])
        b_u = u.load([t, i_h * V + i_v])
        b_k0 = k_decayed.load([t, i_h * K])
        b_k1 = k_decayed.load([t, i_h * K + BK])
        b_h = b_0.to(b_w0.dtype)
        if h is not None:
            _store_state(h, b_h, i_s, 0, i_v, K, V, STATE_V_FIRST)
        b_n = tl.dot(b_h, tl.trans(b_w0))
        b_h = b_1.to(b_w0.dtype)
        if h is not None:
            _store_state(h, b_h, i_s, BK, i_v, K, V, STATE_V_FIRST)
        b_n = tl.dot(b_h, tl.trans(b_w1), b_n)
        b_n = tl.where(m_t[None, :], tl.trans(b_u).to(tl.float32) - b_n, 0.0).to(b_w0.dtype)
        if n is not None:
            tl.store(n + tile_v + p_v, b_n, mask=m_t[None, :])
        if o is not None:
            b_A = A.load([t, i_h * BT])
            # The scale here and not in q: else the compiler keeps the halves from above, and runs out of registers.
            b_h0 = (b_0 * scale).to(b_w0.dtype)
            b_h1 = (b_1 * scale).to(b_w0.dtype)
            b_o = tl.zeros([BV, BT], dtype=tl.float32)
            if WAIT_FOR_Q:
                if length > 0:  # see the next kernel
                    b_o = _read_states(b_h0, b_h1, q_decayed, t, i_h * K)
            else:
                b_o = _read_states(b_h0, b_h1, q_decayed, t, i_h * K)
            b_o = tl.dot(b_n, tl.trans(b_A), b_o)
            tl.store(o + tile_v + p_v, b_o.to(o.dtype.element_ty), mask=m_t[None, :])
        b_0 = tl.dot(b_n, b_k0, b_0 * b_decay)
        b_1 = tl.dot(b_n, b_k1, b_1 * b_decay)
    if h_last is not None:
        tl.store(h_last + p_0, b_0)
        tl.store(h_last + p_1, b_1)


@triton.jit
def delta_state_gradient_kernel(
    q_decayed, k_decayed, w, decay, do, A, dh, dn, dh_last, dh_first, cu_seqlens, chunk_offsets, order, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    STATE_V_FIRST: tl.constexpr, WAIT_FOR_Q: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dh_end and dn of each chunk of a document, from the last to the first, as `delta_state_kernel`.

    q comes times 2^G and the scale. ``dh_last`` and ``dh_first`` [N, H, K, V], gradients of the states after the last
    chunk and before the first, may be None.
    """
    NV: tl.constexpr = V // BV
    BK: tl.constexpr = K // 2
    pid = tl.program_id(0)
    i_v = pid % NV * BV
    i_h = pid // NV % H
    i_n, start, length, first_chunk = locate_document(cu_seqlens, chunk_offsets, order, pid // (NV * H), T, BT)
    r = tl.arange(0, BT)
    p_v = r[None, :] * (H * V) + (i_v + tl.arange(0, BV))[:, None]
    row = start.to(tl.int32)
    first_state = (first_chunk * H + i_h).to(tl.int32)
    p_0, p_1 = _state_offsets(i_n * H + i_h, i_v, K, V, BV, STATE_V_FIRST)
    b_0 = tl.zeros([BV, BK], dtype=tl.float32)
    b_1 = tl.zeros([BV, BK], dtype=tl.float32)
    if dh_last is not None:
        b_0 += tl.load(dh_last + p_0).to(tl.float32)
        b_1 += tl.load(dh_last + p_1).to(tl.float32)
    num_chunks = tl.cdiv(length, BT)
    for i in tl.range(0, num_chunks, num_stages=STAGES):
        i_t = num_chunks - 1 - i
        t = row + i_t * BT
        m_t = r < length - i_t * BT
        i_s = first_state + i_t * H
        tile_v = ((start + i_t * BT) * H + i_h) * V
        b_decay = tl.load(decay + i_s)
        b_do = tl.trans(do.load([t, i_h * V + i_v]))
        b_A = A.load([t, i_h * BT])
        b_k0 = k_decayed.load([t, i_h * K])
        b_k1 = k_decayed.load([t, i_h * K + BK])
        b_w0 = w.load([t, i_h * K])
        b_w1 = w.load([t, i_h * K + BK])
        b_dh = b_0.to(b_w0.dtype)
        _store_state(dh, b_dh, i_s, 0, i_v, K, V, STATE_V_FIRST)
        b_dn = tl.dot(b_dh, tl.trans(b_k0))
        b_dh = b_1.to(b_w0.dtype)
        _store_state(dh, b_dh, i_s, BK, i_v, K, V, STATE_V_FIRST)
        b_dn = tl.dot(b_dh, tl.trans(b_k1), b_dn)
        b_do = tl.where(m_t[None, :], b_do, 0.0).to(b_w0.dtype)
        b_dn = tl.dot(b_do, b_A, b_dn)
        tl.store(dn + tile_v + p_v, b_dn.to(dn.dtype.element_ty), mask=m_t[None, :])
        b_dn = tl.where(m_t[None, :], -b_dn, 0.0).to(b_w0.dtype)
        b_0 = tl.dot(b_dn, b_w0, b_0 * b_decay)
        b_1 = tl.dot(b_dn, b_w1, b_1 * b_decay)
        if WAIT_FOR_Q:
            # Always true; what is loaded under a condition is not loaded ahead. The shared memory holds two blocks,
            # this chunk's and the next one's, of two matrices only where heads have 256 channels of keys.
            if length > 0:
                b_0, b_1 = _write_states(b_0, b_1, b_do, q_decayed, t, i_h * K)
        else:
            b_0, b_1 = _write_states(b_0, b_1, b_do, q_decayed, t, i_h * K)
    if dh_first is not None:
        tl.store(dh_first + p_0, b_0)
        tl.store(dh_first + p_1, b_1)


@triton.jit
def _read_states(b_h0, b_h1, q, t, i_k):
    """h^T q of a chunk, [BV, BT]."""
    b_o = tl.dot(b_h0, tl.trans(q.load([t, i_k])))
    return tl.dot(b_h1, tl.trans(q.load([t, i_k + b_h0.shape[1]])), b_o)


@triton.jit
def _write_states(b_0, b_1, b_x, q, t, i_k):
    """sum_t x_t q_t^T of a chunk added to the two halves of a state."""
    b_0 = tl.dot(b_x, q.load([t, i_k]), b_0)
    return b_0, tl.dot(b_x, q.load([t, i_k + b_0.shape[1]]), b_1)


@triton.jit
def _state_offsets(i_nh, i_v, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """Where the two halves [BV, K / 2] of a document's state [K, V] lie."""
    o_v = (i_v + tl.arange(0, BV))[:, None]
    o_k = tl.arange(0, K // 2)[None, :]
    if STATE_V_FIRST:
        p_0 = i_nh * (K * V) + o_v * K + o_k
        p_1 = p_0 + K // 2
    else:
        p_0 = i_nh * (K * V) + o_k * V + o_v
        p_1 = p_0 + (K // 2) * V
    return p_0, p_1


@triton.jit
def _store_state(h, b_h, i_s, i_k, i_v, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """One half of the state i_s, [BV, K / 2] from channel i_k of the keys and i_v of the values on."""
    if STATE_V_FIRST:
        h.store([i_s * V + i_v, i_k], b_h)
    else:
        h.store([i_s * K + i_k, i_v], tl.trans(b_h))


@triton.jit
def delta_gradient_kernel(
    k, v, beta, g, M, dw, du, dk, dv, db, dg, cu_seqlens, chunk_indices, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of k, v, beta and the log decay through w and u, one chunk and head a program; dk and dg are added to.

    With the inverse M [B, T, H, BT] of the lower triangle I + L, L_ij = beta_i 2^(G_i - G_j) k_i . k_j for
    i > j,

        w = M (beta 2^G k),   u = M (beta v),   dL = -M^T (dw (beta 2^G k)^T + du (beta v)^T) M^T  below the diagonal.

    dL is computed a second time, transposed, as in `flame/models/chunk_backward_kernels.py`.
    """
    _, i_h, first, left = locate_chunk(cu_seqlens, chunk_indices, tl.program_id(0), T, H, BT)
    r = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_t = r < left
    p_k = (first * H + i_h) * K + r[:, None] * (H * K) + o_k[None, :]
    p_v = (first * H + i_h) * V + r[:, None] * (H * V) + o_v[None, :]
    p_t = first * H + i_h + r * H
    p_M = M + (first * H + i_h) * BT
    b_b = tl.load(beta + p_t, mask=m_t, other=0.0).to(tl.float32)
    b_G = tl.load(g + p_t, mask=m_t, other=0.0).to(tl.float32)
    b_M = tl.load(p_M + r[:, None] * (H * BT) + r[None, :], mask=m_t[:, None], other=0.0)
    b_Mt = tl.load(p_M + r[:, None] + r[None, :] * (H * BT), mask=m_t[None, :], other=0.0)
    b_up = tl.math.exp2(b_G)
    b_bup = b_b * b_up

    b_dL = tl.zeros([BT, BT], dtype=tl.float32)
    b_dLt = tl.zeros([BT, BT], dtype=tl.float32)
    b_db = tl.zeros([BT], dtype=tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_v = tl.load(v + p_v + i_v, mask=m_t[:, None], other=0.0)
        b_du = tl.load(du + p_v + i_v, mask=m_t[:, None], other=0.0)
        b_bv = (b_v * b_b[:, None]).to(b_v.dtype)
        b_dL = tl.dot(b_du, tl.trans(b_bv), b_dL)
        b_dLt = tl.dot(b_bv, tl.trans(b_du), b_dLt)
        b_dbv = tl.dot(b_Mt, b_du)
        b_db += tl.sum(b_dbv * b_v, 1)
        tl.store(dv + p_v + i_v, (b_dbv * b_b[:, None]).to(dv.dtype.element_ty), mask=m_t[:, None])
    b_kk = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in tl.range(0, K, BK, num_stages=STAGES):
        b_k = tl.load(k + p_k + i_k, mask=m_t[:, None], other=0.0)
        b_dw = tl.load(dw + p_k + i_k, mask=m_t[:, None], other=0.0)
        b_bk = (b_k * b_bup[:, None]).to(b_k.dtype)
        b_dL = tl.dot(b_dw, tl.trans(b_bk), b_dL)
        b_dLt = tl.dot(b_bk, tl.trans(b_dw), b_dLt)
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk)

    m_L = (r[:, None] > r[None, :]) & m_t[:, None]
    m_Lt = (r[:, None] < r[None, :]) & m_t[None, :]
    b_x = tl.dot(tl.where(m_L, b_dL, 0.0).to(b_M.dtype), b_Mt)
    b_x = tl.dot(b_Mt, b_x.to(b_M.dtype))
    b_x = tl.where(m_L, -b_x * tl.math.exp2(b_G[:, None] - b_G[None, :]), 0.0)
    b_xt = tl.dot(b_M, tl.where(m_Lt, b_dLt, 0.0).to(b_M.dtype))
    b_xt = tl.dot(b_xt.to(b_M.dtype), b_M)
    b_xt = tl.where(m_Lt, -b_xt * tl.math.exp2(b_G[None, :] - b_G[:, None]), 0.0)
    b_dg = tl.sum(b_x * b_kk, 1) * b_b - tl.sum(b_xt * b_kk * b_b[None, :], 1)
    b_y = b_x.to(b_M.dtype)
    b_yt = b_xt.to(b_M.dtype)
    for i_k in tl.range(0, K, BK, num_stages=STAGES):
        b_k = tl.load(k + p_k + i_k, mask=m_t[:, None], other=0.0)
        b_dw = tl.load(dw + p_k + i_k, mask=m_t[:, None], other=0.0)
        b_dk = tl.load(dk + p_k + i_k, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_dbk = tl.dot(b_Mt, b_dw)
        b_dLk = tl.dot(b_y, b_k)
        b_s = tl.sum(b_dbk * b_k, 1) * b_up
        b_db += b_s + tl.sum(b_dLk * b_k, 1)
        b_dg += b_s * b_b
        b_dk += b_dbk * b_bup[:, None] + b_dLk * b_b[:, None]
        b_dk = tl.dot(b_yt, (b_k * b_b[:, None]).to(b_k.dtype), b_dk)
        tl.store(dk + p_k + i_k, b_dk.to(dk.dtype.element_ty), mask=m_t[:, None])
    tl.store(db + p_t, b_db.to(db.dtype.element_ty), mask=m_t)
    b_dg += tl.load(dg + p_t, mask=m_t, other=0.0)
    tl.store(dg + p_t, b_dg.to(dg.dtype.element_ty), mask=m_t)
