"""Fully sharded data parallelism (FSDP2), used for one device as for many so that precision is one code path."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from flame.parallel.precision import DTYPES


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
    for _, block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard, offload_policy=policy)
    # The root holds embedding, final norm and head, which the backward needs first: keep them gathered.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False, offload_policy=policy)


def num_sharded(blocks: Iterable[nn.Module]) -> int:
    """How many of the blocks are units of their own."""
    return sum(isinstance(block, FSDPModule) for block in blocks)


def reshard(model: nn.Module) -> None:
    """Give every unit its sharded parameters back.

    A forward without a backward leaves the gathered ones registered, and whoever lists the parameters then, such as an
    optimizer, gets tensors that training never updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
