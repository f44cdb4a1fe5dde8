"""Proofs by trial, before training: a model looks at no later token, and at no other document of a packed row.

Models of unknown make are shown two rows that differ in one half; the states of the other half must stay. They run as
in training (dropout with one fixed seed), since some take other code paths in evaluation.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flame.errors import UserError
from flame.models.mixers import num_experts
from flame.models.native_attention import has_native_attention, leave_native_attention

logger = logging.getLogger(__name__)

_HALF = 8  # tokens


@contextlib.contextmanager
@torch.no_grad()
def no_weight_zero(model: nn.Module) -> Iterator[None]:
    """Within, parameters that start as all zero (projections back to the residual, gates) are small random numbers.

    Zeros would hide whatever lies behind them from a proof. Enter and leave with sharded parameters.
    """
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    zeros = [tensor for tensor in local if tensor.numel() and not tensor.any()]
    generators = {device: torch.Generator(device).manual_seed(0) for device in {tensor.device for tensor in zeros}}
    for tensor in zeros:
        tensor.normal_(std=0.02, generator=generators[tensor.device])
    try:
        yield
    finally:
        for tensor in zeros:
            tensor.zero_()


def check_causal(model: nn.Module, device: torch.device | str) -> None:
    """Prove that no hidden state moves when later tokens change: encoders can be built as causal LMs too.

    Needs initialised weights and an attached training forward; under FSDP every rank must call it, and reshard after.

    Raises:
        UserError: the model looks ahead.
    """
    first = slice(None, _HALF)
    one, other = (state[:, first] for state in _states_of_both(model, slice(_HALF, None), device))
    # Equal, but for rounding where later tokens change how a mixture of experts groups its rows.
    if differ(one, other):
        raise UserError(
            f"{_class_name(model)} is not causal (a token's state moves when later tokens change), so that it would "
            "learn to copy its target; use a decoder, or set is_decoder in its config where it has that"
        )


def check_varlen_support(model: nn.Module, device: torch.device | str) -> None:
    """Prove on two short packed documents that changing the first leaves the second's states bit-equal.

    Only mixtures of experts may move by rounding, since documents share the experts' matrix products. A model that
    fails with flame's packed attention goes back to its own attention with a mask, if that passes. Needs and costs
    what `check_causal` does.

    Raises:
        UserError: the model does not keep packed documents apart, or says itself that it cannot.
    """
    if not _mixes_documents(model, device):
        return
    if has_native_attention(model):
        leave_native_attention(model)
        if not _mixes_documents(model, device):
            logger.info("attention of packed documents goes through masks: memory grows with the square of the row")
            return
    raise UserError(
        f"{_class_name(model)} mixes packed documents (the second's states move when the first changes); "
        "turn training.varlen off, use a model family that takes cu_seqlens, or let your own start anew at these bounds"
    )


def _class_name(model: nn.Module) -> str:
    """The class as its author named it: ``fully_shard`` puts FSDP before that."""
    return type(model).__name__.removeprefix("FSDP")


def _mixes_documents(model: nn.Module, device: torch.device | str) -> bool:
    cu_seqlens = torch.tensor([0, _HALF, 2 * _HALF], dtype=torch.int32, device=device)
    try:
        states = _states_of_both(model, slice(None, _HALF), device, cu_seqlens=cu_seqlens)
    except (ValueError, TypeError, NotImplementedError) as fault:  # transformers' ways to say what it cannot do
        raise UserError(
            f"{_class_name(model)} cannot keep packed documents apart: {fault}; turn training.varlen off"
        ) from fault
    one, other = (state[:, _HALF:] for state in states)
    return not torch.equal(one, other) and (num_experts(model.config) <= 1 or differ(one, other))


@torch.no_grad()
def _states_of_both(model: nn.Module, changed: slice, device: torch.device | str, **packing: Tensor) -> list[Tensor]:
    """Hidden states [1, 2 * _HALF, D] of a row, and of the row with other tokens in one half."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(2 * _HALF, device=device)[None] % vocab_size
    others = ids.clone()
    others[:, changed] = (ids[:, changed] + 1 + vocab_size // 2) % vocab_size
    states: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda _module, _input, output: states.append(output[0]))
    was_training, device = model.training, torch.device(device)
    model.train()
    try:
        for row in (ids, others):
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(0)
                model(row, labels=row, **packing)
    finally:
        model.train(was_training)
        hook.remove()
    return states


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    tolerance = 1e-5 if one.dtype == torch.float32 else 2e-3
    return bool((one - other).norm() > tolerance * one.norm())
