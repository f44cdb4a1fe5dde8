"""Tensor parallelism with sequence parallelism: the ranks of a group share each mixer, each MLP and the vocabulary.

Between the shared modules every rank holds a piece of the sequence, [B, T/ranks, D], and works on it alone (norms,
residuals). A shared module gathers the whole sequence, computes its share of the heads or channels on plain local
tensors, as if it were a smaller module of the same kind (so that any kernel runs unchanged), and adds up its output
with the others', each rank keeping its piece (Korthikanti et al. 2022, arXiv:2205.05198).

Parameters become DTensors over the group. While a shared module runs, each of them is shadowed by its local tensor: an
entry of the module's ``__dict__`` goes before the parameter of that name, which stays registered under it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flame.errors import UserError
from flame.parallel.collectives import gather_stacked, sum_and_scatter

SEQUENCE = 1  # the dimension of hidden states [B, T, D] that ranks share


@dataclass(frozen=True)
class Split:
    """How the ranks share one module.

    Attributes:
        rows: parameters, or submodules with all their parameters, of which each rank has an equal part of dimension 0,
            such as the projection to its heads. Names that a module does not have count for nothing.
        columns: submodules of whose weights each rank has a part of dimension 1: projections from its heads, whose
            outputs are added up.
        counts: integer attributes that count what is split (heads, widths); each rank's is its part of them.
        sliced: parameters that every rank holds and uses a part of: name -> the rows of ``rank`` of ``size``.
        arguments: keyword arguments of the forward of which each rank takes its part of the last dimension.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    sliced: dict[str, Callable[[nn.Module, int, int], Tensor]] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def placement(self, parameter: str) -> Shard | Replicate:
        """Where the ranks hold a parameter of the module."""
        if any(parameter == each or parameter.startswith(f"{each}.") for each in self.rows):
            return Shard(0)
        return Shard(1) if any(parameter == f"{each}.weight" for each in self.columns) else Replicate()


def share_module(name: str, module: nn.Module, split: Split, mesh: DeviceMesh) -> None:
    """Let the ranks of ``mesh`` (1-D) share a module; all others in it are whole on every rank.

    Raises:
        UserError: something that is split does not divide; names it and the degree.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    counts = {each: getattr(module, each) for each in split.counts if getattr(module, each, None) is not None}
    for attribute, count in counts.items():
        _check_divides(f"{name}.{attribute}", count, size)
    whole_rows = {each: rows_of(module, rank, size) for each, rows_of in split.sliced.items()}
    for each, parameter in list(module.named_parameters()):
        placement = split.placement(each)
        if isinstance(placement, Shard):
            _check_divides(f"dimension {placement.dim} of {name}.{each}", parameter.shape[placement.dim], size)
        distribute_parameter(module, each, placement, mesh)
    for attribute, count in counts.items():
        setattr(module, attribute, count // size)

    shadows = Shadows(module, split, whole_rows, rank)
    group = mesh.get_group()

    def enter(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        shadows.put()
        kwargs = {
            key: _own_part(value, rank, size) if key in split.arguments else value for key, value in kwargs.items()
        }
        if args:
            return (gather_sequence(args[0], group), *args[1:]), kwargs
        first = "hidden_states" if "hidden_states" in kwargs else "x"
        return args, kwargs | {first: gather_sequence(kwargs[first], group)}

    def leave(_module: nn.Module, _args: tuple, output: Any) -> Any:
        shadows.remove()
        if output is None:
            return None  # the forward raised
        if isinstance(output, tuple):
            return (scatter_sequence(output[0], group), *output[1:])
        return scatter_sequence(output, group)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def keep_module(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a module whole on every rank; each works on its piece of the sequence, so that gradients are added up."""
    for name, _ in list(module.named_parameters()):
        distribute_parameter(module, name, Replicate(), mesh)
    shadows = Shadows(module)
    module.register_forward_pre_hook(lambda *_: shadows.put())
    module.register_forward_hook(lambda *_: shadows.remove(), always_call=True)


def distribute_parameter(module: nn.Module, name: str, placement: Shard | Replicate, mesh: DeviceMesh) -> None:
    """Make a parameter on the meta device a DTensor over ``mesh``; nothing is sent."""
    owner_name, _, attribute = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    parameter = getattr(owner, attribute)
    if isinstance(parameter, DTensor):
        return
    value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    setattr(owner, attribute, nn.Parameter(value, requires_grad=parameter.requires_grad))


def local_parameter(parameter: Tensor, scale: float = 1.0) -> Tensor:
    """This rank's part of a parameter; of a whole one all of it, with a gradient that the ranks add up."""
    if not isinstance(parameter, DTensor):
        return parameter
    whole = all(isinstance(placement, Replicate) for placement in parameter.placements)
    local = parameter.to_local(grad_placements=[Partial()] if whole else None)
    return local if scale == 1.0 else local * scale


class Shadows:
    """Local tensors in front of a module's parameters while it runs.

    Args:
        module: its parameters are DTensors.
        split: how the ranks share it.
        rows: rows of whole parameters that this rank uses.
        rank: this rank's place in the group.
    """

    def __init__(
        self, module: nn.Module, split: Split | None = None, rows: dict[str, Tensor] | None = None, rank: int = 0
    ):
        self.module, self.rows = module, rows or {}
        # What is added to outputs that the ranks add up must be added once.
        self.added = {f"{each}.bias" for each in (split or Split()).columns if rank}
        self.put_into: list[tuple[dict, str]] = []

    def put(self) -> None:
        for name, parameter in self.module.named_parameters():
            owner_name, _, attribute = name.rpartition(".")
            local = local_parameter(parameter, 0.0 if name in self.added else 1.0)
            if name in self.rows:
                local = local[self.rows[name].to(local.device)]
            namespace = vars(self.module.get_submodule(owner_name))
            namespace[attribute] = local
            self.put_into.append((namespace, attribute))

    def remove(self) -> None:
        while self.put_into:
            namespace, attribute = self.put_into.pop()
            namespace.pop(attribute, None)


def _check_divides(what: str, count: int, size: int) -> None:
    if count % size:
        raise UserError(f"training.tensor_parallel_degree = {size} does not divide {what} = {count}")


def _own_part(value: Any, rank: int, size: int) -> Any:
    return value.chunk(size, -1)[rank] if isinstance(value, Tensor) else value


def gather_sequence(piece: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, T/ranks, D] of each rank → [B, T, D]; in the backward the ranks' gradients are added up and cut again."""
    return gather_stacked(piece, group).movedim(0, SEQUENCE).flatten(SEQUENCE, SEQUENCE + 1)


def scatter_sequence(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up [B, T, D] of all ranks and keep this rank's piece [B, T/ranks, D]; the backward gathers."""
    return sum_and_scatter(share.unflatten(SEQUENCE, (dist.get_world_size(group), -1)).movedim(SEQUENCE, 0), group)
