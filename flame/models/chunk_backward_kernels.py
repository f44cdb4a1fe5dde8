"""A Triton kernel for what `flame/models/chunk_backward.py` computes, in half precision.

FLA's own multiplies by a transposed result of another product, which is where the compiler goes wrong. This one has
that result a second time, by a product of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flame.models.backend import find_operator
from flame.models.chunk_backward import chunk_bwd_dqkwg
from flame.models.chunks_kernels import locate_chunk

TILE_VALUES, STAGES = 64, 3  # the fastest on an H200
CHUNKS = (16, 32, 64)  # tokens; of more with float32 states, the tiles exceed a multiprocessor's shared memory


def make_chunk_bwd_dqkwg(original: Callable) -> Callable:
    """FLA's `chunk_bwd_dqkwg`; steps without data-dependent decays, which it takes itself, are left to it."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, *, g: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """As `flame.models.chunk_backward.chunk_bwd_dqkwg`."""
        if options.get("scale") is None:
            options["scale"] = k.shape[-1] ** -0.5
        if g is None:
            return original(q, k, v, do, h, dh, **options)
        chunk_size = options.setdefault("chunk_size", 64)  # as FLA
        if options.get("cu_seqlens") is not None and options.get("chunk_indices") is None:
            prepare = find_operator("fla.ops.utils.index", "prepare_chunk_indices")
            options["chunk_indices"] = prepare(options["cu_seqlens"], chunk_size)
        is_known = options.get("g_gamma") is None and chunk_size in CHUNKS
        compute = _chunk_bwd_dqkwg if is_known and takes(q, k, v, do) else chunk_bwd_dqkwg
        return compute(q, k, v, do, h, dh, g=g, **options)

    return function


def takes(*inputs: Tensor) -> bool:
    """Whether the kernel does: half precision, not on a CPU."""
    return all(not x.is_cpu and x.dtype in (torch.float16, torch.bfloat16) for x in inputs)


def _chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    *,
    w: Tensor | None = None,
    g: Tensor,
    g_gamma: None = None,
    dv: Tensor | None = None,
    scale: float,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    q, k, v, do, h, dh, g = (x.contiguous() for x in (q, k, v, do, h, dh, g))
    batch_size, num_tokens, num_heads, key_dim = k.shape
    num_v_heads, value_dim = v.shape[2:]
    tile_keys, tile_values, num_warps = choose_tiles(key_dim, value_dim)
    num_tiles = triton.cdiv(key_dim, tile_keys)
    num_chunks = batch_size * triton.cdiv(num_tokens, chunk_size) if cu_seqlens is None else len(chunk_indices)
    shape = batch_size, num_tokens, num_v_heads, key_dim
    dq, dk = q.new_empty(shape), k.new_empty(shape)
    dw = None if w is None else w.new_empty(shape)
    dg = g.new_empty(num_tiles, *g.shape, dtype=torch.float32)
    # Three blocks of float32 states beside those of dv exceed a multiprocessor's shared memory.
    stages = STAGES if w is None or h.dtype == q.dtype else STAGES - 1
    with torch.cuda.device_of(q):
        chunk_gradient_kernel[(num_chunks * num_v_heads * num_tiles,)](
            q, k, v, do, h, dh, None if w is None else dv.contiguous(), g, dq, dk, dw, dg, cu_seqlens, chunk_indices,
            scale, num_tokens, batch_size * num_tokens, H=num_heads,
            HV=num_v_heads, K=key_dim, V=value_dim, BT=chunk_size, BK=tile_keys, BV=tile_values,
            STATE_V_FIRST=state_v_first, STAGES=stages, num_warps=num_warps,
        )  # fmt: skip
    if num_heads != num_v_heads:
        dq, dk = (x.unflatten(2, (num_heads, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dw, dg.sum(0)


def choose_tiles(key_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Channels of keys and values of a program, and its warps.

    The fastest of twelve on an H200 for heads of 128 and 256 keys and 64 to 512 values: less does where there is no
    second tile of values to load meanwhile.
    """
    is_wide = key_dim > 64 and value_dim > TILE_VALUES
    return _tile(key_dim, 128 if is_wide else 64), _tile(value_dim, TILE_VALUES), 8 if is_wide else 4


def _tile(width: int, largest: int) -> int:
    """A product's smallest side is 16."""
    return max(16, min(triton.next_power_of_2(width), largest))


@triton.jit(do_not_specialize=["T", "num_rows"])
def chunk_gradient_kernel(
    q, k, v, do, h, dh, w_dv, g, dq, dk, dw, dg, cu_seqlens, chunk_indices, scale, T, num_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STATE_V_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, w and the log decay of one chunk of BT tokens, one head and BK channels of the keys a program.

    Pointers are to contiguous tensors: q, k [B, T, H, K]; v, do, w_dv [B, T, HV, V], the last None without w; h, dh
    [chunks, HV, K, V] ([chunks, HV, V, K] with ``STATE_V_FIRST``); g [B, T, HV]; dq, dk, dw [B, T, HV, K]; dg
    [K / BK, B, T, HV], a share of each program. ``num_rows`` is B T.

    The scores are computed a second time, transposed: the compilers that this kernel is for get the product of a
    transposed result wrong.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    i_k = pid % NK
    i_c, i_h, first, left = locate_chunk(cu_seqlens, chunk_indices, pid // NK, T, HV, BT)
    r = tl.arange(0, BT)
    m_t = r < left
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = m_t[:, None] & (o_k < K)[None, :]

    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_dw = tl.zeros([BT, BK], dtype=tl.float32)
    b_ds = tl.zeros([BT, BT], dtype=tl.float32)
    b_dst = tl.zeros([BT, BT], dtype=tl.float32)
    b_hdh = tl.zeros([BV, BK], dtype=tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_v = i_v + tl.arange(0, BV)
        m_v = m_t[:, None] & (o_v < V)[None, :]
        m_h = (o_v < V)[:, None] & (o_k < K)[None, :]
        p_v = (first * HV + i_h) * V + r[:, None] * (HV * V) + o_v[None, :]
        if STATE_V_FIRST:
            p_h = (i_c * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
        else:
            p_h = (i_c * HV + i_h) * (K * V) + o_v[:, None] + o_k[None, :] * V
        b_v = tl.load(v + p_v, mask=m_v, other=0.0)
        b_do = tl.load(do + p_v, mask=m_v, other=0.0)
        b_h = tl.load(h + p_h, mask=m_h, other=0.0).to(b_v.dtype)
        b_dh = tl.load(dh + p_h, mask=m_h, other=0.0).to(b_v.dtype)
        b_ds = tl.dot(b_do, tl.trans(b_v), b_ds)
        b_dst = tl.dot(b_v, tl.trans(b_do), b_dst)
        b_dq = tl.dot(b_do, b_h, b_dq)
        b_dk = tl.dot(b_v, b_dh, b_dk)
        if w_dv is not None:
            b_dv = tl.load(w_dv + p_v, mask=m_v, other=0.0).to(b_v.dtype)
            b_dw = tl.dot(b_dv, b_h, b_dw)
        b_hdh += b_h.to(tl.float32) * b_dh.to(tl.float32)

    p_k = (first * H + i_h // (HV // H)) * K + r[:, None] * (H * K) + o_k[None, :]
    p_dk = (first * HV + i_h) * K + r[:, None] * (HV * K) + o_k[None, :]
    if w_dv is not None:
        tl.store(dw + p_dk, (-b_dw).to(dw.dtype.element_ty), mask=m_k)
    b_q = tl.load(q + p_k, mask=m_k, other=0.0)
    b_k = tl.load(k + p_k, mask=m_k, other=0.0)
    p_g = first * HV + i_h + r * HV
    b_g = tl.load(g + p_g, mask=m_t, other=0.0).to(tl.float32)
    last = min(left, BT) - 1
    b_last = tl.load(g + (first + last) * HV + i_h).to(tl.float32)
    b_dlast = tl.sum(tl.sum(b_hdh, 1), 0) * tl.math.exp2(b_last)
    b_dq *= (tl.math.exp2(b_g) * scale)[:, None]
    b_dk *= tl.where(m_t, tl.math.exp2(b_last - b_g), 0.0)[:, None]
    b_dlast += tl.sum(tl.sum(b_dk * b_k, 1), 0)
    # Only pairs in order, whose decays are at most 1: exponents of the others, or past the end, may be anything.
    m_s = (r[:, None] >= r[None, :]) & m_t[:, None]
    m_st = (r[:, None] <= r[None, :]) & m_t[None, :]
    b_ds = tl.where(m_s, b_ds * tl.math.exp2(b_g[:, None] - b_g[None, :]), 0.0) * scale
    b_dst = tl.where(m_st, b_dst * tl.math.exp2(b_g[None, :] - b_g[:, None]), 0.0) * scale
    b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq)
    b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk)
    tl.store(dq + p_dk, b_dq.to(dq.dtype.element_ty), mask=m_k)
    tl.store(dk + p_dk, b_dk.to(dk.dtype.element_ty), mask=m_k)
    b_dg = tl.sum(b_dq * b_q - b_dk * b_k, 1) + tl.where(r == last, b_dlast, 0.0)
    tl.store(dg + i_k * (num_rows.to(tl.int64) * HV) + p_g, b_dg, mask=m_t)
