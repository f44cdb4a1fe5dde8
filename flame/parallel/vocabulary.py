"""The vocabulary shared by the ranks of a tensor-parallel group: embedding, output projection and loss."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from flame.errors import UserError
from flame.models.linear_cross_entropy import linear_cross_entropy
from flame.models.loss import IGNORE_INDEX, HeadOptions
from flame.models.reference.cross_entropy import scale_and_cap
from flame.models.reference.packing import compute_dtype
from flame.parallel.collectives import sum_of_shares
from flame.parallel.tensor import (
    SEQUENCE,
    Shadows,
    distribute_parameter,
    gather_sequence,
    local_parameter,
    scatter_sequence,
)


def share_embedding(name: str, embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank an equal part of the vocabulary's rows; the output is this rank's piece of the sequence.

    Raises:
        UserError: the module does more than look up rows, or the vocabulary does not divide.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    _check_embedding(name, embedding, size)
    if embedding.num_embeddings % size:
        raise UserError(
            f"training.tensor_parallel_degree = {size} does not divide the {embedding.num_embeddings} rows of {name}; "
            f"set vocab_size to {-(-embedding.num_embeddings // size) * size} in the model's config"
        )
    distribute_parameter(embedding, "weight", Shard(0), mesh)
    num_rows, group = embedding.num_embeddings // size, mesh.get_group()
    first = rank * num_rows
    padding = embedding.padding_idx
    own_padding = padding - first if padding is not None and 0 <= padding - first < num_rows else None

    def forward(self: nn.Module, input_ids: Tensor) -> Tensor:
        rows = input_ids - first
        is_own = (rows >= 0) & (rows < num_rows)
        found = F.embedding(rows.clamp(0, num_rows - 1), local_parameter(self.weight), own_padding)  # [B, T, D]
        return scatter_sequence(found.masked_fill(~is_own[..., None], 0.0), group)

    embedding.forward = types.MethodType(forward, embedding)


def keep_embedding(name: str, embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Keep all rows on every rank; each looks up its piece of the sequence.

    Raises:
        UserError: the module does more than look up rows.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    _check_embedding(name, embedding, size)
    distribute_parameter(embedding, "weight", Replicate(), mesh)

    def forward(self: nn.Module, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids.chunk(size, SEQUENCE)[rank], local_parameter(self.weight), self.padding_idx)

    embedding.forward = types.MethodType(forward, embedding)


def _check_embedding(name: str, embedding: nn.Module, size: int) -> None:
    if type(embedding).forward is not nn.Embedding.forward:
        raise UserError(
            f"training.tensor_parallel_degree = {size}: {name} is a {type(embedding).__name__}, not known here"
        )


def share_head(name: str, head: nn.Linear, mesh: DeviceMesh) -> Callable:
    """Give each rank the output projection to its part of the vocabulary.

    Returns:
        The loss, for ``attach_training_forward``.

    Raises:
        UserError: the vocabulary does not divide.
    """
    if head.out_features % mesh.size():
        raise UserError(
            f"training.tensor_parallel_degree = {mesh.size()} does not divide the {head.out_features} rows of {name}"
        )
    for each, _ in list(head.named_parameters()):
        distribute_parameter(head, each, Shard(0), mesh)
    group, first = mesh.get_group(), mesh.get_local_rank() * (head.out_features // mesh.size())

    def loss(piece: Tensor, head: nn.Linear, labels: Tensor, options: HeadOptions) -> Tensor:
        hidden_states = gather_sequence(piece, group).flatten(0, 1)  # [B T, D]
        bias = None if head.bias is None else local_parameter(head.bias)
        of_logits = partial(_loss_and_gradient, part=_Part(group, first, options))
        return linear_cross_entropy(hidden_states, local_parameter(head.weight), bias, labels.flatten(), of_logits)

    return loss


def keep_head(head: nn.Linear, mesh: DeviceMesh, whole_loss: Callable) -> Callable:
    """Keep the output projection whole on every rank; each computes the loss of its piece of the sequence.

    Returns:
        The loss, for ``attach_training_forward``; of all pieces, with this rank's gradient.
    """
    for each, _ in list(head.named_parameters()):
        distribute_parameter(head, each, Replicate(), mesh)
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def loss(piece: Tensor, head: nn.Linear, labels: Tensor, options: HeadOptions) -> Tensor:
        shadows = Shadows(head)
        shadows.put()
        own = whole_loss(piece, head, labels.chunk(size, SEQUENCE)[rank], options)
        shadows.remove()
        return sum_of_shares(own, group)

    return loss


@dataclass(frozen=True)
class _Part:
    """A rank's part of the vocabulary: rows from ``first`` on."""

    group: dist.ProcessGroup
    first: int
    options: HeadOptions

    def sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.group)
        return value

    def max(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, factor: float | Tensor | None, *, part: _Part
) -> tuple[Tensor, Tensor | None]:
    """Of this rank's logits [rows, V/ranks], as ``LossAndGradient`` says; with l2warp's penalty in the gradient."""
    options, logits = part.options, logits.to(compute_dtype(logits))
    shaped = scale_and_cap(logits, options.logit_scale, options.logit_softcapping)
    largest = part.max(shaped.amax(-1))  # [rows]
    exponentials = (shaped - largest[:, None]).exp()
    places = labels - part.first
    is_own = (places >= 0) & (places < logits.shape[1])
    picked = places.clamp(0, logits.shape[1] - 1)[:, None]
    target = shaped.gather(1, picked)[:, 0].masked_fill(~is_own, 0.0)
    total, target = part.sum(torch.stack([exponentials.sum(-1), target]))
    valid = (labels != IGNORE_INDEX).to(logits.dtype)
    loss = ((total.log() + largest - target) * valid).sum()
    if factor is None:
        return loss, None

    grad = exponentials / total[:, None]
    grad.scatter_add_(1, picked, -is_own.to(grad.dtype)[:, None])
    grad *= valid[:, None] * (factor * options.logit_scale)
    if options.logit_softcapping is not None:
        grad *= 1 - (shaped / options.logit_softcapping).square()
    if options.l2warp_penalty:
        own_largest, place = logits.max(-1, keepdim=True)
        is_largest = own_largest[:, 0] == part.max(own_largest[:, 0].clone())
        grad.scatter_add_(1, place, own_largest * (options.l2warp_penalty * is_largest[:, None]))
    return loss, grad
