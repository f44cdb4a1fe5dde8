"""The process group, this process's place in it, and the few collectives the training loop needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flame.config import Comm
from flame.errors import UserError
from flame.parallel.degrees import Degrees

T = TypeVar("T")
SLOW_TIMEOUT = timedelta(hours=24)  # downloading and converting a dataset, writing and reading checkpoints


@dataclass(frozen=True)
class Distributed:
    """This process's place in the job.

    Attributes:
        rank: position among all processes, 0 … world_size − 1.
        local_rank: position among the processes of this node.
        world_size: number of processes.
        device: the device this process computes on.
        slow_group: gloo group of all ranks for what may take long: downloads, checkpoints.
        degrees: ranks along each axis.
        mesh: 4-D mesh (``pipeline``, ``replicate``, ``fsdp``, ``tensor``) that parameters are laid out on. Real even
            with one process, so that one device and many take the same FSDP2 path (torchtitan's ``ParallelDims`` has
            a fake group, which moves no data, for each degree of 1).
        loss_group: the ranks with this rank's place along ``tensor``; those of another hold the same losses.
        data_group: the ranks with this rank's place in every axis but those of the data.
        context_group: the ranks that hold the other pieces of this rank's sequences.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    slow_group: dist.ProcessGroup
    degrees: Degrees
    mesh: DeviceMesh
    loss_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    context_group: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def data_rank(self) -> int:
        """Which of the ``data_size`` shares of the sequences this rank works on."""
        return self.degrees.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Shares that the sequences are dealt to."""
        return self.degrees.data

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What FSDP shards over: 1-D, or 2-D with the copies first."""
        return self.mesh["replicate", "fsdp"] if self.degrees.replicate > 1 else self.mesh["fsdp"]

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a rank's share of the loss over all shares, in place; on a GPU the host does not wait for it."""
        dist.all_reduce(value, op=dist.ReduceOp.SUM, group=self.loss_group)
        return value

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """Sum what belongs to a share of the sequences over all shares, in place; on the CPU it waits for no GPU."""
        dist.all_reduce(value, op=dist.ReduceOp.SUM, group=self.data_group)
        return value

    def max(self, value: torch.Tensor) -> torch.Tensor:
        """Maximum of a tensor over all ranks, in place; on a GPU the host does not wait for it."""
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value

    def gather_from_data(self, value: object) -> list:
        """One plain value of each share of the sequences, on every rank, in the order of the shares."""
        return [each for rank, each in enumerate(self.gather(value)) if self.degrees.is_data_leader(rank)]

    def gather(self, value: object) -> list:
        """Every rank's plain value, in rank order, on every rank."""
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: object) -> object:
        """Rank 0's plain value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Rank 0's result of an action, None on the others; a UserError of rank 0 is raised on all.

        Raises:
            UserError: what the action raised.
        """
        result, fault = None, None
        if self.is_main:
            try:
                result = action()
            except UserError as error:
                fault = str(error)
        fault = self.broadcast(fault)
        if fault is not None:
            raise UserError(fault)
        return result

    def together(self, action: Callable[[], T]) -> T:
        """This rank's result of an action that waits for no other rank; if any rank refuses, all of them do.

        Without this the ranks that find nothing wrong would wait for the others, and end with a lost connection.

        Raises:
            UserError: what the action raised, with the ranks where it did not raise the same on all.
        """
        result, fault = None, None
        try:
            result = action()
        except UserError as error:
            fault = str(error)
        faults = self.gather(fault)
        if any(each is not None for each in faults):
            raise UserError(describe_faults(faults))
        return result

    def long_barrier(self) -> None:
        """Wait for every rank for as long as a download may take, whatever the time-out of other collectives."""
        dist.barrier(group=self.slow_group)


def describe_faults(faults: list[str | None]) -> str:
    """What the ranks have against a job, one line for each different reason."""
    reasons: dict[str, list[int]] = {}
    for rank, fault in enumerate(faults):
        if fault is not None:
            reasons.setdefault(fault, []).append(rank)
    if len(reasons) == 1 and None not in faults:
        return next(iter(reasons))
    return "\n".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {reason}" for reason, ranks in reasons.items()
    )


def init_distributed(comm: Comm, dump_folder: str | Path, degrees: Degrees | None = None) -> Distributed:
    """Join the process group described by torchrun's environment variables.

    On CUDA both NCCL and gloo are set up, so that host-side values travel without touching the device.

    Args:
        comm: time-outs and flight-recorder size.
        dump_folder: run folder; flight-recorder dumps of a hang go to ``{dump_folder}/logs``.
        degrees: ranks along each axis; all of them shard when not given.

    Raises:
        UserError: if a process has no device of its own.
    """
    if "RANK" not in os.environ:
        raise UserError("this process has no rank: start it with bash train.sh, python -m flame.launch or torchrun")
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = pick_device(local_rank)
    _enable_flight_recorder(comm, Path(dump_folder) / "logs")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    if not dist.is_initialized():
        bound = device if device.type == "cuda" else None
        try:
            dist.init_process_group(backend, timeout=timeout, device_id=bound)
        except dist.DistNetworkError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"MASTER_ADDR and MASTER_PORT: the ranks cannot meet at {address}; leave them out on one machine, or "
                f"give a free port ({str(error).splitlines()[0]})"
            ) from error
    slow_group = new_slow_group()
    degrees = degrees or Degrees(shard=world_size)
    return make_distributed(rank, local_rank, degrees, device, slow_group, mesh_device=device.type)


def make_distributed(
    rank: int, local_rank: int, degrees: Degrees, device: torch.device, slow_group: dist.ProcessGroup, mesh_device: str
) -> Distributed:
    """A rank's place in a process group that exists; all ranks make theirs together."""
    groups = _Groups(degrees, mesh_device)
    return Distributed(
        rank,
        local_rank,
        degrees.world,
        device,
        slow_group,
        degrees,
        groups.mesh(pipeline=degrees.pipeline, replicate=degrees.replicate, fsdp=degrees.fsdp, tensor=degrees.tensor),
        groups.of("loss", loss=degrees.world // degrees.tensor, tensor=degrees.tensor),
        groups.of("data", pipeline=degrees.pipeline, data=degrees.data, rest=degrees.context * degrees.tensor),
        groups.of("context", rest=degrees.pipeline * degrees.data, context=degrees.context, tensor=degrees.tensor),
    )


def new_slow_group() -> dist.ProcessGroup:
    """A gloo group of all ranks with a time-out for what may take long. Collective."""
    return dist.new_group(backend="gloo", timeout=SLOW_TIMEOUT)


@dataclass(frozen=True)
class _Groups:
    """Makes the groups of a job's axes; each way to read the ranks as axes is a mesh of its own."""

    degrees: Degrees
    device_type: str

    def mesh(self, **axes: int) -> DeviceMesh:
        """A mesh over all ranks with these axes, outermost first."""
        return init_device_mesh(self.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def of(self, axis: str, **axes: int) -> dist.ProcessGroup:
        """This rank's group along one of the axes."""
        return dist.group.WORLD if axes[axis] == self.degrees.world else self.mesh(**axes).get_group(axis)


def pick_device(local_rank: int) -> torch.device:
    """The device of a process, made the current one.

    Raises:
        UserError: there are more processes than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this node has no GPU: {torch.cuda.device_count()} are visible; "
            "set NGPU to at most that number"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _enable_flight_recorder(comm: Comm, folder: Path) -> None:
    """Have a collective that times out write what every rank was doing (torch's NCCL flight recorder)."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    if comm.trace_buf_size > 0:
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "flight_recorder_rank"))


def set_timeout(seconds: int, job: Distributed) -> None:
    """Change the time-out of collectives from here on; all ranks call it together."""
    dist.barrier()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    # FSDP and the like wait in groups of their own.
    groups = {dist.group.WORLD, job.loss_group, job.data_group, job.context_group, *job.mesh.get_all_groups()}
    for group in groups:
        # torch 2.11-2.13 have no public setter for an existing group's time-out.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def shutdown() -> None:
    """Leave the process group; does nothing outside one."""
    if dist.is_initialized():
        dist.destroy_process_group()
