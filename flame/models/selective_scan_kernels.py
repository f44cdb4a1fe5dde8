"""Triton kernels of flame.models.selective_scan; see there for the order in which they run.

A program holds a block of BD channels with all their states, BN >= N, and walks through the tokens of a chunk (or the
chunks of a document) one by one. All arithmetic is in float32. x, dt, z and y are rows of tokens [T, D], b and c (the
B and C of the recurrence) rows [T, N], states [M, D, N]; `bounds` are the first token of each chunk and the one after
its last, `offsets` the first chunk of each document. Exponentials are taken to base 2, which is what a GPU has.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), by its series where 1 + exp(x) rounds too much of exp(x) away."""
    u = tl.exp(tl.minimum(x, 20.0))
    series = u * (1 - u * (1 / 2 - u * (1 / 3 - u * (1 / 4 - u * (1 / 5 - u * (1 / 6))))))
    return tl.where(x > 20.0, x, tl.where(u < 0.1, series, tl.log(1 + u)))


@triton.jit
def _load_decays(A, o_d, o_n, D, N):
    """[BD, BN] of A for powers of 2; states beyond N neither decay nor are written to."""
    mask = (o_d < D)[:, None] & (o_n < N)[None, :]
    return tl.load(A + o_d[:, None] * N + o_n[None, :], mask=mask, other=0.0) * _LOG2_E


@triton.jit
def _load_row(x, t, stride, offsets, size):
    return tl.load(x + t * stride + offsets, mask=offsets < size, other=0.0).to(tl.float32)


@triton.jit
def _load_vector(x, offsets, size, PRESENT: tl.constexpr):
    """x [size], zeros when it is not there."""
    b_x = tl.zeros_like(offsets).to(tl.float32)
    if PRESENT:
        b_x = tl.load(x + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _load_states(states, index, o_d, o_n, D, N):
    """[BD, BN] of states [:, D, N]."""
    mask = (o_d < D)[:, None] & (o_n < N)[None, :]
    return tl.load(states + (index.to(tl.int64) * D + o_d[:, None]) * N + o_n[None, :], mask=mask, other=0.0)


@triton.jit
def _store_states(states, index, value, o_d, o_n, D, N):
    mask = (o_d < D)[:, None] & (o_n < N)[None, :]
    tl.store(states + (index.to(tl.int64) * D + o_d[:, None]) * N + o_n[None, :], value, mask=mask)


@triton.jit
def added_states_kernel(
    bounds, x, dt, dt_bias, A, b, states, durations, stride_x, stride_dt, stride_b, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The state [BD, BN] that a chunk reaches from zero, and the sum of its step sizes [BD]."""
    i_c, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
    b_h = tl.zeros((BD, BN), dtype=tl.float32)
    b_duration = tl.zeros((BD,), dtype=tl.float32)
    for t in range(start, end):
        b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
        b_x = _load_row(x, t, stride_x, o_d, D)
        b_b = _load_row(b, t, stride_b, o_n, N)
        b_h = b_h * tl.exp2(b_dt[:, None] * b_A) + (b_dt * b_x)[:, None] * b_b[None, :]
        b_duration += b_dt
    _store_states(states, i_c, b_h, o_d, o_n, D, N)
    tl.store(durations + i_c.to(tl.int64) * D + o_d, b_duration, mask=o_d < D)


@triton.jit
def scan_chunks_kernel(
    offsets, durations, A, states, first, last, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_FIRST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """A document's states between its chunks, from what the chunks add; in place."""
    i_n, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(offsets + i_n), tl.load(offsets + i_n + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_h = tl.zeros((BD, BN), dtype=tl.float32)
    if HAS_FIRST:
        b_h = _load_states(first, i_n, o_d, o_n, D, N)
    for i in range(0, end - start):
        i_c = start + i
        if REVERSE:
            i_c = end - 1 - i
        b_added = _load_states(states, i_c, o_d, o_n, D, N)
        _store_states(states, i_c, b_h, o_d, o_n, D, N)
        b_duration = tl.load(durations + i_c.to(tl.int64) * D + o_d, mask=o_d < D, other=0.0)
        b_h = b_h * tl.exp2(b_duration[:, None] * b_A) + b_added
    _store_states(last, i_n, b_h, o_d, o_n, D, N)


@triton.jit
def outputs_kernel(
    bounds, x, dt, dt_bias, A, b, c, skip, z, starts, y,
    stride_x, stride_dt, stride_b, stride_c, stride_z, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk, from the state at its start."""
    i_c, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
    b_skip = _load_vector(skip, o_d, D, HAS_SKIP)
    b_h = _load_states(starts, i_c, o_d, o_n, D, N)
    for t in range(start, end):
        b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
        b_x = _load_row(x, t, stride_x, o_d, D)
        b_b = _load_row(b, t, stride_b, o_n, N)
        b_c = _load_row(c, t, stride_c, o_n, N)
        b_h = b_h * tl.exp2(b_dt[:, None] * b_A) + (b_dt * b_x)[:, None] * b_b[None, :]
        b_y = tl.sum(b_h * b_c[None, :], axis=1) + b_skip * b_x
        if HAS_GATE:
            b_z = _load_row(z, t, stride_z, o_d, D)
            b_y *= b_z * tl.sigmoid(b_z)
        tl.store(y + t * D + o_d, b_y.to(y.dtype.element_ty), mask=o_d < D)


@triton.jit
def added_gradients_kernel(
    bounds, x, dt, dt_bias, A, b, c, skip, z, grad_y, grad_states,
    stride_x, stride_dt, stride_b, stride_c, stride_z, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """What a chunk's outputs add to the gradient of the state at its start."""
    i_c, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
    b_g = tl.zeros((BD, BN), dtype=tl.float32)
    for i in range(0, end - start):
        t = end - 1 - i
        b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
        b_c = _load_row(c, t, stride_c, o_n, N)
        b_ds = _load_row(grad_y, t, D, o_d, D)
        if HAS_GATE:
            b_z = _load_row(z, t, stride_z, o_d, D)
            b_ds *= b_z * tl.sigmoid(b_z)
        b_g = (b_g + b_ds[:, None] * b_c[None, :]) * tl.exp2(b_dt[:, None] * b_A)
    _store_states(grad_states, i_c, b_g, o_d, o_n, D, N)


@triton.jit
def gradients_kernel(
    bounds, x, dt, dt_bias, A, b, c, skip, z, starts, scratch, grad_y, grad_states,
    grad_x, grad_dt, grad_z, grad_b, grad_c, grad_skip, grad_bias,
    stride_x, stride_dt, stride_b, stride_c, stride_z, D, N, num_tokens, num_chunks, num_blocks,
    BD: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk after the other, from the state at its start and the gradient of that at its end.

    That gradient gives way to the chunk's gradient of A. With a_t = exp(dt_t A), g_t the gradient of h_t and s_t the
    output before the gate: g_t = C_t ds_t + a_(t+1) g_(t+1), and h_t = a_t h_(t-1) + dt_t x_t B_t does the rest.
    """
    pid = tl.program_id(0)
    o_n = tl.arange(0, BN)
    p_scratch = scratch + pid.to(tl.int64) * (CHUNK * BD * BN) + tl.arange(0, BD)[:, None] * BN + o_n[None, :]
    for work in range(pid, num_chunks * num_blocks, tl.num_programs(0)):
        i_c, i_d = work // num_blocks, work % num_blocks
        i_c = tl.cast(i_c, tl.int64)
        start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
        o_d = i_d * BD + tl.arange(0, BD)
        m_d, m_n = o_d < D, o_n < N
        b_A = _load_decays(A, o_d, o_n, D, N)
        b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
        b_skip = _load_vector(skip, o_d, D, HAS_SKIP)

        b_h = _load_states(starts, i_c, o_d, o_n, D, N)
        for t in range(start, end):
            tl.store(p_scratch + (t - start) * (BD * BN), b_h)
            b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
            b_x = _load_row(x, t, stride_x, o_d, D)
            b_b = _load_row(b, t, stride_b, o_n, N)
            b_h = b_h * tl.exp2(b_dt[:, None] * b_A) + (b_dt * b_x)[:, None] * b_b[None, :]
        tl.debug_barrier()

        b_g = _load_states(grad_states, i_c, o_d, o_n, D, N)
        b_dA = tl.zeros((BD, BN), dtype=tl.float32)
        b_dskip = tl.zeros((BD,), dtype=tl.float32)
        b_dbias = tl.zeros((BD,), dtype=tl.float32)
        for i in range(0, end - start):
            t = end - 1 - i
            b_raw = _load_row(dt, t, stride_dt, o_d, D) + b_bias
            b_dt = _softplus(b_raw)
            b_x = _load_row(x, t, stride_x, o_d, D)
            b_b = _load_row(b, t, stride_b, o_n, N)
            b_c = _load_row(c, t, stride_c, o_n, N)
            b_ds = _load_row(grad_y, t, D, o_d, D)
            b_before = tl.load(p_scratch + (t - start) * (BD * BN))
            b_a = tl.exp2(b_dt[:, None] * b_A)
            b_h = b_before * b_a + (b_dt * b_x)[:, None] * b_b[None, :]
            if HAS_GATE:
                b_z = _load_row(z, t, stride_z, o_d, D)
                b_sigmoid = tl.sigmoid(b_z)
                b_s = tl.sum(b_h * b_c[None, :], axis=1) + b_skip * b_x
                b_dz = b_ds * b_s * b_sigmoid * (1 + b_z * (1 - b_sigmoid))
                tl.store(grad_z + t * D + o_d, b_dz.to(grad_z.dtype.element_ty), mask=m_d)
                b_ds *= b_z * b_sigmoid

            b_g += b_ds[:, None] * b_c[None, :]
            p_n = (i_d * num_tokens + t) * N + o_n
            tl.store(grad_c + p_n, tl.sum(b_ds[:, None] * b_h, axis=0), mask=m_n)
            tl.store(grad_b + p_n, tl.sum(b_g * (b_dt * b_x)[:, None], axis=0), mask=m_n)
            b_dwritten = tl.sum(b_g * b_b[None, :], axis=1)
            b_g *= b_a
            b_dexponent = b_g * b_before
            b_dA += b_dexponent * b_dt[:, None]
            b_dskip += b_ds * b_x
            b_ddt = b_x * b_dwritten + tl.sum(b_dexponent * b_A, axis=1) / _LOG2_E
            b_draw = b_ddt * tl.sigmoid(b_raw)
            b_dbias += b_draw
            b_dx = b_dt * b_dwritten + b_skip * b_ds
            tl.store(grad_x + t * D + o_d, b_dx.to(grad_x.dtype.element_ty), mask=m_d)
            tl.store(grad_dt + t * D + o_d, b_draw.to(grad_dt.dtype.element_ty), mask=m_d)
        tl.debug_barrier()  # the next chunk writes to the scratch buffer that this one has read

        _store_states(grad_states, i_c, b_dA, o_d, o_n, D, N)
        tl.store(grad_skip + i_c * D + o_d, b_dskip, mask=m_d)
        tl.store(grad_bias + i_c * D + o_d, b_dbias, mask=m_d)
