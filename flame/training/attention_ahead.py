"""FlashAttention-4's kernels of a job, compiled by processes beside its start: entries of ``flame.launch.works``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flame.config import AUTO, JobConfig
from flame.model_file import read_model_file, says_heads
from flame.models import flash_attention_4, load_model_config
from flame.models.attention import Attention, DenseRows
from flame.models.attention_speed import AttentionShape, call_of
from flame.parallel.degrees import resolve_degrees
from flame.parallel.precision import DTYPES, compute_dtype
from flame.training.attention_backend import is_worth_measuring, softmax_layers

GPU = torch.device("cuda")
META = torch.device("meta")  # stands for a GPU


def compile_forward(config: JobConfig, world_size: int) -> str:
    """Compile the forward pass of a job's softmax layers; returns what was done, in words, none without such layers.

    Raises:
        UserError: the job could not run.
    """
    return _compile(config, world_size, flash_attention_4.compile_forward)


def compile_backward(config: JobConfig, world_size: int) -> str:
    """``compile_forward`` for the backward pass."""
    return _compile(config, world_size, flash_attention_4.compile_backward)


def _compile(config: JobConfig, world_size: int, compile_pass: Callable[..., Tensor]) -> str:
    dtype = DTYPES[compute_dtype(config.training.mixed_precision_param, META)]
    layers = planned_layers(config, world_size)
    is_open = config.model.attention_backend == AUTO
    if (is_open and not is_worth_measuring(layers, dtype)) or not flash_attention_4.keeps_kernels():
        return ""
    number = sum(compile_layer(shape, dtype, compile_pass) for shape in layers)
    return f"{number} shape{'s' * (number > 1)} of layers" if number else ""


def planned_layers(config: JobConfig, world_size: int) -> Counter[AttentionShape]:
    """The softmax layers of a job's model, see ``softmax_layers``; with a batch size that is yet open, of one sequence.

    Raises:
        UserError: the job could not run.
    """
    if config.training.batch_size == AUTO:
        config = replace(config, training=replace(config.training, batch_size=1))
    values = read_model_file(config.model.config)
    model_config = values if values and says_heads(values) else load_model_config(config.model)
    return softmax_layers(config, model_config, resolve_degrees(config, world_size))


def compile_layer(shape: AttentionShape, dtype: torch.dtype, compile_pass: Callable[..., Tensor]) -> bool:
    """Compile one pass of layers of a shape as they call it; whether FlashAttention-4 takes them."""
    attention = Attention("fa4", shape.document_len)
    attention.run_packed, attention.run_dense = compile_pass, DenseRows(compile_pass)
    with FakeTensorMode():
        q, k, v, _ = (torch.empty(size, dtype=dtype, device=GPU) for size in shape.tensor_sizes())
        if not attention.takes(q, v):
            return False
        call_of(attention, shape, GPU)(q, k, v)
    return True
