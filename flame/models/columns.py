"""Columns of a matrix whose gradients may already lie side by side, where an operator has written them so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def split_columns(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """As ``x.split(sizes, dim=-1)``; gradients that are such columns themselves are not copied together."""
    if torch.compiler.is_compiling():  # tensors that are being traced lie nowhere
        return x.split(sizes, dim=-1)
    return _SplitColumns.apply(x, tuple(sizes))


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.split(sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None]:
        return _join(parts), None


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [..., D_i] as one, [..., D]."""
    first, starts = parts[0], accumulate((part.shape[-1] for part in parts), initial=0)
    home = first.untyped_storage().data_ptr(), first.stride(), first.storage_offset()
    are_beside = all(
        (part.untyped_storage().data_ptr(), part.stride(), part.storage_offset() - start) == home
        for part, start in zip(parts, starts, strict=False)
    )
    width = sum(part.shape[-1] for part in parts)
    if not are_beside or first.dim() < 2 or first.stride()[-2:] != (width, 1):
        return torch.cat(parts, dim=-1)
    return first.as_strided((*first.shape[:-1], width), first.stride())
