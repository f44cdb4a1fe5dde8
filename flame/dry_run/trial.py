"""One micro-batch forward and backward through a model, or a stage of one, on tensors without memory.

The operators allocate and keep what they do on a GPU, so that what they take is counted, not guessed. FSDP is not
there: parameters are as it gathers them, and what it does with a unit's gradients is done on paper.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from flame.dry_run.allocations import Allocations
from flame.dry_run.world import Traffic
from flame.errors import UserError
from flame.models.without_kernels import without_kernels

META = torch.device("meta")


@dataclass(frozen=True)
class Trial:
    """What one micro-batch takes, in bytes; weights and what lies ready before are not in it.

    Attributes:
        saved: kept between forward and backward.
        forward_peak: at most during the forward.
        backward_peak: at most during the backward, with what was kept and with gradients as they come.
        sent: sent by this rank in collectives inside the model, by the group's name.
    """

    saved: int
    forward_peak: int
    backward_peak: int
    sent: dict[str, int]


def run_trial(
    forward: Callable[[], Tensor], gradients: Gradients, groups: dict[str, dist.ProcessGroup] | None = None
) -> Trial:
    """Run ``forward``, whose tensors are on the meta device, and its backward.

    Args:
        forward: makes the inputs and returns the output.
        gradients: of the model's units, to be reduced as they come.
        groups: those whose traffic counts, by name.

    Raises:
        UserError: the model looks at values of tensors, or asks for a GPU.
    """
    try:
        return _run(forward, gradients, groups or {})
    except (RuntimeError, AssertionError) as error:
        # What failed is any fault of the model, unless the message, or the line that has none, speaks of devices.
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        if not re.search(r"meta|cuda|gpu|device", f"{error} {line}", re.IGNORECASE):
            raise
        reason = next(iter(str(error).splitlines()), line)
        raise UserError(
            f"this model looks at values or asks for a GPU while it computes, and a plan has neither ({reason}): "
            "job.dry_run, memory_estimation.enabled and auto cannot tell what it needs; train a few steps instead, "
            "with activation_checkpoint.mode and training.batch_size given"
        ) from error


def _run(forward: Callable[[], Tensor], gradients: Gradients, groups: dict[str, dist.ProcessGroup]) -> Trial:
    # Functions that FLA compiles run as they are written: a compiler does not see what they allocate.
    with (
        torch.compiler.set_stance("force_eager"),
        without_kernels(),
        Traffic(groups) as traffic,
        Allocations() as allocations,
    ):
        output = forward()
        saved, forward_peak = allocations.live, allocations.peak
        allocations.restart_peak()
        output.backward(torch.empty_like(output))
        gradients.clear()
        return Trial(saved, forward_peak, allocations.peak, dict(traffic.sent))


def gather_on_paper(model: nn.Module, blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Give a meta model the parameters that FSDP gathers: this rank's part under tensor parallelism, in ``dtype``.

    As under FSDP, units get floating point inputs in that type too.
    """
    gathered: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in gathered:
            local = local_part(parameter)
            own_dtype = dtype if local.is_floating_point() else local.dtype
            empty = torch.empty(local.shape, dtype=own_dtype, device=META)
            gathered[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, gathered[id(parameter)])

    def cast(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

    for unit in (model, *blocks):
        unit.register_forward_pre_hook(cast, with_kwargs=True)


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Gradients:
    """What FSDP does with the gradients of each unit: added up over its ranks in float32 once all of them are there.

    Args:
        units: the parameters of each, after ``gather_on_paper``.
        num_shards: ranks that share them.
        how: ``kept``: each rank's part stays, as in a step's first micro-batch; ``added``: it goes into what is there;
            ``left``: there is no reduction, as in a pipeline before its last micro-batch.
    """

    def __init__(self, units: Iterable[Iterable[nn.Parameter]], num_shards: int, how: str):
        self.num_shards, self.how = num_shards, how
        self.shards: list[Tensor] = []
        self.buffer: Tensor | None = None
        for unit in units:
            parameters = [each for each in unit if each.requires_grad]
            missing = set(range(len(parameters)))
            for number, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(self._arrival(number, parameters, missing))

    def clear(self) -> None:
        """Free everything."""
        self.shards.clear()
        self.buffer = None

    def _arrival(self, number: int, parameters: list[nn.Parameter], missing: set[int]) -> Callable[[Tensor], None]:
        def arrive(_parameter: Tensor) -> None:
            missing.discard(number)
            if not missing:
                self._reduce(parameters)
                missing.update(range(len(parameters)))

        return arrive

    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        if self.how != "left":
            self.buffer = None  # FSDP waits for the reduction before
            num_elements = sum(parameter.numel() for parameter in parameters)
            self.buffer = torch.empty(num_elements, device=META)
            shard = torch.empty(-(-num_elements // self.num_shards), device=META)
            if self.how == "kept":
                self.shards.append(shard)
        for parameter in parameters:
            parameter.grad = None
