"""Collectives that autograd differentiates, on tensors whose first dimension counts the ranks of a group.

Every rank of the group must run the backward of each: a graph that loses one of them on some rank hangs the others.
``anchor`` keeps a result in the graph where its value does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of each rank → [ranks, ...]; in the backward each rank gets the sum of all ranks' gradients of its own."""
    return _GatherStacked.apply(x, group)


def sum_and_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...] of each rank, added up, → this rank's [...]; the backward gathers."""
    return _SumAndScatter.apply(x, group)


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: entry j goes to rank j, and entry i of the result came from rank i; its own backward."""
    return _Exchange.apply(x, group)


def anchor(x: Tensor, *others: Tensor) -> Tensor:
    """``x``, with ``others`` in its graph; their gradients are zero."""
    return _Anchor.apply(x, *others)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    rows = x.view(-1)
    gathered = rows.new_empty(dist.get_world_size(group) * rows.numel())
    dist.all_gather_into_tensor(gathered, rows, group=group)
    return gathered.view(-1, *x.shape)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = x.new_empty(x[0].numel())
    dist.reduce_scatter_tensor(own, x.contiguous().view(-1), group=group)
    return own.view(x.shape[1:])


class _GatherStacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, ctx.group), None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received, None


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
