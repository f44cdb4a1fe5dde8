"""Which attention a job computes with: what the layout and the model refuse, and the choice that `auto` leaves open."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from flame.config import JobConfig
from flame.errors import UserError
from flame.models.attention import (
    available_attention_backends,
    default_attention_backend,
    resolve_attention_backend,
    takes_unequal_lengths,
)
from flame.models.attention_choice import attention_layers, choose_attention
from flame.models.attention_speed import AttentionShape
from flame.models.backend import attention_in_use
from flame.parallel.degrees import Degrees
from flame.parallel.distributed import Distributed
from flame.parallel.pipeline_cut import data_config
from flame.parallel.precision import DTYPES, compute_dtype
from flame.training.lengths import document_len

logger = logging.getLogger(__name__)

# FLOPs of a forward pass through all layers below which no kernel makes a difference: about a millisecond.
WORTH_MEASURING = 5e11
# Reading bounds back to the host is no candidate, however fast: the device would wait for it in every layer. On an
# H200 flex is as fast as varlen (docs/performance.md), and has to be compiled.
ONLY_BY_NAME = {"sdpa", "flex"}


def check_attention(config: JobConfig, dist: Distributed) -> None:
    """Refuse a named backend that the layout rules out.

    Raises:
        UserError: says which do instead.
    """
    name = config.model.attention_backend
    if _gathers(config, dist.degrees) and not takes_unequal_lengths(name):
        raise UserError(
            f"model.attention_backend = {name!r} takes as many queries as keys, and with "
            f"experimental.context_parallel_degree = {dist.degrees.context} and context_parallel_rotate_method = "
            "allgather a rank has fewer; use alltoall, or auto or varlen"
        )


def settle_attention(config: JobConfig, model_config: PretrainedConfig, dist: Distributed) -> None:
    """With `auto` on a GPU, take the backend that rank 0 finds fastest on the job's shapes. Collective.

    Repeatable runs keep the default: what is fastest may be another kernel on another day, with other roundings.
    """
    dtype = DTYPES[compute_dtype(config.training.mixed_precision_param, dist.device)]
    if config.model.attention_backend != "auto" or dist.device.type != "cuda" or config.training.deterministic:
        return
    layers = softmax_layers(config, model_config, dist.degrees)
    if not is_worth_measuring(layers, dtype):
        return
    folder = Path(config.job.cache_dir) if config.job.cache_dir else None
    agree_on_attention(layers, dist, dtype, folder, gathers=_gathers(config, dist.degrees))


def is_worth_measuring(layers: Counter[AttentionShape], dtype: torch.dtype) -> bool:
    """Whether some kernel may be faster than others for these layers by what counts."""
    flops = sum(number * shape.forward_flops() for shape, number in layers.items())
    return dtype in (torch.float16, torch.bfloat16) and flops >= WORTH_MEASURING


def agree_on_attention(
    layers: Counter[AttentionShape], dist: Distributed, dtype: torch.dtype, folder: Path | None, *, gathers: bool
) -> str:
    """Put the backend in place that is fastest on rank 0, among those that every rank has. Collective.

    Args:
        layers: how many there are of each shape.
        dist: the ranks.
        dtype: of queries, keys and values.
        folder: where choices are remembered; None for the user's cache folder.
        gathers: whether a rank's queries meet keys of other ranks.

    Returns:
        The backend.

    Raises:
        UserError: trying one has left rank 0's GPU unusable.
    """
    everywhere = set.intersection(*map(set, dist.gather(available_attention_backends(dist.device.type))))
    names = sorted(name for name in everywhere - ONLY_BY_NAME if not gathers or takes_unequal_lengths(name))
    # With flash_attn on some nodes only, what all have.
    default = default_attention_backend(dist.device.type)
    default = default if default in everywhere else "varlen"

    def choose() -> str:
        choice, remembered = choose_attention(layers, names, default, dist.device, dtype, folder)
        shapes = "; ".join(shape.describe() for shape in layers)
        how = "remembered" if remembered else "measured"
        logger.info("attention: %s, forward and backward of all layers, %s; %s", choice.describe(), how, shapes)
        return choice.backend

    name = default if names == [default] else dist.broadcast(dist.on_main(choose))
    attention_in_use().use(resolve_attention_backend(name, dist.device.type))
    return name


def softmax_layers(
    config: JobConfig, model_config: PretrainedConfig | dict[str, Any], degrees: Degrees
) -> Counter[AttentionShape]:
    """The softmax layers of a job's model by what a rank computes for a micro-batch; heads of other kinds not.

    ``model_config`` is as of ``attention_layers``.
    """
    config = data_config(config)
    training = config.training
    is_packed = training.varlen or degrees.context > 1
    num_tokens = training.seq_len * (training.batch_size if is_packed else 1)
    gathers = _gathers(config, degrees)
    return attention_layers(
        model_config,
        num_rows=1 if is_packed else training.batch_size,
        num_tokens=num_tokens // degrees.context if gathers else num_tokens,
        document_len=document_len(config) if is_packed else None,
        num_shares=degrees.tensor * (1 if gathers else degrees.context),
    )


def _gathers(config: JobConfig, degrees: Degrees) -> bool:
    """Whether ranks with pieces of a row gather the keys and values of earlier pieces."""
    return degrees.context > 1 and config.experimental.context_parallel_rotate_method == "allgather"
