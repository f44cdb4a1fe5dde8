"""Softmax attention over pieces of a row: keys and values of earlier pieces, or all pieces of some heads; positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flame.parallel.collectives import exchange, gather_stacked
from flame.parallel.context import ContextParallel


def rotary(context: ContextParallel, original: Callable) -> Callable:
    """Rotary embedding whose first document goes on from earlier pieces."""

    def forward(module: Any, q: Tensor, k: Tensor, seqlen_offset: int = 0, *args: Any, **options: Any):
        longest = max(options.get("max_seqlen") or 0, context.size * context.piece.length)
        return original(module, q, k, context.row.offsets, *args, **options | {"max_seqlen": longest})

    return forward


def attention_over_gathered(context: ContextParallel, original: Callable) -> Callable:
    """A piece's queries over the keys and values of its documents in this piece and the earlier ones."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Tensor:
        left, _ = options.get("window_size", (-1, -1))
        before = context.piece.before if left < 0 else min(context.piece.before, left)
        k, v = (_with_earlier(context, each, before, left) for each in (k, v))
        bounds = context.row.bounds_with(before)
        return original(q, k, v, cu_seqlens_q, bounds, max_seqlen_q, max_seqlen_k + before, **options)

    return flash_attn_varlen_func


def _with_earlier(context: ContextParallel, x: Tensor, before: int, left: int) -> Tensor:
    """[L, H, D] -> [before + L, H, D]; ``left`` is how far a window lets any query look back, -1 for no window."""
    piece = context.piece
    if 0 < left <= piece.length:  # only the end of the piece before can be seen
        ends = gather_stacked(x[-left:], context.group)
        return torch.cat([ends[max(piece.rank - 1, 0), left - before :], x])
    whole = gather_stacked(x, context.group).flatten(0, 1)
    return whole[piece.start - before : piece.start + piece.length]


def attention_over_heads(context: ContextParallel, original: Callable) -> Callable:
    """Exchange a piece of all heads for all pieces of some heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Tensor:
        bounds = context.row.bounds
        longest = max_seqlen_q * context.size
        q, k, v = (_to_heads(context, each) for each in (q, k, v))
        return _to_pieces(context, original(q, k, v, bounds, bounds, longest, longest, **options))

    return flash_attn_varlen_func


def stickbreaking_over_heads(context: ContextParallel, original: Callable) -> Callable:
    """Stick-breaking attention [1, L, H, D] over whole rows of some heads."""

    def parallel_stickbreaking_attn(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_to_heads(context, each[0])[None] for each in (q, k, v))
        o, rest = original(q=q, k=k, v=v, cu_seqlens=context.row.bounds, **options)
        return _to_pieces(context, o[0])[None], _to_pieces(context, rest[0][..., None])[None, ..., 0]

    return parallel_stickbreaking_attn


def _to_heads(context: ContextParallel, x: Tensor) -> Tensor:
    """[L, H, D] -> [ranks L, H / ranks, D]."""
    return exchange(x.unflatten(1, (context.size, -1)).movedim(1, 0), context.group).flatten(0, 1)


def _to_pieces(context: ContextParallel, x: Tensor) -> Tensor:
    """[ranks L, H / ranks, D] -> [L, H, D]."""
    return exchange(x.unflatten(0, (context.size, -1)), context.group).movedim(0, 1).flatten(1, 2)
