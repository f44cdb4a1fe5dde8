"""Causal depthwise short convolution over packed documents, with the cache of its last inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.packing import compute_dtype, document_lengths


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = activation(sum_w weight[:, w] x_{t - W + 1 + w} + bias) + residual_t, within each document.

    Args:
        x, residual: [B, T, D]; weight: [D, W]; bias: [D].
        initial_state: [N, D, W], the last W inputs before each document; zeros by default.
        activation: None, "silu" or "swish".
        backend, cu_seqlens_cpu, chunk_indices: accepted for FLA's callers, not needed.

    Returns:
        y [B, T, D] in x's dtype and, when asked for, the last W inputs of each document [N, D, W].
    """
    if cp_context is not None:
        raise UserError("the reference backend does not have context parallelism for the short convolution")
    if weight is None:
        raise UserError("the reference backend does not have a short convolution without weight")
    width = weight.shape[1]
    lengths = document_lengths(*x.shape[:2], cu_seqlens)
    before = _inputs_before(x, initial_state, len(lengths), width)  # [N, W, D]
    if cu_seqlens is None:
        rows = torch.cat([before, x], dim=1)  # [B, W + T, D]
        y = _slide(rows, weight)
    else:
        starts = lengths.cumsum(0) - lengths
        # Row n's W earlier inputs go right before document n, so a window never reaches into another document.
        row_of_token = torch.arange(x.shape[1]) + width * (torch.arange(len(lengths)) + 1).repeat_interleave(lengths)
        row_of_token = row_of_token.to(x.device)
        row_of_state = (starts + width * torch.arange(len(lengths)))[:, None] + torch.arange(width)
        rows = x.new_zeros(x.shape[1] + row_of_state.numel(), x.shape[2])
        rows = rows.index_copy(0, row_of_token, x[0])
        if initial_state is not None:
            rows = rows.index_copy(0, row_of_state.flatten().to(x.device), before.flatten(0, 1))
        y = _slide(rows[None], weight).index_select(1, row_of_token - width)
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = _activate(y, activation)
    if residual is not None:
        y = y + residual.to(y.dtype)
    state = None
    if output_final_state:
        last = rows[:, -width:] if cu_seqlens is None else _last_rows(rows, lengths, width)
        state = last.transpose(1, 2).contiguous()
    return y.to(x.dtype), state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One decoding step: shift x (one token per document, N tokens in all) into `cache` [N, D, W] in place.

    Returns:
        y in x's shape, and `cache`.
    """
    token = x.reshape(cache.shape[:2])
    cache.copy_(torch.cat([cache[..., 1:], token.unsqueeze(-1).to(cache.dtype)], dim=-1))
    dtype = compute_dtype(x)
    y = (cache.to(dtype) * weight.to(dtype)).sum(-1)
    if bias is not None:
        y = y + bias.to(dtype)
    y = _activate(y, activation).view(x.shape)
    if residual is not None:
        y = y + residual.to(dtype).view(x.shape)
    return y.to(x.dtype), cache


def _inputs_before(x: Tensor, initial_state: Tensor | None, num_documents: int, width: int) -> Tensor:
    if initial_state is None:
        return x.new_zeros(num_documents, width, x.shape[-1])
    if initial_state.shape[0] != num_documents:
        raise UserError(f"initial_state holds {initial_state.shape[0]} states for {num_documents} documents")
    return initial_state.transpose(1, 2).to(x.dtype)


def _slide(rows: Tensor, weight: Tensor) -> Tensor:
    """[B, W + T, D] with W rows of earlier input -> [B, T, D]: output t ends at row W + t."""
    dtype = compute_dtype(rows)
    width, num_outputs = weight.shape[1], rows.shape[1] - weight.shape[1]
    rows, taps = rows.to(dtype), weight.to(dtype).unbind(1)
    y = rows[:, width : width + num_outputs] * taps[-1]
    for shift in range(1, width):
        y = torch.addcmul(y, rows[:, width - shift : width - shift + num_outputs], taps[-1 - shift])
    return y


def _last_rows(rows: Tensor, lengths: Tensor, width: int) -> Tensor:
    ends = (lengths + width).cumsum(0)
    return rows.index_select(0, (ends[:, None] + torch.arange(-width, 0)).flatten().to(rows.device)).unflatten(
        0, (len(lengths), width)
    )


def _activate(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    if activation in ("silu", "swish"):
        return F.silu(y)
    raise UserError(f"a short convolution's activation is silu, swish or none, got {activation!r}")
