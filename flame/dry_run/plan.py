"""Everything that is known of a job before it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from flame.config import JobConfig
from flame.dry_run.layout import CPU, Part, PipelineParts, place_stages, place_whole
from flame.dry_run.memory import Memory, activation_peak, estimate
from flame.dry_run.schedule import Action, most_in_flight, rank_actions, waiting_share
from flame.dry_run.traffic import fsdp_traffic, model_traffic, pipeline_traffic
from flame.dry_run.trial import Trial
from flame.dry_run.world import join_fake_world
from flame.models import BuiltModel, build_model, check_positions
from flame.models.attention import PLANNED_BACKEND
from flame.models.backend import setup_backend
from flame.models.flops import FlopCounter, num_parameters
from flame.models.loss import is_of_fla
from flame.models.mixers import find_mixers
from flame.parallel.degrees import Degrees, resolve_degrees
from flame.parallel.distributed import Distributed
from flame.parallel.offload import offloads_parameters
from flame.parallel.pipeline_cut import PipelineCut, cut_model
from flame.parallel.precision import DTYPES, compute_dtype
from flame.training.lengths import document_len, document_option, tokens_per_step
from flame.training.model_source import attention_for, read_model

GPU = "cuda"  # what plans are for, whatever the machine that makes them has


@dataclass(frozen=True)
class RankPlan:
    """What one rank of a pipeline has and does; the others of its stages are like it.

    Attributes:
        rank: its place in the pipeline.
        stages: numbers of its stages.
        num_blocks: of all of them.
        num_parameters: once gathered; under tensor parallelism its part.
        num_kept: those that it keeps.
        in_flight: micro-batches between forward and backward at most.
        memory: bytes on its device.
        sent: bytes in a step, by what they are.
    """

    rank: int
    stages: list[int]
    num_blocks: int
    num_parameters: int
    num_kept: int
    in_flight: int
    memory: Memory
    sent: Counter[str]


@dataclass(frozen=True)
class JobPlan:
    """A job before it runs.

    Attributes:
        family: the model's.
        num_parameters: of the whole model.
        degrees: ranks along each axis.
        ranks: those of a pipeline, one without.
        num_microbatches: of a step and rank.
        waiting: share of a step that ranks of a pipeline wait for each other.
        tokens: of a step, over all ranks.
        flops: of a step, over all ranks, forward and backward without recomputation.
        notes: what the memory does not reckon with.
        only_attention: every mixer of the model is softmax attention.
    """

    family: str
    num_parameters: int
    degrees: Degrees
    ranks: list[RankPlan]
    num_microbatches: int
    waiting: float
    tokens: int
    flops: float
    notes: list[str]
    only_attention: bool

    @property
    def heaviest(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda each: each.memory.peak)


def plan_job(config: JobConfig, world_size: int, device_type: str = GPU) -> JobPlan:
    """Plan a job on so many devices; joins a process group that moves nothing.

    Args:
        device_type: "cuda" or "cpu", whose operators then count.

    Raises:
        UserError: the job could not run; the message says what to change.
    """
    degrees = resolve_degrees(config, world_size)
    dist = join_fake_world(degrees)
    _, _, model_config, context = read_model(config, dist, device_type)
    built = build_model(model_config, config.model.trust_remote_code)
    check_positions(built.model, document_len(config), document_option(config))

    tokens, length = tokens_per_step(config, degrees.data), document_len(config)
    flops = FlopCounter(built.model).training(torch.tensor([length])) / length * tokens
    family, num_whole = model_config.model_type, num_parameters(built.model)
    only_attention = all(mixer.is_attention for mixer in find_mixers(built.model))
    dtype = DTYPES[compute_dtype(config.training.mixed_precision_param, dist.device)]
    if degrees.pipeline > 1:
        stages = place_stages(config, built, _cut(config, built, dist, device_type), dist, context)
        ranks, num_microbatches, waiting = _plan_pipeline(config, dist, dtype, stages)
    else:
        whole = place_whole(config, built, dist, context, dtype)
        num_microbatches, waiting = config.training.gradient_accumulation_steps, 0.0
        actions = [Action(kind, 0, number) for number in range(num_microbatches) for kind in "FB"]
        ranks = [_plan_rank(config, dist, dtype, 0, actions, whole)]
    return JobPlan(
        family, num_whole, degrees, ranks, num_microbatches, waiting, tokens, flops, _notes(config), only_attention
    )


def _plan_pipeline(
    config: JobConfig, dist: Distributed, dtype: torch.dtype, stages: PipelineParts
) -> tuple[list[RankPlan], int, float]:
    """The ranks of a pipeline, the micro-batches of a step and the share of it that ranks wait."""
    plan, num_microbatches = stages.plan, stages.num_microbatches
    actions = rank_actions(plan, config.experimental, num_microbatches, stages.schedule)
    work = [_work(part, plan.is_last(stage)) for stage, part in enumerate(stages.parts)]
    ranks = [_plan_rank(config, dist, dtype, rank, own, stages) for rank, own in enumerate(actions)]
    return ranks, num_microbatches, waiting_share(actions, work, plan.owners)


def _notes(config: JobConfig) -> list[str]:
    unseen = {"training.compile": config.training.compile, "float8": "float8" in config.model.converters}
    names = [name for name, is_on in unseen.items() if is_on]
    notes = [f"as without {' and '.join(names)}, which change what activations are kept"] if names else []
    attention = config.model.attention_backend
    if attention not in ("auto", PLANNED_BACKEND):
        notes.append(f"as with model.attention_backend {PLANNED_BACKEND}, which keeps about what {attention} does")
    return notes


def _cut(config: JobConfig, built: BuiltModel, dist: Distributed, device_type: str) -> PipelineCut:
    """The stages; a model of unknown make is tried on the CPU, with the operators that run there."""
    if is_of_fla(built.model):
        return cut_model(config, built, dist, CPU)
    setup_backend("auto", CPU.type, "auto", document_len(config))
    cut = cut_model(config, built, dist, CPU)
    attention = attention_for(config, dist, device_type)
    setup_backend(config.model.backend, device_type, attention, document_len(config), config.job.shipped_tuning)
    return cut


def _work(part: Part, has_head: bool) -> float:
    """Relative work of a stage, by its parameters; embeddings are looked up for nothing."""
    return float(sum(unit.num_parameters for unit in part.units if has_head or not unit.is_root))


def _plan_rank(
    config: JobConfig,
    dist: Distributed,
    dtype: torch.dtype,
    rank: int,
    actions: list[Action],
    model: Part | PipelineParts,
) -> RankPlan:
    degrees, is_pipeline = dist.degrees, isinstance(model, PipelineParts)
    parts = {stage: model.parts[stage] for stage in model.plan.of_rank(rank)} if is_pipeline else {0: model}
    on_host = offloads_parameters(config, dist.device, degrees)
    has_gradients = on_host or (not is_pipeline and config.training.gradient_accumulation_steps > 1)
    how = "left" if is_pipeline else "added" if has_gradients else "kept"
    trials = {stage: _try(part, how, dist) for stage, part in parts.items()}
    units = {stage: part.units for stage, part in parts.items()}
    all_units = [unit for each in units.values() for unit in each]
    choice = config.training.fsdp_reshard_after_forward
    common = {
        "compute_bytes": dtype.itemsize,
        "reshards": degrees.fsdp > 1 if choice == "default" else choice == "always",
        "is_pipeline": is_pipeline,
    }
    peak = activation_peak(actions, trials)
    memory = estimate(
        all_units, peak, optimizer=config.optimizer, has_gradients=has_gradients, on_host=on_host, **common
    )
    sent = fsdp_traffic(units, actions, degrees, **common) + model_traffic(actions, trials)
    if is_pipeline:
        sent["hidden states"] = pipeline_traffic(actions, model.plan.owners, rank, model.hidden_bytes)
    return RankPlan(
        rank,
        list(parts),
        sum(part.num_blocks for part in parts.values()),
        sum(unit.num_parameters for unit in all_units),
        sum(unit.num_kept for unit in all_units),
        most_in_flight(actions),
        memory,
        sent,
    )


def _try(part: Part, how: str, dist: Distributed) -> Trial:
    groups = {"tensor parallelism": dist.mesh.get_group("tensor"), "context parallelism": dist.context_group}
    groups = {name: group for name, group in groups.items() if group.size() > 1}
    return part.try_microbatch(how, dist.degrees.fsdp, groups)
