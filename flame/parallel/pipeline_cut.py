"""How a job's model is cut into the stages of a pipeline, and its steps into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flame.config import JobConfig
from flame.errors import UserError
from flame.models import BuiltModel
from flame.models.loss import is_of_fla
from flame.parallel.degrees import PIPELINE_DEGREE, TENSOR_DEGREE, Degrees
from flame.parallel.distributed import Distributed
from flame.parallel.pipeline_plan import PipelinePlan, check_microbatches, check_whole_backward, plan_pipeline
from flame.parallel.precision import DTYPES, compute_dtype
from flame.parallel.recompute import keeps_operators, recomputes_norms
from flame.parallel.stage_outline import Outline, outline_of_fla
from flame.parallel.stage_trial import try_stages
from flame.parallel.stages import check_stages


@dataclass(frozen=True)
class PipelineCut:
    """How a job's model is cut into the stages of a pipeline.

    Attributes:
        plan: which blocks each stage has, and which stages each rank.
        outline: what stages need to know about the model.
        num_microbatches: of a step.
        shape: of what stages hand on for a micro-batch, [B, T, D].
        dtype: of it.
    """

    plan: PipelinePlan
    outline: Outline
    num_microbatches: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def cut_model(config: JobConfig, built: BuiltModel, dist: Distributed, trial_device: torch.device) -> PipelineCut:
    """Plan the stages of a model.

    Args:
        trial_device: where to try models of unknown make.

    Raises:
        UserError: the model cannot be cut like that; says why.
    """
    options, training, degrees = config.experimental, config.training, dist.degrees
    if training.compile:
        check_whole_backward(options, "training.compile = true", "a compiled block computes both at once")
    if keeps_operators(config.activation_checkpoint):
        given = "activation_checkpoint.selective_ac_option = op"
        check_whole_backward(options, given, "what is kept of a block can be used once")
    if recomputes_norms(config.activation_checkpoint):
        given = "activation_checkpoint.selective_ac_option = norm"
        check_whole_backward(options, given, "linear layers that compute a norm again compute both at once")
    plan = plan_pipeline(built.model, options)
    microbatch = data_config(config).training
    check_stages(built.model, plan)
    dtype = DTYPES[compute_dtype(training.mixed_precision_param, dist.device)]
    outline = _outline(config, built, degrees, trial_device, dtype)
    num_tokens = microbatch.batch_size * training.seq_len // (degrees.context * degrees.tensor)
    num_rows = 1 if training.varlen or degrees.context > 1 else microbatch.batch_size
    shape = (num_rows, num_tokens // num_rows, outline.width(built.model))
    return PipelineCut(plan, outline, microbatch.gradient_accumulation_steps, shape, dtype)


def data_config(config: JobConfig) -> JobConfig:
    """The job as the data loader is to see it: a pipeline takes its micro-batches one by one.

    Raises:
        UserError: a number of micro-batches that cannot be.
    """
    training = config.training
    if config.experimental.pipeline_parallel_degree == 1:
        return config
    num_sequences = training.batch_size * training.gradient_accumulation_steps
    number = check_microbatches(config.experimental, num_sequences)
    split = replace(training, batch_size=num_sequences // number, gradient_accumulation_steps=number)
    return replace(config, training=split)


def _outline(
    config: JobConfig, built: BuiltModel, degrees: Degrees, trial_device: torch.device, dtype: torch.dtype
) -> Outline:
    """What stages need to know about the model: by its class in FLA, by trial elsewhere."""
    if not is_of_fla(built.model):
        return try_stages(built, trial_device, dtype, config.training.seed, config.training.varlen)
    outline = outline_of_fla(built.model, degrees.pipeline)
    if outline.carried and degrees.tensor > 1:
        raise UserError(
            f"{PIPELINE_DEGREE} = {degrees.pipeline} and {TENSOR_DEGREE} = {degrees.tensor} do not go together for "
            f"{built.model.config.model_type}, whose blocks hand on {outline.carried.name}; set one of them to 1"
        )
    return outline
