"""Context parallelism set up for a job: what cannot be is refused, then FLA's operators are made to work on pieces."""

from __future__ import annotations

from transformers import PretrainedConfig

from flame.config import JobConfig
from flame.parallel.context import ContextParallel, check_row
from flame.parallel.context_operators import check_model, convolution_width, install_context_parallel
from flame.parallel.degrees import CONTEXT_DEGREE
from flame.parallel.distributed import Distributed
from flame.parallel.pipeline_cut import data_config
from flame.parallel.pipeline_plan import check_whole_backward


def share_rows(config: JobConfig, model_config: PretrainedConfig, dist: Distributed) -> ContextParallel | None:
    """Prepare FLA's operators, after ``setup_backend``, for rows that ranks share; None where each has its own.

    Raises:
        UserError: a model that cannot, or rows that do not divide.
    """
    degree, rotate_method = dist.degrees.context, config.experimental.context_parallel_rotate_method
    if degree == 1:
        return None
    if dist.degrees.pipeline > 1:
        given = f"{CONTEXT_DEGREE} = {degree}"
        check_whole_backward(config.experimental, given, "torch then loses part of the gradients that pieces exchange")
    microbatch = data_config(config).training
    check_model(model_config, dist.degrees, rotate_method)
    check_row(microbatch.seq_len * microbatch.batch_size, dist.degrees, convolution_width(model_config))
    context = ContextParallel(dist.context_group)
    install_context_parallel(context, rotate_method)
    return context
