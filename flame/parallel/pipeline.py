"""Pipeline parallelism: a model's blocks cut into stages, and the schedule that runs micro-batches through them.

A stage is the whole model less what other stages hold, so that every parameter keeps its name. Hidden states travel
between stages; token ids, labels and document bounds do not: every rank of a pipeline has the same batches and looks up
the micro-batch whose number it is given. (torch would cut a list of document bounds along its only dimension, without
an error.)
"""

from __future__ import annotations

import copy
import inspect
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule

from flame.config import Experimental
from flame.data.batch import Batch
from flame.errors import UserError
from flame.fqn import STAGE
from flame.models.blocks import find_blocks, keep_blocks
from flame.models.loss import HeadLoss, check_loss_support, head_options, is_fla_model, packing_arguments
from flame.parallel.pipeline_plan import DEGREE, SCHEDULE, PipelinePlan
from flame.paths import find_resource

# What blocks may be given besides hidden states: a stage makes it itself, from the micro-batch or not at all.
_OWN_ARGUMENTS = {
    "self", "hidden_states", "attention_mask", "past_key_values", "use_cache", "output_attentions", "cu_seqlens",
    "lower_bound", "attnres_states", "kwargs",
}  # fmt: skip


def check_stages(model: nn.Module, degree: int) -> None:
    """Refuse a model that is more than blocks which hand hidden states on.

    Raises:
        UserError: names what else its blocks hand on, or that nobody has proved what its blocks see.
    """
    check_loss_support(model)
    if not is_fla_model(model):
        raise UserError(
            f"{DEGREE} = {degree}: {type(model).__name__} is no model of flash-linear-attention; the proofs that other "
            "models are causal and keep documents apart need a whole model, so that a pipeline takes none of them yet"
        )
    if getattr(model.config, "attnres_block_size", None) is not None:
        raise UserError(
            f"{DEGREE} = {degree}: attention residuals (attnres_block_size in the model's config) take the states of "
            "all blocks before; a pipeline hands on those of one"
        )
    for name, block in find_blocks(model):
        others = set(inspect.signature(type(block).forward).parameters) - _OWN_ARGUMENTS
        if others:
            raise UserError(
                f"{DEGREE} = {degree}: {name} ({type(block).__name__}) is given {', '.join(sorted(others))} by the "
                "blocks before; a pipeline hands on hidden states only"
            )


def cut_stage(model: nn.Module, plan: PipelinePlan, stage: int) -> nn.Module:
    """A copy of a model on the meta device with one stage's blocks; the ends go with the first and the last.

    Tied embeddings stay with both ends.

    Raises:
        UserError: the decoder holds something that is neither block, embedding nor norm.
    """
    part = copy.deepcopy(model)
    blocks = find_blocks(part)
    keep_blocks(part, plan.stages[stage])
    decoder, embedding, head = part.get_decoder(), part.get_input_embeddings(), part.get_output_embeddings()
    is_tied = has_tied_ends(part)
    if is_tied and plan.owners[0] == plan.owners[-1]:
        raise UserError(
            f"{DEGREE} = {plan.num_ranks}: this schedule has the first and the last stage on one rank, which needs "
            "untied embeddings (tie_word_embeddings false in the model's config)"
        )
    lists = {name.rpartition(".")[0] for name, _ in blocks}
    names = {id(module): name for name, module in part.named_modules()}
    for child in list(decoder.children()):
        if child is embedding or names[id(child)] in lists or next(child.parameters(), None) is None:
            continue
        if "Norm" not in type(child).__name__:
            raise UserError(
                f"{DEGREE} = {plan.num_ranks}: {names[id(child)]} ({type(child).__name__}) has no place in a stage"
            )
        if not plan.is_last(stage):
            _replace(part, child)
    own = [name for name, _ in decoder.named_parameters(recurse=False)]
    if own:
        raise UserError(
            f"{DEGREE} = {plan.num_ranks}: {', '.join(own)} belongs to all blocks and has no place in a stage"
        )
    if not plan.is_first(stage) and not (is_tied and plan.is_last(stage)):
        _replace(part, embedding)
    if not plan.is_last(stage):
        _replace(part, head)
    return part


def _replace(part: nn.Module, module: nn.Module) -> None:
    """Put a module without parameters in a module's place."""
    name = next(name for name, each in part.named_modules() if each is module)
    parent_name, _, attribute = name.rpartition(".")
    setattr(part.get_submodule(parent_name), attribute, nn.Identity())


def has_tied_ends(model: nn.Module) -> bool:
    """Whether embedding and output projection are one parameter."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


class Stages(nn.Module):
    """This rank's stages of a pipeline; ``flame.fqn.clean_fqn`` gives their parameters the names of the whole model."""

    def __init__(self, parts: dict[int, nn.Module]):
        super().__init__()
        for stage, part in parts.items():
            self.add_module(STAGE.format(stage), part)


@dataclass
class Microbatches:
    """The micro-batches of the current step, on the device, and the factor of their losses."""

    batches: list[Batch] = field(default_factory=list)
    factor: Tensor | float = 1.0


def attach_stage_forward(part: nn.Module, is_first: bool, is_last: bool, rows: Microbatches, loss: HeadLoss) -> None:
    """Make ``part(x, number)`` compute a stage for micro-batch ``number``.

    ``x`` is what the stage before gave, [B, T, D] (of the first stage token ids, int64 [B, T]). The last stage gives
    the sum of the token losses, float32 [1].
    """

    def forward(self: nn.Module, x: Tensor, number: Tensor) -> Tensor:
        batch = rows.batches[int(number)]
        inputs = {"input_ids": x} if is_first else {"inputs_embeds": x}
        packing = packing_arguments(self, batch.input_ids, batch.cu_seqlens)
        hidden_states = self.get_decoder()(**inputs, use_cache=False, return_dict=False, **packing)[0]
        if not is_last:
            return hidden_states
        total = loss(hidden_states, self.get_output_embeddings(), batch.labels, head_options(self))
        return torch.stack([total])  # no view: FSDP hangs a hook on it

    part.forward = types.MethodType(forward, part)


class Pipeline:
    """Runs a step's micro-batches forward and backward through the stages.

    Args:
        plan: the stages.
        parts: this rank's, sharded and materialised, in the order of ``plan.of_rank``.
        rows: what ``attach_stage_forward`` was given.
        group: the ranks of this pipeline.
        shape: of the hidden states between stages, with their dtype: ([B, T, D], dtype).
        num_microbatches: of a step.
        options: names the schedule.
        device: of the micro-batches and parts.
        is_tied: the model's first and last stage share their embedding.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        parts: list[nn.Module],
        rows: Microbatches,
        group: dist.ProcessGroup,
        shape: tuple[tuple[int, ...], torch.dtype],
        num_microbatches: int,
        options: Experimental,
        device: torch.device,
        is_tied: bool,
    ):
        self.rows, self.device, self.group = rows, device, group
        stages = plan.of_rank(dist.get_rank(group))
        self.tied = _tied_ends(plan, stages, parts) if is_tied else []
        self.copies = [] if plan.is_first(stages[0]) else self.tied
        self.ends = _group_of_ends(group) if is_tied else None
        hidden = torch.empty(shape[0], dtype=shape[1], device="meta", requires_grad=True)
        self.has_first, self.has_last = plan.is_first(stages[0]), any(map(plan.is_last, stages))
        self.num_microbatches = num_microbatches
        pipeline_stages = [
            PipelineStage(
                part,
                stage,
                len(plan.stages),
                device,
                input_args=torch.empty(shape[0][:2], dtype=torch.int64, device="meta")
                if plan.is_first(stage)
                else hidden,
                output_args=torch.empty(1, device="meta", requires_grad=True) if plan.is_last(stage) else hidden,
                group=group,
            )
            for stage, part in zip(stages, parts, strict=True)
        ]
        self.schedule = self._make_schedule(pipeline_stages, options)

    def _make_schedule(self, stages: list[PipelineStage], options: Experimental) -> Any:
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
        batches = [batch.to(self.device) for batch in batches]
        self.rows.batches, self.rows.factor = batches, factor
        numbers = torch.arange(len(batches))
        inputs = (torch.cat([batch.input_ids for batch in batches]),) if self.has_first else ()
        losses: list[Tensor] | None = [] if self.has_last else None
        target = numbers if self.has_last else None
        self.schedule.step(*inputs, number=numbers, target=target, losses=losses, return_outputs=False)
        for parameter in self.tied:  # the ends have used it for different things
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(grad, group=self.ends)
        total = torch.stack([each.detach() for each in losses]).sum() if losses else torch.zeros((), device=self.device)
        return total / factor

    def _scaled(self, output: Tensor, _number: Tensor) -> Tensor:
        return output.sum() * self.rows.factor


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
