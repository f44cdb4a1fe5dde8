"""Gradient clipping over parameters that are sharded, shared and spread over pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    stages: dist.ProcessGroup | None = None,
    copies: Collection[nn.Parameter] = (),
) -> torch.Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``.

    Args:
        parameters: this rank's.
        max_norm: largest norm; infinite for no clipping.
        stages: the ranks of this rank's pipeline, each with parameters of its own.
        copies: parameters that another stage has too, and counts.

    Returns:
        The norm before clipping, a float32 scalar on the parameters' device, equal on every rank. The host does not
        wait for it.
    """
    parameters, copied = list(parameters), set(map(id, copies))
    counted = [each.grad for each in parameters if each.grad is not None and id(each) not in copied]
    norm = torch.nn.utils.get_total_norm(counted, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if stages is not None:
        square = norm.square()
        dist.all_reduce(square, group=stages)
        norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
