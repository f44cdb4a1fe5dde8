"""A world of ranks in one process: groups and meshes are real, and whatever is sent only counted.

Private interfaces used here (torch 2.11 to 2.13): ``torch.testing._internal.distributed.fake_pg``, the process group
that torch has for tools like this one, and ``torch.utils._python_dispatch.TorchDispatchMode``, the documented extension
point. Neither has a public counterpart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flame.parallel.degrees import Degrees
from flame.parallel.distributed import Distributed, make_distributed


def join_fake_world(degrees: Degrees) -> Distributed:
    """The place of one rank in a job with these degrees; its tensors are on the meta device.

    It is the last along the context axis, which has others before it, and the first along all others.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # slow to import

    rank = (degrees.context - 1) * degrees.tensor
    dist.init_process_group("fake", rank=rank, world_size=degrees.world, store=FakeStore())
    return make_distributed(rank, 0, degrees, torch.device("meta"), dist.group.WORLD, mesh_device="cpu")


class Traffic(TorchDispatchMode):
    """Counts, while it is active, what a rank would send in collectives.

    Args:
        groups: those to count, under a name of each.

    Attributes:
        sent: bytes so far, by the group's name. Ring algorithms are assumed, whose volume is the least possible.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]):
        super().__init__()
        self.sent: Counter[str] = Counter()
        self._names = {group.group_name: name for name, group in groups.items()}

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operator.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
            name = self._names.get(group.group_name)
            if name is not None:
                self.sent[name] += int(_VOLUMES[operator.name()](group.size(), args))
        return operator(*args, **(kwargs or {}))


def _bytes(x: Tensor | list[Tensor]) -> int:
    return sum(_bytes(each) for each in x) if isinstance(x, list) else x.numel() * x.element_size()


# Bytes that each of ``size`` ranks sends, from the operator's arguments: outputs come before inputs.
_VOLUMES: dict[str, Callable[[int, tuple], float]] = {
    "c10d::_allgather_base_": lambda size, args: _bytes(args[1]) * (size - 1),
    "c10d::_reduce_scatter_base_": lambda size, args: _bytes(args[0]) * (size - 1),
    "c10d::alltoall_base_": lambda size, args: _bytes(args[1]) * (size - 1) / size,
    "c10d::allreduce_": lambda size, args: 2 * _bytes(args[0]) * (size - 1) / size,
    "c10d::broadcast_": lambda size, args: _bytes(args[0]) * (size - 1) / size,
    "c10d::send": lambda size, args: _bytes(args[0]),
    "c10d::recv_": lambda size, args: 0,
    "c10d::barrier": lambda size, args: 0,
}
