"""Fully sharded data parallelism (FSDP2), used for one device as for many so that precision is one code path."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map

from flame.parallel.precision import DTYPES

# Parameters of a unit on one device: of the copies that casting and reducing it makes, 0.4 GiB.
LARGEST_UNIT = 64_000_000


def shard_model(
    model: nn.Module,
    blocks: Iterable[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    *,
    param_dtype: str,
    reduce_dtype: str,
    reshard_after_forward: str,
    offload: bool = False,
) -> None:
    """Shard a model's parameters over a mesh, one FSDP unit per block and one for the rest.

    On one device, where there is nothing to gather, small blocks share a unit: each costs the host time. What a block
    computes is the same in both cases.

    Master weights stay as they are (float32); each unit is gathered in ``param_dtype`` just before it computes, and
    gradients are averaged in ``reduce_dtype``.

    Args:
        model: model on the meta device, or materialised.
        blocks: (name, module) of the repeated blocks, in forward order.
        mesh: 1-D device mesh to shard over, or 2-D: (copies, shards of each).
        param_dtype: dtype of the compute copies, a key of ``DTYPES``.
        reduce_dtype: dtype of the gradient reduction.
        reshard_after_forward: ``always`` frees a block's gathered weights after its forward; ``never`` keeps them for
            the backward; ``default`` is ``always`` on several ranks.
        offload: keep shards, gradients and with them the optimizer's state in the host's memory, page-locked.
    """
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[param_dtype], reduce_dtype=DTYPES[reduce_dtype])
    # With one rank there is nothing to give back: the "gathered" weights are a cast copy, and freeing it would only
    # cost a second cast in the backward.
    reshard = mesh.size(-1) > 1 if reshard_after_forward == "default" else reshard_after_forward == "always"
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for unit in units_of([block for _, block in blocks], LARGEST_UNIT if mesh.size() == 1 and not reshard else 0):
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard, offload_policy=policy)
        for block in unit if len(unit) > 1 else ():  # torch 2.11 casts inputs of the first that runs alone
            block.register_forward_pre_hook(partial(_cast_inputs, DTYPES[param_dtype]), with_kwargs=True)
    # The root holds embedding, final norm and head, which the backward needs first: keep them gathered.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False, offload_policy=policy)


def units_of(blocks: list[nn.Module], largest: int) -> list[list[nn.Module]]:
    """Neighbouring blocks, together as long as they have at most ``largest`` parameters."""
    units: list[list[nn.Module]] = []
    room = 0
    for block in blocks:
        size = sum(parameter.numel() for parameter in block.parameters())
        if size > room:
            units.append([])
            room = largest
        units[-1].append(block)
        room -= size
    return units


def num_sharded(blocks: Iterable[nn.Module]) -> int:
    """How many of the blocks are in units of blocks; the others are in that of the rest."""
    return sum(isinstance(block, FSDPModule) for block in blocks)


def _cast_inputs(dtype: torch.dtype, _block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """A block's inputs with floating-point tensors in ``dtype``, as FSDP casts those of a unit."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tree_map(cast, args), tree_map(cast, kwargs)


def reshard(model: nn.Module) -> None:
    """Give every unit its sharded parameters back.

    A forward without a backward leaves the gathered ones registered, and whoever lists the parameters then, such as an
    optimizer, gets tensors that training never updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
