"""What is kept in the host's memory until the device needs it: parameters with their optimizer, and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from flame.config import JobConfig
from flame.errors import UserError
from flame.parallel.degrees import Degrees

SMALLEST = 1 << 20  # bytes of an activation that is worth its way to the host and back


def offloads_parameters(config: JobConfig, device: torch.device, degrees: Degrees) -> bool:
    """Whether parameters, gradients and optimizer state go to the host's memory; on a CPU they are there.

    Raises:
        UserError: together with a pipeline.
    """
    if not config.training.enable_cpu_offload:
        return False
    if degrees.pipeline > 1:
        raise UserError(
            "training.enable_cpu_offload does not go with experimental.pipeline_parallel_degree = "
            f"{degrees.pipeline}: stages add up what they share on the device; leave one of them out"
        )
    return device.type != "cpu"


def give_memory(model: nn.Module, device: torch.device, parameters: torch.device) -> None:
    """Give a model on the meta device memory, of no particular content.

    Args:
        device: for buffers.
        parameters: for parameters.
    """
    model.to_empty(device=parameters)
    if device == parameters:
        return
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, moved.setdefault(id(buffer), buffer.to(device)))


def offload_activations(blocks: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Make blocks keep what their backward needs in the host's memory; with checkpointing that is little but inputs.

    Call after ``recompute_blocks``.

    Raises:
        UserError: the device is a CPU.
    """
    if device.type == "cpu":
        raise UserError(
            "activation_offload.mode = full: this run is on a CPU, whose activations are in the host's memory already; "
            "set it to none"
        )
    for _, block in blocks:
        block.forward = _offloading(block, block.forward)


def _offloading(block: nn.Module, forward: Callable) -> Callable:
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        # Weights stay: FSDP has them back in time by itself. Storages say what is a view of one.
        weights = {id(_local(parameter).untyped_storage()): parameter for parameter in block.parameters()}

        def pack(x: Tensor) -> HostCopy | Tensor:
            is_small = x.numel() * x.element_size() < SMALLEST
            return x if x.is_cpu or is_small or id(x.untyped_storage()) in weights else HostCopy(x)

        with saved_tensors_hooks(pack, lambda saved: saved.fetch() if isinstance(saved, HostCopy) else saved):
            return forward(*args, **kwargs)

    return offloaded


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class HostCopy:
    """A tensor in the host's memory, page-locked, so that the copies queue up on the device and the host goes on.

    Both are on the stream that computes: what waits for them is in order, and they cost their time in full. Of a tensor
    on the meta device, which stands for one on a GPU, nothing is kept.
    """

    def __init__(self, x: Tensor):
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        if not x.is_meta:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
            self.host.copy_(x, non_blocking=True)

    def fetch(self) -> Tensor:
        """The tensor on its device again."""
        if self.device.type == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.host.to(self.device, non_blocking=True)
