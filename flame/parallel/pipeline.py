"""Pipeline parallelism: the schedule that runs a step's micro-batches through the stages of a model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from flame.config import Experimental
from flame.data.batch import Batch
from flame.errors import UserError
from flame.parallel.pipeline_cut import PipelineCut
from flame.parallel.pipeline_plan import SCHEDULE, PipelinePlan
from flame.parallel.stage_outline import LOWER_BOUNDS
from flame.parallel.stages import Microbatches
from flame.paths import find_resource


class Pipeline:
    """Runs a step's micro-batches forward and backward through the stages.

    Args:
        cut: the stages and micro-batches.
        parts: this rank's stages, sharded and materialised, in the order of ``cut.plan.of_rank``.
        microbatches: what ``attach_stage_forward`` was given.
        options: names the schedule.
        group: the ranks of this pipeline.
        device: of the micro-batches and parts.
        is_tied: the model's first and last stage share their embedding.
    """

    def __init__(
        self,
        cut: PipelineCut,
        parts: list[nn.Module],
        microbatches: Microbatches,
        options: Experimental,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        is_tied: bool,
    ):
        self.microbatches, self.device, self.group = microbatches, device, group
        plan = cut.plan
        stages = plan.of_rank(dist.get_rank(group))
        self.shared = _shared_parameters(plan, stages, parts, group, is_tied)
        self.copies = [] if plan.is_first(stages[0]) else [parameter for parameter, _ in self.shared]
        self.has_first, self.has_last = plan.is_first(stages[0]), any(map(plan.is_last, stages))
        self.num_microbatches = cut.num_microbatches
        numbered = zip(stages, parts, strict=True)
        self.schedule = self._make_schedule([self._make_stage(cut, *each) for each in numbered], options)

    def _make_stage(self, cut: PipelineCut, stage: int, part: nn.Module) -> PipelineStage:
        """A stage as torch's schedules take it, with what it receives and gives for a micro-batch."""
        plan = cut.plan
        hidden = torch.empty(cut.shape, dtype=cut.dtype, device="meta", requires_grad=True)
        ids = torch.empty(cut.shape[:2], dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        return _Stage(
            self.microbatches,
            part,
            stage,
            len(plan.stages),
            self.device,
            input_args=ids if plan.is_first(stage) else hidden,
            output_args=loss if plan.is_last(stage) else hidden,
            group=self.group,
        )

    def _make_schedule(self, stages: list[PipelineStage], options: Experimental) -> Any:
        # Only here: it imports a trainer's worth of modules, two of the seven seconds that a process needs to start.
        from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule

        path = options.pipeline_parallel_schedule_csv
        settings = SimpleNamespace(
            parallelism=SimpleNamespace(
                pipeline_parallel_schedule=options.pipeline_parallel_schedule,
                pipeline_parallel_schedule_csv=str(find_resource(path)) if path else "",
                pipeline_parallel_microbatch_size=1,
                pipeline_parallel_degree=options.pipeline_parallel_degree,
                pipeline_parallel_expert_parallel_overlap=False,
            ),
            training=SimpleNamespace(local_batch_size=self.num_microbatches),
        )
        try:
            return build_pipeline_schedule(settings, stages, self._scaled)
        except (ValueError, AssertionError, IndexError, KeyError) as error:  # what torch has against it, on every rank
            option = f"{SCHEDULE}_csv = {path}" if path else f"{SCHEDULE} = {options.pipeline_parallel_schedule}"
            raise UserError(f"{option} with {self.num_microbatches} micro-batches a step: {error}") from error

    def step(self, batches: list[Batch], factor: Tensor) -> Tensor:
        """Add a step's gradients, of the sum of the token losses times ``factor``.

        Returns:
            That sum, without the factor, on the rank of the last stage; 0 on the others.
        """
        total = self._run(self.schedule.step, batches, factor)
        for parameter, group in self.shared:
            if parameter.grad is None:  # no block of this stage has used it
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(grad, group=group)
        return total / factor

    def evaluate(self, batches: list[Batch]) -> Tensor:
        """The sum of the token losses of as many micro-batches as a step has, without gradients; returned as there."""
        return self._run(self.schedule.eval, batches, torch.ones((), device=self.device))

    def _run(self, schedule: Callable[..., Any], batches: list[Batch], factor: Tensor) -> Tensor:
        """Send the micro-batches through the stages; the sum of their losses times ``factor``."""
        self.microbatches.fill(batches, self.device)
        self.microbatches.factor = factor
        numbers = torch.arange(len(batches))
        inputs = (torch.cat([batch.input_ids for batch in self.microbatches.batches]),) if self.has_first else ()
        losses: list[Tensor] | None = [] if self.has_last else None
        target = numbers if self.has_last else None
        schedule(*inputs, number=numbers, target=target, losses=losses, return_outputs=False)
        if self.microbatches.context is not None:
            self.microbatches.context.leave()
        return torch.stack([each.detach() for each in losses]).sum() if losses else torch.zeros((), device=self.device)

    def _scaled(self, output: Tensor, _number: Tensor) -> Tensor:
        return output.sum() * self.microbatches.factor


class _Stage(PipelineStage):
    """A stage that takes its micro-batch in the backward too, where blocks may be computed again.

    Without gradients it has none for a neighbour on the same rank: torch's schedules of V shape hand them over in an
    evaluation too, which torch's stage refuses.
    """

    def __init__(self, microbatches: Microbatches, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._microbatches = microbatches

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        self._microbatches.take(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        self._microbatches.take(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _shared_parameters(
    plan: PipelinePlan, stages: list[int], parts: list[nn.Module], group: dist.ProcessGroup, is_tied: bool
) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """This rank's parameters that other stages have too and use for something else, with the ranks that have them."""
    tied = _tied_ends(plan, stages, parts) if is_tied else []
    ends = _group_of_ends(group) if is_tied else group
    decoders = [part.get_decoder() for part in parts if hasattr(part.get_decoder(), LOWER_BOUNDS)]
    bounds = [decoder.get_parameter(LOWER_BOUNDS) for decoder in decoders]
    return [*((each, ends) for each in tied), *((each, group) for each in bounds)]


def _tied_ends(plan: PipelinePlan, stages: list[int], parts: list[nn.Module]) -> list[nn.Parameter]:
    """This rank's parameters that the stage at the other end has too."""
    tied = []
    for stage, part in zip(stages, parts, strict=True):
        if plan.is_first(stage) or plan.is_last(stage):
            tied.append(part.get_input_embeddings().weight)
    return tied


def _group_of_ends(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The first and the last rank of this rank's pipeline; every rank of the job must ask for it."""
    ranks = dist.get_process_group_ranks(group)
    pipelines: list = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, (ranks[0], ranks[-1]))
    groups = {ends: dist.new_group(ends) for ends in sorted(set(pipelines))}
    return groups[ranks[0], ranks[-1]]
