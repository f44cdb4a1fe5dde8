"""A built model placed on the devices: laid out, sharded, given memory and its first weights."""

from __future__ import annotations

import logging

import torch
from torch import nn

from flame.config import JobConfig
from flame.models import BuiltModel, find_blocks, init_weights
from flame.models.blocks import independent_blocks
from flame.models.loss import is_of_fla
from flame.models.proofs import check_causal, check_varlen_support, no_weight_zero
from flame.parallel.compile import compile_blocks
from flame.parallel.context import ContextParallel
from flame.parallel.distributed import Distributed
from flame.parallel.float8 import without_float8
from flame.parallel.fsdp import reshard, shard_model
from flame.parallel.offload import give_memory, offload_activations, offloads_parameters
from flame.parallel.pipeline import Pipeline
from flame.parallel.pipeline_cut import cut_model
from flame.parallel.precision import compute_dtype
from flame.parallel.recompute import recompute_blocks
from flame.parallel.stages import Microbatches, Stages, has_tied_ends
from flame.training.meta_model import lay_out_stage, lay_out_whole

logger = logging.getLogger(__name__)


def place_model(
    config: JobConfig, built: BuiltModel, dist: Distributed, context: ContextParallel | None = None
) -> tuple[nn.Module, Pipeline | None]:
    """Lay the meta model out, give it memory on this rank's device and set every weight and buffer.

    Returns:
        The model, and what runs it when it is cut into pipeline stages.

    Raises:
        UserError: the model cannot be laid out like that; says why.
    """
    if dist.degrees.pipeline > 1:
        return _place_stages(config, built, dist, context)
    return _place_whole(config, built, dist), None


def _place_whole(config: JobConfig, built: BuiltModel, dist: Distributed) -> nn.Module:
    model = built.model
    lay_out_whole(config, model, dist)
    _shard(config, model, dist)
    _initialise(config, model, built, dist)
    if not is_of_fla(model) and dist.degrees.tensor == 1:  # tensor parallelism takes known modules only
        # The proofs' short rows must not decide which shapes the compiler takes for fixed.
        with no_weight_zero(model), without_float8(model), torch.compiler.set_stance("force_eager"):
            check_causal(model, dist.device)
            if config.training.varlen:
                check_varlen_support(model, dist.device)
            reshard(model)
    return model.train()


def _place_stages(
    config: JobConfig, built: BuiltModel, dist: Distributed, context: ContextParallel | None
) -> tuple[nn.Module, Pipeline]:
    cut, options = cut_model(config, built, dist, dist.device), config.experimental
    microbatches = Microbatches(context)
    own = cut.plan.of_rank(dist.mesh.get_local_rank("pipeline"))

    def make_stages() -> Stages:
        model = Stages({stage: lay_out_stage(config, built, cut, stage, microbatches, dist) for stage in own})
        for part in model.children():
            _shard(config, part, dist)
            _initialise(config, part, built, dist)  # one by one: buffers outside of blocks have one name in all
        return model

    model = dist.together(make_stages)  # stages have other blocks, and may be refused for other reasons
    pipeline = Pipeline(
        cut,
        list(model.children()),
        microbatches,
        options,
        group=dist.mesh.get_group("pipeline"),
        device=dist.device,
        is_tied=has_tied_ends(built.model),
    )
    logger.info(
        "pipeline: %d stages of %s blocks, %s, %d micro-batches a step",
        len(cut.plan.stages),
        ", ".join(str(len(stage)) for stage in cut.plan.stages),
        options.pipeline_parallel_schedule_csv or options.pipeline_parallel_schedule,
        cut.num_microbatches,
    )
    return model.train(), pipeline


def _shard(config: JobConfig, model: nn.Module, dist: Distributed) -> None:
    training = config.training
    blocks = find_blocks(model)
    if training.compile:
        compile_blocks(
            blocks, shared=dist.degrees.tensor > 1, exact_casts=config.float8.recipe_name.startswith("rowwise")
        )
    num_recomputed = recompute_blocks(blocks, config.activation_checkpoint)
    if config.activation_offload.mode != "none":
        offload_activations(blocks, dist.device)
    shard_model(
        model,
        independent_blocks(model, blocks),
        dist.fsdp_mesh,
        param_dtype=compute_dtype(training.mixed_precision_param, dist.device),
        reduce_dtype=training.mixed_precision_reduce,
        reshard_after_forward=training.fsdp_reshard_after_forward,
        offload=offloads_parameters(config, dist.device, dist.degrees),
    )
    if training.enable_cpu_offload and dist.device.type == "cpu":
        logger.info("training.enable_cpu_offload changes nothing on a CPU: everything is in the host's memory")
    if num_recomputed:
        mode = config.activation_checkpoint.mode
        logger.info("activation checkpointing (%s): %d of %d blocks", mode, num_recomputed, len(blocks))


def _initialise(config: JobConfig, model: nn.Module, built: BuiltModel, dist: Distributed) -> None:
    on_host = offloads_parameters(config, dist.device, dist.degrees)
    give_memory(model, dist.device, torch.device("cpu") if on_host else dist.device)
    # Computed on the device in any case: the generators of others give other weights.
    init_weights(model, built.recipe, config.training.seed, built.tied, dist.device)
    if config.model.print_after_conversion:
        logger.info("%s", model)
