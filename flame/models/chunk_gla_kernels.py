"""Triton kernels of gated linear attention, chunk by chunk; `flame/models/chunk_gla.py` launches them.

Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635), section 4: each head's state S [V, K]
decays by exp(g_t) in every channel of the keys and gains v_t k_t^T. With G_t the log2 decays added up from the start
of a chunk of BT tokens, to G_last at its end, a chunk computes

    o_t = S_start (q_t 2^G_t scale) + sum_{j <= t} A_tj v_j      A_tj = scale sum_k q_tk k_jk 2^(G_tk - G_jk)
    S_end = S_start 2^G_last + sum_j v_j (k_j 2^(G_last - G_j))^T

The gradients have the same form backwards. Pointers are to contiguous tensors: q, k, g [B, T, H, K], v, o [B, T, H, V],
states [chunks, H, V, K]. Packed documents come as in `flame/models/chunks_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flame.models.chunks_kernels import LOG2E, locate_chunk, locate_document

# 2^(G_t - G_j) is taken as 2^(G_t - R) 2^(R - G_j), which makes A a matrix product; R is half of G_last. Where one of
# 64 channels decays by more than 2^-200 (e^-139) in a chunk, a factor could leave float32: the scores of that head's
# chunk are then computed pair by pair, which is slow.
LARGEST_EXPONENT = tl.constexpr(100.0)


@triton.jit
def _add_up_decays(b_g, BT: tl.constexpr):
    """G [BT, BK] and G_last [BK] from natural log decays; rows past the document, which are 0, repeat the last."""
    r = tl.arange(0, BT)
    ones = tl.where(r[:, None] >= r[None, :], 1.0, 0.0).to(b_g.dtype)
    return tl.dot(ones, b_g, input_precision="ieee") * LOG2E, tl.sum(b_g.to(tl.float32), 0) * LOG2E


@triton.jit
def gla_prepare_kernel(
    q, k, g, q_decayed, k_decayed, A, decay, cu_seqlens, chunk_indices, scale, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """q 2^G scale, k 2^(G_last - G), A [B, T, H, BT] and 2^G_last [chunks, H, K], one chunk and head a program."""
    i_c, i_h, first, left = locate_chunk(cu_seqlens, chunk_indices, tl.program_id(0), T, H, BT)
    r = tl.arange(0, BT)
    m_t = r < left
    base = (first * H + i_h) * K
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in tl.range(0, K, BK, num_stages=1):
        o_k = i_k + tl.arange(0, BK)
        p_k = base + r[:, None] * (H * K) + o_k[None, :]
        b_q = tl.load(q + p_k, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_k = tl.load(k + p_k, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_g = tl.load(g + p_k, mask=m_t[:, None], other=0.0)
        b_G, b_last = _add_up_decays(b_g, BT)
        tl.store(decay + (i_c * H + i_h) * K + o_k, tl.math.exp2(b_last))
        b_R = 0.5 * b_last
        b_e = b_G - b_R[None, :]
        if tl.max(tl.max(tl.abs(b_e), 1), 0) < LARGEST_EXPONENT:
            b_qe = b_q * tl.math.exp2(b_e)
            b_ke = b_k * tl.math.exp2(-b_e)
            b_A = tl.dot(b_qe, tl.trans(b_ke), b_A, input_precision="tf32")
            b_half = tl.math.exp2(b_R)[None, :]
            tl.store(q_decayed + p_k, (b_qe * (b_half * scale)).to(q_decayed.dtype.element_ty), mask=m_t[:, None])
            tl.store(k_decayed + p_k, (b_ke * b_half).to(k_decayed.dtype.element_ty), mask=m_t[:, None])
        else:
            b_qe = b_q * (tl.math.exp2(b_G) * scale)
            b_ke = b_k * tl.math.exp2(b_last[None, :] - b_G)
            tl.store(q_decayed + p_k, b_qe.to(q_decayed.dtype.element_ty), mask=m_t[:, None])
            tl.store(k_decayed + p_k, b_ke.to(k_decayed.dtype.element_ty), mask=m_t[:, None])
            b_Gj = tl.zeros([BK], dtype=tl.float32)
            for j in range(min(BT, left)):
                b_Gj += tl.load(g + base + j * (H * K) + o_k).to(tl.float32) * LOG2E
                b_kj = tl.load(k + base + j * (H * K) + o_k).to(tl.float32)
                b_d = tl.where((r == j)[:, None], 0.0, b_G - b_Gj[None, :])
                b_a = tl.sum(tl.where((r >= j)[:, None], b_q * b_kj[None, :] * tl.math.exp2(b_d), 0.0), 1)
                b_A += tl.where((r == j)[None, :], b_a[:, None], 0.0)
    b_A = tl.where(r[:, None] >= r[None, :], b_A * scale, 0.0)
    p_A = A + (first * H + i_h) * BT + r[:, None] * (H * BT) + r[None, :]
    tl.store(p_A, b_A.to(A.dtype.element_ty), mask=m_t[:, None])


@triton.jit
def gla_state_kernel(
    x, y, decay, states, z, A, o, s_first, s_last, cu_seqlens, chunk_offsets, order, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A document's chunks one after the other, one head and BV channels of the values a program.

    Forward, x is k 2^(G_last - G), y is v: ``states`` at the chunks' starts; with z = q 2^G scale also o.
    Backward, x is q 2^G scale, y is do: gradients of the states at the chunks' ends; with z = k 2^(G_last - G) also dv,
    in o. ``s_first`` and ``s_last`` [N, H, V, K] are the states before the first step and after the last. ``states``,
    z with A and o, ``s_first`` and ``s_last`` may be None.
    """
    pid = tl.program_id(0)
    NV: tl.constexpr = V // BV
    i_v = pid % NV
    i_h = pid // NV % H
    i_n, start, length, first_chunk = locate_document(cu_seqlens, chunk_offsets, order, pid // (NV * H), T, BT)
    i_nh = i_n * H + i_h
    num_chunks = tl.cdiv(length, BT)
    r = tl.arange(0, BT)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    p_s = o_v[:, None] * K + o_k[None, :]
    p_k = (start * H + i_h) * K + r[:, None] * (H * K) + o_k[None, :]
    p_v = (start * H + i_h) * V + r[:, None] * (H * V) + o_v[None, :]
    p_A = (start * H + i_h) * BT + r[:, None] * (H * BT) + r[None, :]

    b_s = tl.zeros([BV, K], dtype=tl.float32)
    if s_first is not None:
        b_s += tl.load(s_first + i_nh * (K * V) + p_s).to(tl.float32)
    for i in tl.range(0, num_chunks, num_stages=STAGES):
        i_t = tl.cast(num_chunks - 1 - i if BACKWARD else i, tl.int64)
        m_t = r < length - i_t * BT
        i_c = (first_chunk + i_t) * H + i_h
        b_x = tl.load(x + i_t * (BT * H * K) + p_k, mask=m_t[:, None], other=0.0)
        b_y = tl.load(y + i_t * (BT * H * V) + p_v, mask=m_t[:, None], other=0.0)
        b_d = tl.load(decay + i_c * K + o_k)
        if states is not None:
            tl.store(states + i_c * (K * V) + p_s, b_s.to(states.dtype.element_ty))
        if o is not None:
            b_z = tl.load(z + i_t * (BT * H * K) + p_k, mask=m_t[:, None], other=0.0)
            b_A = tl.load(A + i_t * (BT * H * BT) + p_A, mask=m_t[:, None], other=0.0)
            b_o = tl.dot(b_s.to(b_x.dtype), tl.trans(b_z))
            b_o = tl.dot(tl.trans(b_y), b_A if BACKWARD else tl.trans(b_A), b_o)
            tl.store(o + i_t * (BT * H * V) + p_v, tl.trans(b_o.to(o.dtype.element_ty)), mask=m_t[:, None])
        b_s = tl.dot(tl.trans(b_y), b_x, b_s * b_d[None, :])
    if s_last is not None:
        tl.store(s_last + i_nh * (K * V) + p_s, b_s.to(s_last.dtype.element_ty))


@triton.jit
def gla_gradient_kernel(
    q, k, v, g, states, do, dstates, dq, dk, dg, cu_seqlens, chunk_indices, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and g, one chunk, head and BK channels of the keys a program.

    ``states`` are those at the chunks' starts, ``dstates`` the gradients at their ends.
    """
    pid = tl.program_id(0)
    NK: tl.constexpr = K // BK
    i_c, i_h, first, left = locate_chunk(cu_seqlens, chunk_indices, pid // NK, T, H, BT)
    r = tl.arange(0, BT)
    o_k = pid % NK * BK + tl.arange(0, BK)
    m_t = r < left
    base = (first * H + i_h) * K
    p_k = base + r[:, None] * (H * K) + o_k[None, :]
    b_g = tl.load(g + p_k, mask=m_t[:, None], other=0.0)  # before the loop, to arrive while it runs
    b_k = tl.load(k + p_k, mask=m_t[:, None], other=0.0).to(tl.float32)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_dA = tl.zeros([BT, BT], dtype=tl.float32)
    b_ss = tl.zeros([BK, BK], dtype=tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_v = i_v + tl.arange(0, BV)
        p_v = (first * H + i_h) * V + r[:, None] * (H * V) + o_v[None, :]
        p_s = (i_c * H + i_h) * K * V + o_v[:, None] * K + o_k[None, :]
        b_v = tl.load(v + p_v, mask=m_t[:, None], other=0.0)
        b_do = tl.load(do + p_v, mask=m_t[:, None], other=0.0)
        b_s = tl.load(states + p_s)
        b_ds = tl.load(dstates + p_s)
        b_dA = tl.dot(b_do, tl.trans(b_v), b_dA)
        b_dq = tl.dot(b_do, b_s, b_dq)
        b_dk = tl.dot(b_v, b_ds, b_dk)
        # Only the diagonal is wanted, but so the states go to the tensor cores without passing through registers.
        b_ss = tl.dot(tl.trans(b_s), b_ds, b_ss)

    c = tl.arange(0, BK)
    b_dlast = tl.sum(tl.where(c[:, None] == c[None, :], b_ss, 0.0), 0)
    b_dA = tl.where((r[:, None] >= r[None, :]) & m_t[:, None], b_dA * scale, 0.0)
    b_G, b_last = _add_up_decays(b_g, BT)
    b_R = 0.5 * b_last
    b_e = b_G - b_R[None, :]
    if tl.max(tl.max(tl.abs(b_e), 1), 0) < LARGEST_EXPONENT:
        b_half = tl.math.exp2(b_R)
        b_up = tl.math.exp2(b_e)
        b_down = tl.math.exp2(-b_e)
        b_ke = b_k * b_down
        b_dk *= b_half[None, :]
        b_dlast = b_dlast * tl.math.exp2(b_last) + tl.sum(b_dk * b_ke, 0)
        b_dq = tl.dot(b_dA, b_ke, b_dq * (b_half * scale)[None, :], input_precision="tf32") * b_up
        b_q = tl.load(q + p_k, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_dk = tl.dot(tl.trans(b_dA), b_q * b_up, b_dk, input_precision="tf32") * b_down
    else:
        b_dq *= tl.math.exp2(b_G) * scale
        b_dk *= tl.math.exp2(b_last[None, :] - b_G)
        b_dlast = b_dlast * tl.math.exp2(b_last) + tl.sum(b_dk * b_k, 0)
        for j in range(min(BT, left)):
            b_Gj = tl.sum(tl.where((r == j)[:, None], b_G, 0.0), 0)  # no other sum: dg takes differences
            b_kj = tl.load(k + base + j * (H * K) + o_k).to(tl.float32)
            b_qj = tl.load(q + base + j * (H * K) + o_k).to(tl.float32)
            b_column = tl.sum(tl.where((r == j)[None, :], b_dA, 0.0), 1)
            b_row = tl.sum(tl.where((r == j)[:, None], b_dA, 0.0), 0)
            b_d = b_G - b_Gj[None, :]
            b_dq += tl.where((r >= j)[:, None], b_column[:, None] * b_kj[None, :] * tl.math.exp2(b_d), 0.0)
            b_dk += tl.where((r <= j)[:, None], b_row[:, None] * b_qj[None, :] * tl.math.exp2(-b_d), 0.0)
    tl.store(dq + p_k, b_dq.to(dq.dtype.element_ty), mask=m_t[:, None])
    tl.store(dk + p_k, b_dk.to(dk.dtype.element_ty), mask=m_t[:, None])
    # dg_t = sum_{j >= t} (q_j dq_j - k_j dk_j), and what the decay of the whole chunk adds. q and k are read again,
    # which is cheaper than the registers they would take.
    b_q = tl.load(q + p_k, mask=m_t[:, None], other=0.0).to(tl.float32)
    b_k = tl.load(k + p_k, mask=m_t[:, None], other=0.0).to(tl.float32)
    b_dg = b_q * b_dq - b_k * b_dk
    ones = tl.where(r[:, None] <= r[None, :], 1.0, 0.0)
    if dg.dtype.element_ty == tl.float32:  # in tests by the interpreter, which has no bfloat16 products
        b_dg = tl.dot(ones, b_dg, input_precision="ieee")
    else:  # in two halves of each summand, for the tensor cores
        b_high = b_dg.to(tl.bfloat16)
        b_low = (b_dg - b_high.to(tl.float32)).to(tl.bfloat16)
        b_dg = tl.dot(ones.to(tl.bfloat16), b_high, tl.dot(ones.to(tl.bfloat16), b_low))
    tl.store(dg + p_k, (b_dg + b_dlast[None, :]).to(dg.dtype.element_ty), mask=m_t[:, None])
