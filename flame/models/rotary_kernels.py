"""Rotary position embedding of whole heads: one read and one write.

FLA fills its output with zeros first, for rows that padding leaves out, and copies a gradient before it turns it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flame.host_copy import host_copy
from flame.models.native_attention import document_position_ids

BLOCK_ELEMENTS = 2048  # of each half of the heads, in a program
NUM_WARPS = 8


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    positions,
    y,
    num_rows,
    offset,
    H: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BACK: tl.constexpr,
):
    """x, y: [rows, 2 R], row r being head r % H of token r // H; cos, sin: [max_position, R]; positions: [rows / H]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    position = tl.load(positions + row // H, inside, other=0).to(tl.int64) + offset
    column = tl.arange(0, R)
    at = row[:, None] * (2 * R) + column[None, :]
    at_angle = position[:, None] * R + column[None, :]
    b_cos = tl.load(cos + at_angle, inside[:, None]).to(tl.float32)
    b_sin = tl.load(sin + at_angle, inside[:, None]).to(tl.float32)
    if BACK:
        b_sin = -b_sin
    first = tl.load(x + at, inside[:, None]).to(tl.float32)
    second = tl.load(x + at + R, inside[:, None]).to(tl.float32)
    tl.store(y + at, (first * b_cos - second * b_sin).to(y.dtype.element_ty), inside[:, None])
    tl.store(y + at + R, (first * b_sin + second * b_cos).to(y.dtype.element_ty), inside[:, None])


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, offset: int) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.offset = offset
        return turn(x, cos, sin, positions, offset, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return turn(gradient.contiguous(), *ctx.saved_tensors, ctx.offset, back=True), None, None, None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, offset: int, back: bool) -> Tensor:
    """Turn every pair of channels (c, c + D / 2) of contiguous heads by its token's angle, or back.

    Args:
        x: [B, T, H, D], D a power of two.
        cos, sin: [max_position, D / 2].
        positions: of the tokens, int32 [B * T].
        offset: added to all positions.
    """
    y = torch.empty_like(x)
    num_heads, half = x.shape[2], x.shape[3] // 2
    num_rows, rows = x.numel() // x.shape[3], max(1, BLOCK_ELEMENTS // half)
    grid = (triton.cdiv(num_rows, rows),)
    options = {"H": num_heads, "R": half, "ROWS": rows, "BACK": back}
    rotary_kernel[grid](x, cos, sin, positions, y, num_rows, offset, **options, num_warps=NUM_WARPS)
    return y


def make_rotary_embedding(original: Callable) -> Callable:
    """FLA's ``rotary_embedding``; turning a part of a head, or in place, or from many offsets, is left to FLA's."""

    def rotary_embedding(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> Tensor:
        head_dim = x.shape[-1]
        is_plain = not interleaved and not inplace and isinstance(seqlen_offsets, int)
        is_whole = cos.shape == sin.shape and 2 * cos.shape[-1] == head_dim and head_dim & (head_dim - 1) == 0
        is_known = is_plain and 0 <= seqlen_offsets <= len(cos) - x.shape[1] and x.dtype == cos.dtype == sin.dtype
        if not (is_plain and is_whole and is_known and x.numel() and cos.is_contiguous() and sin.is_contiguous()):
            return original(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, chunk_indices)
        return _Rotary.apply(x.contiguous(), cos, sin, positions_of(x, cu_seqlens), seqlen_offsets)

    return rotary_embedding


def positions_of(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Each token's position in its row or, in a packed row, in its document: int32 [B * T], computed on the device."""
    batch_size, num_tokens = x.shape[:2]
    if cu_seqlens is None:
        return torch.arange(num_tokens, dtype=torch.int32, device=x.device).repeat(batch_size)

    def compute() -> Tensor:
        return document_position_ids(cu_seqlens, num_tokens).int().flatten()

    known = host_copy(cu_seqlens)
    return compute() if known is None else known.once(("positions", num_tokens), compute)  # for all layers
