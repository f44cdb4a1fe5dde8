"""Operators that look back a fixed number of tokens: they take the last inputs of the piece before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flame.parallel.collectives import gather_stacked
from flame.parallel.context import ContextParallel


def convolution(context: ContextParallel, original: Callable) -> Callable:
    """FLA's ``causal_conv1d`` of a piece [1, L, D], with weight [D, W]."""

    def causal_conv1d(x: Tensor, weight: Tensor, *args: Any, cu_seqlens: Tensor | None = None, **options: Any):
        assert options.get("initial_state") is None and not options.get("output_final_state"), "training keeps no cache"
        previous = _inputs_before(context, x, weight.shape[-1]).t()  # [D, W]
        options |= {"initial_state": _of_first_document(context, previous), "output_final_state": False}
        return original(x, weight, *args, cu_seqlens=cu_seqlens, **options)

    return causal_conv1d


def shift(context: ContextParallel, original: Callable) -> Callable:
    """RWKV's ``token_shift`` of a piece [1, L, D]; the cache that it also returns is that of the piece alone."""

    def token_shift(x: Tensor, cu_seqlens: Tensor, cache: Tensor | None = None, **options: Any):
        assert cache is None, "training keeps no cache"
        previous = _inputs_before(context, x, 1)[0]  # [D]
        return original(x, cu_seqlens, cache=_of_first_document(context, previous), **options)

    return token_shift


def _inputs_before(context: ContextParallel, x: Tensor, reach: int) -> Tensor:
    """The ``reach`` tokens [reach, D] before the piece x [1, L, D]; those of other documents are zeros."""
    piece = context.piece
    ends = gather_stacked(x[0, -reach:], context.group)  # [ranks, reach, D]
    is_own = torch.arange(reach, device=x.device) >= reach - min(piece.before, reach)
    return torch.where(is_own[:, None], ends[max(piece.rank - 1, 0)], 0.0)


def _of_first_document(context: ContextParallel, x: Tensor) -> Tensor:
    """[...] -> [N, ...] for the piece's documents; zeros but for the first."""
    others = x.new_zeros(len(context.piece.cu_seqlens) - 2, *x.shape)
    return torch.cat([x[None], others])
