"""A built model laid over the devices: shared, cut, sharded, given memory and its first weights."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from flame.config import JobConfig
from flame.errors import UserError
from flame.models import BuiltModel, find_blocks, init_weights
from flame.models.blocks import independent_blocks
from flame.models.loss import HeadLoss, attach_training_forward, head_loss, is_fla_model
from flame.models.proofs import check_causal, check_varlen_support, no_weight_zero
from flame.parallel.context import ContextParallel, check_row
from flame.parallel.context_operators import check_model, install_context_parallel
from flame.parallel.distributed import Distributed
from flame.parallel.fsdp import DTYPES, reshard, shard_model
from flame.parallel.pipeline import (
    Microbatches,
    Pipeline,
    Stages,
    attach_stage_forward,
    check_stages,
    cut_stage,
    has_tied_ends,
)
from flame.parallel.pipeline_plan import check_microbatches, plan_pipeline
from flame.parallel.recompute import recompute_blocks
from flame.parallel.tensor_plans import share_model
from flame.training.runtime import has_fast_bfloat16

logger = logging.getLogger(__name__)


def place_model(config: JobConfig, built: BuiltModel, dist: Distributed) -> tuple[nn.Module, Pipeline | None]:
    """Lay the meta model out, give it memory on this rank's device and set every weight and buffer.

    Returns:
        The model, and what runs it when it is cut into pipeline stages.

    Raises:
        UserError: the model cannot be laid out like that; says why.
    """
    if dist.degrees.pipeline > 1:
        return _place_stages(config, built, dist)
    model = built.model
    attach_training_forward(model, _share(config, model, dist))
    _shard(config, model, dist)
    _initialise(config, model, built, dist)
    if not is_fla_model(model) and dist.degrees.tensor == 1:  # tensor parallelism takes known modules only
        with no_weight_zero(model):
            check_causal(model, dist.device)
            if config.training.varlen:
                check_varlen_support(model, dist.device)
            reshard(model)
    return model.train(), None


def _share(config: JobConfig, model: nn.Module, dist: Distributed) -> HeadLoss | None:
    """Tensor parallelism, where the job asks for it; returns the loss of its own that it needs."""
    degree, training = dist.degrees.tensor, config.training
    if degree == 1:
        return None
    if training.seq_len % degree:
        raise UserError(
            f"training.tensor_parallel_degree = {degree} does not divide training.seq_len = {training.seq_len}"
        )
    return share_model(model, dist.mesh["tensor"], loss_parallel=not training.disable_loss_parallel)


def _place_stages(config: JobConfig, built: BuiltModel, dist: Distributed) -> tuple[nn.Module, Pipeline]:
    options, training = config.experimental, config.training
    check_stages(built.model, options.pipeline_parallel_degree)
    plan = plan_pipeline(built.model, options)
    num_sequences = training.batch_size * training.gradient_accumulation_steps
    num_microbatches = check_microbatches(options, num_sequences)
    rows = Microbatches()
    own = plan.of_rank(dist.mesh.get_local_rank("pipeline"))
    model = Stages({stage: cut_stage(built.model, plan, stage) for stage in own})
    parts = list(model.children())
    for stage, part in zip(own, parts, strict=True):
        loss = _share(config, part, dist) or head_loss(part)
        attach_stage_forward(part, plan.is_first(stage), plan.is_last(stage), rows, loss)
        _shard(config, part, dist)
    _initialise(config, model, built, dist)
    tokens = num_sequences // num_microbatches * training.seq_len
    num_rows = 1 if training.varlen else num_sequences // num_microbatches
    shape = (num_rows, tokens // num_rows // dist.degrees.tensor, built.model.config.get_text_config().hidden_size)
    in_float32 = getattr(built.model.config, "residual_in_fp32", False)  # what a block of Mamba then returns
    dtype = torch.float32 if in_float32 else DTYPES[compute_dtype(training.mixed_precision_param, dist.device)]
    pipeline = Pipeline(
        plan,
        parts,
        rows,
        dist.mesh.get_group("pipeline"),
        (shape, dtype),
        num_microbatches,
        options,
        dist.device,
        has_tied_ends(built.model),
    )
    logger.info(
        "pipeline: %d stages of %s blocks, %s, %d micro-batches a step",
        len(plan.stages),
        ", ".join(str(len(stage)) for stage in plan.stages),
        options.pipeline_parallel_schedule_csv or options.pipeline_parallel_schedule,
        num_microbatches,
    )
    return model.train(), pipeline


def share_rows(config: JobConfig, model_config: PretrainedConfig, dist: Distributed) -> ContextParallel | None:
    """Prepare FLA's operators, after ``setup_backend``, for rows that ranks share; None where each has its own.

    Raises:
        UserError: a model that cannot, rows that do not divide, or a pipeline besides.
    """
    degree, training = dist.degrees.context, config.training
    if degree == 1:
        return None
    if dist.degrees.pipeline > 1:
        raise UserError(
            f"experimental.context_parallel_degree = {degree} and experimental.pipeline_parallel_degree = "
            f"{dist.degrees.pipeline} do not go together yet; set one of them to 1"
        )
    check_model(model_config, dist.degrees, config.experimental.context_parallel_rotate_method)
    check_row(training.seq_len * training.batch_size, degree * dist.degrees.tensor)
    context = ContextParallel(dist.context_group)
    install_context_parallel(context, config.experimental.context_parallel_rotate_method)
    return context


def _shard(config: JobConfig, model: nn.Module, dist: Distributed) -> None:
    training = config.training
    blocks = find_blocks(model)
    num_recomputed = recompute_blocks(blocks, config.activation_checkpoint)
    shard_model(
        model,
        independent_blocks(model, blocks),
        dist.fsdp_mesh,
        param_dtype=compute_dtype(training.mixed_precision_param, dist.device),
        reduce_dtype=training.mixed_precision_reduce,
        reshard_after_forward=training.fsdp_reshard_after_forward,
    )
    if num_recomputed:
        mode = config.activation_checkpoint.mode
        logger.info("activation checkpointing (%s): %d of %d blocks", mode, num_recomputed, len(blocks))


def _initialise(config: JobConfig, model: nn.Module, built: BuiltModel, dist: Distributed) -> None:
    model.to_empty(device=dist.device)
    init_weights(model, built.recipe, config.training.seed, built.tied)
    if config.model.print_after_conversion:
        logger.info("%s", model)


def data_config(config: JobConfig) -> JobConfig:
    """The job as the data loader is to see it: a pipeline takes its micro-batches one by one."""
    training = config.training
    if config.experimental.pipeline_parallel_degree == 1:
        return config
    num_sequences = training.batch_size * training.gradient_accumulation_steps
    number = check_microbatches(config.experimental, num_sequences)
    split = replace(training, batch_size=num_sequences // number, gradient_accumulation_steps=number)
    return replace(config, training=split)


def compute_dtype(choice: str, device: torch.device) -> str:
    """The dtype to compute in: ``auto`` is bfloat16 where the device is fast at it, else float32."""
    if choice != "auto":
        return choice
    return "bfloat16" if has_fast_bfloat16(device) else "float32"
