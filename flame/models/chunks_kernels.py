"""What Triton kernels share that work chunk by chunk: where a program's part of packed documents lies.

Packed documents come with cu_seqlens [N + 1], chunk_indices [chunks, 2] (document, chunk in it) and chunk_offsets
[N + 1] (chunks before each document); without them every row of the batch is a document.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate_chunk(cu_seqlens, chunk_indices, pid, T, H: tl.constexpr, BT: tl.constexpr):
    """A program's chunk: its number, its head, its first token, and how many tokens of the document are left there."""
    i_c = (pid // H).to(tl.int64)
    i_h = pid % H
    if cu_seqlens is not None:
        i_n = tl.load(chunk_indices + i_c * 2).to(tl.int32)
        i_t = tl.load(chunk_indices + i_c * 2 + 1).to(tl.int32)
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        left = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - start).to(tl.int32) - i_t * BT
        first = start + i_t * BT
    else:
        num_chunks = tl.cdiv(T, BT)
        i_t = (i_c % num_chunks).to(tl.int32)
        left = T - i_t * BT
        first = (i_c // num_chunks) * T + i_t * BT
    return i_c, i_h, first, left


@triton.jit
def locate_document(cu_seqlens, chunk_offsets, order, i, T, BT: tl.constexpr):
    """The i-th document in ``order``: its number, its first token, its length and its first chunk."""
    i_n = tl.load(order + i).to(tl.int64) if order is not None else i.to(tl.int64)
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - start).to(tl.int32)
        first_chunk = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        start = i_n * T
        length = T
        first_chunk = i_n * tl.cdiv(T, BT)
    return i_n, start, length, first_chunk
