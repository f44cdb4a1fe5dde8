"""A model, or a stage of one, on the meta device: its modules made into those that the job trains.

Plans (``flame.dry_run``) stop here; ``flame.training.placement`` goes on to shards, memory and weights.
"""

from __future__ import annotations

from torch import nn

from flame.config import JobConfig
from flame.errors import UserError
from flame.models import BuiltModel, find_blocks
from flame.models.loss import HeadLoss, attach_training_forward, head_loss
from flame.parallel.degrees import TENSOR_DEGREE
from flame.parallel.distributed import Distributed
from flame.parallel.float8 import check_layout, convert_to_float8
from flame.parallel.pipeline_cut import PipelineCut
from flame.parallel.pipeline_plan import splits_backward
from flame.parallel.recompute import has_norm_to_recompute, recomputes_norms
from flame.parallel.residual_norms import add_residual_gradients
from flame.parallel.shared_inputs import can_share, share_input_gradients
from flame.parallel.stages import Microbatches, attach_stage_forward, cut_stage
from flame.parallel.tensor_plans import share_model


def lay_out_whole(config: JobConfig, model: nn.Module, dist: Distributed) -> None:
    """Make a whole model take labels, with its linear layers and tensors as the job wants them.

    Raises:
        UserError: float8 or tensor parallelism that cannot be.
    """
    _convert(config, model, dist)
    attach_training_forward(model, _share(config, model, dist))
    _share_input_gradients(config, model, dist)


def lay_out_stage(
    config: JobConfig, built: BuiltModel, cut: PipelineCut, stage: int, microbatches: Microbatches, dist: Distributed
) -> nn.Module:
    """One stage, cut from the whole; ``part(x, number)`` computes it for that one of the ``microbatches``.

    Raises:
        UserError: the stage cannot be laid out like that; says why.
    """
    plan = cut.plan
    part = cut_stage(built.model, plan, stage, cut.outline)
    _convert(config, part, dist)
    loss = _share(config, part, dist) or head_loss(part)
    attach_stage_forward(part, plan.is_first(stage), microbatches, cut.dtype, loss if plan.is_last(stage) else None)
    _share_input_gradients(config, part, dist)
    return part


def _convert(config: JobConfig, model: nn.Module, dist: Distributed) -> None:
    """Float8, where the job asks for it, before anything else is done to the modules."""
    if "float8" in config.model.converters:
        check_layout(config.float8, dist.degrees)
        if dist.device.type == "meta":  # a plan, which no device stands behind
            return
        convert_to_float8(find_blocks(model), config.float8, dist.device, dist.degrees.tensor)


def _share(config: JobConfig, model: nn.Module, dist: Distributed) -> HeadLoss | None:
    """Tensor parallelism, where the job asks for it; returns the loss of its own that it needs."""
    degree, training = dist.degrees.tensor, config.training
    if degree == 1:
        return None
    if training.seq_len % degree:
        raise UserError(f"{TENSOR_DEGREE} = {degree} does not divide training.seq_len = {training.seq_len}")
    return share_model(model, dist.mesh["tensor"], loss_parallel=not training.disable_loss_parallel)


def _share_input_gradients(config: JobConfig, model: nn.Module, dist: Distributed) -> None:
    """Make linear layers, and norms, that share an input add up its gradient, where nothing stands against it.

    Left out: with a compiler, which fuses those sums itself; with tensor parallelism; with schedules that compute
    gradients of inputs and weights at different times; blocks of users' own.

    Raises:
        UserError: norms to compute again, and no block can.
    """
    options = config.activation_checkpoint
    blocks = [(name, block) for name, block in find_blocks(model) if can_share(block)]
    if recomputes_norms(options) and not any(has_norm_to_recompute(block) for _, block in blocks):
        raise UserError(
            "activation_checkpoint.selective_ac_option = norm: takes models whose blocks are FLA's or transformers' "
            "and have norms (classes called …Norm) that a torch.nn.Linear may read, and this model has none; op, a "
            "number or activation_checkpoint.mode full do for every model"
        )
    is_split = dist.degrees.pipeline > 1 and splits_backward(config.experimental)
    if not (config.training.compile or dist.degrees.tensor > 1 or is_split):
        add_residual_gradients(blocks)
        share_input_gradients(blocks, recompute_norms=recomputes_norms(options))
