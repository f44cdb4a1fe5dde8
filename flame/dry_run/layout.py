"""A job's model as one rank of each pipeline stage has it, on the meta device, made by the code that training uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flame.config import JobConfig
from flame.data.batch import Batch
from flame.dry_run.memory import Unit
from flame.dry_run.trial import META, Gradients, Trial, gather_on_paper, local_part, run_trial
from flame.models import BuiltModel
from flame.models.blocks import find_blocks, independent_blocks
from flame.parallel.context import ContextParallel
from flame.parallel.distributed import Distributed
from flame.parallel.offload import offload_activations
from flame.parallel.pipeline import Pipeline
from flame.parallel.pipeline_cut import PipelineCut, data_config
from flame.parallel.pipeline_plan import PipelinePlan
from flame.parallel.recompute import recompute_blocks
from flame.parallel.stages import Microbatches
from flame.training.meta_model import lay_out_stage, lay_out_whole

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """A model, or a stage of one, as a rank has it.

    Attributes:
        units: what FSDP gathers at a time.
        num_blocks: of the repeated blocks.
        try_microbatch: run one through it; ``how`` and ``num_shards`` as for ``Gradients``, ``groups`` as for
            ``run_trial``.
    """

    units: list[Unit]
    num_blocks: int
    try_microbatch: Callable[[str, int, dict[str, Any]], Trial]


@dataclass(frozen=True)
class PipelineParts:
    """A model cut into the stages of a pipeline.

    Attributes:
        plan: which rank has which.
        parts: all of them, in order.
        num_microbatches: of a step.
        hidden_bytes: that one stage hands to the next for a micro-batch.
        schedule: torch's, as the first rank has it.
    """

    plan: PipelinePlan
    parts: list[Part]
    num_microbatches: int
    hidden_bytes: int
    schedule: Any


def place_whole(
    config: JobConfig, built: BuiltModel, dist: Distributed, context: ContextParallel | None, dtype: torch.dtype
) -> Part:
    """The whole model as each rank has it.

    Raises:
        UserError: the model cannot be laid out like that; says why.
    """
    model = built.model
    lay_out_whole(config, model, dist)

    def forward() -> Tensor:
        whole = sample_batch(config)
        batch = _without_memory(context.enter(whole, CPU) if context else whole)
        return model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens)

    return _part(config, model, dist, dtype, forward)


def place_stages(
    config: JobConfig, built: BuiltModel, cut: PipelineCut, dist: Distributed, context: ContextParallel | None
) -> PipelineParts:
    """Every stage as a rank of it has it.

    Raises:
        UserError: a stage cannot be laid out like that; says why.
    """
    modules, parts = [], []
    for stage in range(len(cut.plan.stages)):
        microbatches = Microbatches(context)
        module = lay_out_stage(config, built, cut, stage, microbatches, dist)
        forward = _stage_forward(config, module, microbatches, None if cut.plan.is_first(stage) else cut)
        parts.append(_part(config, module, dist, cut.dtype, forward))
        modules.append(module)
    own = [modules[stage] for stage in cut.plan.of_rank(0)]
    group = dist.mesh.get_group("pipeline")
    # torch's schedules have their own demands; ties between ends would need other ranks.
    pipeline = Pipeline(cut, own, Microbatches(), config.experimental, group=group, device=META, is_tied=False)
    hidden_bytes = math.prod(cut.shape) * cut.dtype.itemsize
    return PipelineParts(cut.plan, parts, cut.num_microbatches, hidden_bytes, pipeline.schedule)


def _stage_forward(
    config: JobConfig, module: nn.Module, microbatches: Microbatches, enters: PipelineCut | None
) -> Callable[[], Tensor]:
    """Runs a stage on a micro-batch; ``enters`` says what the stage before hands on, None of the first."""

    def forward() -> Tensor:
        microbatches.fill([sample_batch(config)], CPU)
        microbatches.batches = [_without_memory(batch) for batch in microbatches.batches]
        x = microbatches.batches[0].input_ids
        if enters is not None:
            x = torch.empty(enters.shape, dtype=enters.dtype, device=META, requires_grad=True)
        return module(x, torch.tensor(0))

    return forward


def _part(
    config: JobConfig, module: nn.Module, dist: Distributed, dtype: torch.dtype, forward: Callable[[], Tensor]
) -> Part:
    """A part whose blocks recompute what the job says, and whose parameters are gathered on paper.

    Raises:
        UserError: activation checkpointing or sharding that cannot be.
    """
    blocks, num_shards = find_blocks(module), dist.degrees.fsdp
    recompute_blocks(blocks, config.activation_checkpoint)
    if config.activation_offload.mode != "none":
        offload_activations(blocks, META)
    own = [block for _, block in independent_blocks(module, blocks)]
    kept = [(map(local_part, unit), number == len(own)) for number, unit in enumerate(_unit_parameters(module, own))]
    units = [Unit.of(parameters, num_shards, is_root) for parameters, is_root in kept]
    gather_on_paper(module, own, dtype)
    module.train()

    def try_microbatch(how: str, num_shards: int, groups: dict[str, Any]) -> Trial:
        return run_trial(forward, Gradients(_unit_parameters(module, own), num_shards, how), groups)

    return Part(units, len(blocks), try_microbatch)


def _unit_parameters(module: nn.Module, blocks: list[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """The parameters of each block, then the rest's."""
    units = [list(block.parameters()) for block in blocks]
    in_blocks = {id(parameter) for unit in units for parameter in unit}
    yield from units
    yield [each for each in module.parameters() if id(each) not in in_blocks]


def sample_batch(config: JobConfig) -> Batch:
    """A rank's micro-batch of whole rows, on the CPU, whose documents are as long as they may be."""
    training = data_config(config).training
    shape = (1, training.batch_size * training.seq_len) if training.varlen else (training.batch_size, training.seq_len)
    ids = torch.zeros((), dtype=torch.int64).expand(shape)  # one number in memory, however long the row
    if not training.varlen:
        return Batch(ids, ids)
    row_starts = torch.arange(training.batch_size)[:, None] * training.seq_len
    starts = (row_starts + torch.arange(0, training.seq_len, training.context_len)).flatten()
    return Batch(ids, ids, torch.cat([starts, torch.tensor([ids.numel()])]).int())


def _without_memory(batch: Batch) -> Batch:
    """The batch on the meta device, but for the bounds of its documents, whose values operators ask for."""
    input_ids, labels = (torch.empty_like(each, device=META) for each in (batch.input_ids, batch.labels))
    return Batch(input_ids, labels, batch.cu_seqlens)
