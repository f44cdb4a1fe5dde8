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
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flame.errors import UserError
from flame.parallel.collectives import gather_stacked, sum_and_scatter, sum_for_all

SEQUENCE = 1  # the dimension of hidden states [B, T, D] that ranks share


@dataclass(frozen=True)
class Split:
    """How the ranks share one module. Names may have dots; those that a module does not have count for nothing.

    Attributes:
        rows: parameters, or submodules with all their parameters, of which each rank has an equal part of dimension 0,
            such as the projection to its heads.
        columns: submodules of whose weights each rank has a part of dimension 1: projections from its heads. The
            module's output is that of one, and is added up.
        summed: those of ``columns`` whose output is used within the module: added up where it arises, for every rank.
        counts: integer attributes that count what is split (heads, widths); each rank's is its part of them.
        divisible: integers that must divide as well, such as those of a config, and stay what they are.
        changed: other integer attributes: name -> each rank's, of the whole module and the number of ranks.
        sliced: parameters that every rank holds and uses a part of: name -> the rows of ``rank`` of ``size``.
        norms: RMS norms over all heads: the ranks share the mean square. A submodule that is called, or the name of
            the weight's owner where an operator takes the weight.
        arguments: keyword arguments of the forward of which each rank takes its part of the last dimension.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    changed: dict[str, Callable[[nn.Module, int], int]] = field(default_factory=dict)
    sliced: dict[str, Callable[[nn.Module, int, int], Tensor]] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def placement(self, parameter: str) -> Shard | Replicate:
        """Where the ranks hold a parameter of the module."""
        if any(parameter == each or parameter.startswith(f"{each}.") for each in self.rows):
            return Shard(0)
        return Shard(1) if any(parameter == f"{each}.weight" for each in self.columns) else Replicate()


@dataclass(frozen=True)
class Share:
    """A module as one rank of a group has it.

    Attributes:
        module: the module that is shared.
        split: how.
        group: the ranks.
    """

    module: nn.Module
    split: Split
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Added up over the ranks, for all of them."""
        return sum_for_all(x, self.group)

    def norm_correction(self, x: Tensor, eps: float) -> Tensor:
        """What turns an RMS norm of this rank's channels x [..., D/ranks] into its part of one over all: [..., 1].

        The norm is linear in the inverse root, so that any kernel can compute it first.
        """
        own = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True)
        return ((own + eps) / (self.sum(own) / self.size + eps)).sqrt()


_running: ContextVar[Share | None] = ContextVar("running", default=None)


def running_share() -> Share | None:
    """The shared module whose forward is under way, for operators that need to know."""
    return _running.get()


def share_module(name: str, module: nn.Module, split: Split, mesh: DeviceMesh) -> None:
    """Let the ranks of ``mesh`` (1-D) share a module; all others in it are whole on every rank.

    Raises:
        UserError: something that is split does not divide; names it and the degree.
    """
    share = Share(module, split, mesh.get_group())
    numbers = _divide_numbers(name, share)
    whole_rows = {
        each: rows_of(module, share.rank, share.size)
        for each, rows_of in split.sliced.items()
        if _get(module, each) is not None
    }
    for each, parameter in list(module.named_parameters()):
        placement = split.placement(each)
        if isinstance(placement, Shard):
            _check_divides(f"dimension {placement.dim} of {name}.{each}", parameter.shape[placement.dim], share.size)
        distribute_parameter(module, each, placement, mesh)
    for each, number in numbers.items():
        owner, _, attribute = each.rpartition(".")
        setattr(module.get_submodule(owner), attribute, number)
    for each in split.summed:
        module.get_submodule(each).register_forward_hook(lambda _module, _args, output: share.sum(output))
    _run_shared(share, Shadows(module, split, whole_rows, share.rank))


def _divide_numbers(name: str, share: Share) -> dict[str, int]:
    """This rank's value of each attribute that counts what is split."""
    module, split = share.module, share.split
    counts = {each: _get(module, each) for each in (*split.counts, *split.divisible)}
    for attribute, count in counts.items():
        if count is not None:
            _check_divides(f"{name}.{attribute}", count, share.size)
    numbers = {each: counts[each] // share.size for each in split.counts if counts[each] is not None}
    return numbers | {each: number_of(module, share.size) for each, number_of in split.changed.items()}


def _run_shared(share: Share, shadows: Shadows) -> None:
    """Let the module's forward take pieces of the sequence and give pieces, working on this rank's part between."""
    tokens: list[Any] = []

    def enter(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        shadows.put()
        tokens.append(_running.set(share))
        kwargs = {
            key: _own_part(value, share.rank, share.size) if key in share.split.arguments else value
            for key, value in kwargs.items()
        }
        if args:
            return (gather_sequence(args[0], share.group), *args[1:]), kwargs
        first = "hidden_states" if "hidden_states" in kwargs else "x"
        return args, kwargs | {first: gather_sequence(kwargs[first], share.group)}

    def leave(_module: nn.Module, _args: tuple, output: Any) -> Any:
        shadows.remove()
        while tokens:
            _running.reset(tokens.pop())
        if output is None:
            return None  # the forward raised
        if isinstance(output, tuple):
            return (scatter_sequence(output[0], share.group), *output[1:])
        return scatter_sequence(output, share.group)

    share.module.register_forward_pre_hook(enter, with_kwargs=True)
    share.module.register_forward_hook(leave, always_call=True)


def keep_module(module: nn.Module, mesh: DeviceMesh, *, recurse: bool = True) -> None:
    """Keep a module whole on every rank; each works on its piece of the sequence, so that gradients are added up.

    Args:
        recurse: also the parameters of its submodules.
    """
    for name, _ in list(module.named_parameters(recurse=recurse)):
        distribute_parameter(module, name, Replicate(), mesh)
    shadows = Shadows(module, recurse=recurse)
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
        recurse: also the parameters of its submodules.
    """

    def __init__(
        self,
        module: nn.Module,
        split: Split | None = None,
        rows: dict[str, Tensor] | None = None,
        rank: int = 0,
        *,
        recurse: bool = True,
    ):
        self.module, self.rows, self.recurse = module, rows or {}, recurse
        # What is added to outputs that the ranks add up must be added once.
        self.added = {f"{each}.bias" for each in (split or Split()).columns if rank}
        self.put_into: list[tuple[dict, str]] = []

    def put(self) -> None:
        for name, parameter in self.module.named_parameters(recurse=self.recurse):
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


def _get(module: nn.Module, name: str) -> Any:
    """An attribute, by a name that may have dots; None where there is none."""
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


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
