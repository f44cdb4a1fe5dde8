"""Gradient clipping over parameters that are sharded, shared and spread over pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate


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
        The norm before clipping, a float32 scalar on the device of the mesh, equal on every rank. The host does not
        wait for it, unless gradients are in its memory.
    """
    parameters, copied = list(parameters), set(map(id, copies))
    counted = [each.grad for each in parameters if each.grad is not None and id(each) not in copied]
    if any(isinstance(each, DTensor) and each.device.type != each.device_mesh.device_type for each in counted):
        norm = norm_of_shards(counted)
    else:
        norm = torch.nn.utils.get_total_norm(counted, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if stages is not None:
        square = norm.square()
        dist.all_reduce(square, group=stages)
        norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def norm_of_shards(grads: Iterable[DTensor]) -> torch.Tensor:
    """The joint 2-norm of gradients in the host's memory, a float32 scalar on the device of their mesh.

    Shards are summed up where they are, and the ranks' sums where the mesh is, whose groups may have no way for tensors
    of a CPU.
    """
    alike: dict[tuple, list[torch.Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device_mesh, grad.placements), []).append(grad.to_local())
    squares = []
    for (mesh, placements), shards in alike.items():
        own = torch.nn.utils.get_total_norm(shards, foreach=True).square().to(mesh.device_type)
        parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
        squares.append(DTensor.from_local(own, mesh, parts, run_check=False).full_tensor())
    return torch.stack(squares).sum().sqrt()
