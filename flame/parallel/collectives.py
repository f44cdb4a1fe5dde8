"""Collectives that autograd differentiates; a dimension that counts the ranks of the group is the first.

Every rank of the group must run the backward of each: a graph that loses one of them on some rank hangs the others.
``anchor`` keeps a result in the graph where its value does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has new names for these two and warns of the old ones, which are all that torch 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of each rank → [ranks, ...]; in the backward each rank gets the sum of all ranks' gradients of its own."""
    return _Collective.apply(x, group, _gather, _scatter)


def sum_and_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...] of each rank, added up, → this rank's [...]; the backward gathers."""
    return _Collective.apply(x, group, _scatter, _gather)


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: entry j goes to rank j, and entry i of the result came from rank i; its own backward."""
    return _Collective.apply(x, group, _exchange, _exchange)


def sum_for_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of all ranks added up; each goes on with the sum in its own way, so that the gradients are added up too."""
    return _Collective.apply(x, group, _sum, _sum)


def sum_of_shares(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of all ranks added up, to one end that they share: the gradient of each is that of the sum."""
    return _Collective.apply(x, group, _sum, lambda grad, _group: grad)


def anchor(x: Tensor, *others: Tensor) -> Tensor:
    """``x``, with ``others`` in its graph; their gradients are zero."""
    return _Anchor.apply(x, *others)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    rows = x.view(-1)
    gathered = rows.new_empty(dist.get_world_size(group) * rows.numel())
    _all_gather(gathered, rows, group=group)
    return gathered.view(-1, *x.shape)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = x.new_empty(x[0].numel())
    _reduce_scatter(own, x.contiguous().view(-1), group=group)
    return own.view(x.shape[1:])


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


_Run = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, run: _Run, run_back: _Run) -> Tensor:
        ctx.group, ctx.run_back = group, run_back
        return run(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.run_back(grad, ctx.group), None, None, None


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
