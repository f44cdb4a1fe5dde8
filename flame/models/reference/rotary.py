"""Rotary position embedding (RoFormer, arXiv:2104.09864) over packed documents."""

from __future__ import annotations

import torch
from torch import Tensor

from flame.models.reference.packing import compute_dtype, document_lengths, document_positions


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
    """Rotate the first R channels of every head by its token's position in the document.

    Args:
        x: [B, T, H, D], R <= D.
        cos, sin: [max_position, R / 2] tables.
        interleaved: pairs are channels (0, 1), (2, 3), ... and not (0, R / 2), (1, R / 2 + 1), ...
        inplace: write the result into x.
        seqlen_offsets: position of the first token, one for all or [N] per document.
        cu_seqlens: [N + 1] document bounds of one packed row.
    """
    positions = _positions(x, seqlen_offsets, cu_seqlens)  # [B or 1, T]
    dtype, half = compute_dtype(x), cos.shape[1]
    cos, sin = (table[positions].to(dtype).unsqueeze(-2) for table in (cos, sin))  # [B or 1, T, 1, R / 2]
    rotated, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    a, b = rotated.unflatten(-1, (half, 2)).unbind(-1) if interleaved else rotated.chunk(2, dim=-1)
    parts = (a * cos - b * sin, a * sin + b * cos)
    y = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    y = y.to(x.dtype) if rest.shape[-1] == 0 else torch.cat([y.to(x.dtype), rest], dim=-1)
    return x.copy_(y) if inplace else y


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    batch_size, seq_len = x.shape[:2]
    if cu_seqlens is None:
        positions = torch.arange(seq_len, device=x.device)[None]
        return positions + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    lengths = document_lengths(batch_size, seq_len, cu_seqlens)
    positions = document_positions(lengths).to(x.device)[None]
    if isinstance(offsets, Tensor):
        offsets = offsets.repeat_interleave(lengths.to(offsets.device), output_size=seq_len)
    return positions + offsets
