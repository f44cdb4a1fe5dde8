"""Chunk layout of packed documents.

The chunked operators work on equal chunks of `chunk_size` tokens that never cross a document boundary. Chunks are
ordered by their position within the document first ("step-major") and documents by length, longest first, so that the
scan over chunks touches a contiguous slice of documents at every step and needs no reset at boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flame.errors import UserError


def document_lengths(batch_size: int, seq_len: int, cu_seqlens: Tensor | None) -> Tensor:
    """Lengths [N] (int64, CPU) of the documents of a [batch_size, seq_len] input; a row is one without `cu_seqlens`.

    Raises:
        UserError: `cu_seqlens` with more than one row, or not covering exactly the row.
    """
    if cu_seqlens is None:
        return torch.full((batch_size,), seq_len, dtype=torch.int64)
    if batch_size != 1:
        raise UserError(f"cu_seqlens needs packed input with one row, got {batch_size} rows; flatten them into one")
    bounds = cu_seqlens.detach().to("cpu", torch.int64)
    lengths = bounds.diff()
    if bounds[0] != 0 or bounds[-1] != seq_len or (lengths < 0).any():
        raise UserError(f"cu_seqlens must rise from 0 to the row's length {seq_len}, got {bounds.tolist()}")
    return lengths


def document_positions(lengths: Tensor) -> Tensor:
    """Position of every token within its document, int64 [T]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


@dataclass(frozen=True)
class ChunkLayout:
    """Where every token of T packed ones lies among `num_chunks` chunks of `chunk_size` tokens.

    Attributes:
        chunk_size: tokens a chunk, C; a power of two.
        active: number of documents that still have a chunk at each scan step, non-increasing.
        order: document indices [N], most chunks first.
        slots: row of each token in the padded [num_chunks * C] layout, [T]; None when the layout is the identity.
    """

    chunk_size: int
    active: list[int]
    order: Tensor
    slots: Tensor | None

    @classmethod
    def build(cls, lengths: Tensor, device: torch.device, max_chunk_size: int = 64) -> ChunkLayout:
        """Lay out documents of the given lengths [N] (CPU); short inputs get a smaller power-of-two chunk."""
        longest = int(lengths.max()) if len(lengths) else 0
        chunk_size = min(max_chunk_size, 1 << max(longest - 1, 0).bit_length())
        num_chunks = -(-lengths // chunk_size)
        order = num_chunks.argsort(descending=True, stable=True)
        num_steps = int(num_chunks.max()) if len(lengths) else 0
        active = (num_chunks[None, :] > torch.arange(num_steps)[:, None]).sum(1)  # [num_steps]
        if len(lengths) == 1 and longest % chunk_size == 0:
            return cls(chunk_size, active.tolist(), order.to(device), None)
        position = document_positions(lengths)
        step, offset = position // chunk_size, position % chunk_size
        rank = order.argsort().repeat_interleave(lengths)
        first_chunk = active.cumsum(0) - active
        slots = (first_chunk[step] + rank) * chunk_size + offset
        return cls(chunk_size, active.tolist(), order.to(device), slots.to(device))

    @property
    def num_chunks(self) -> int:
        return sum(self.active)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [num_chunks, C, ...]; unused rows are zero."""
        if self.slots is not None:
            x = _Scatter.apply(x, self.slots, self.num_chunks * self.chunk_size)
        return x.view(self.num_chunks, self.chunk_size, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[num_chunks, C, ...] -> [T, ...]."""
        x = x.reshape(self.num_chunks * self.chunk_size, *x.shape[2:])
        return x if self.slots is None else _Gather.apply(x, self.slots)

    def to_chunks(self, x: Tensor, dtype: torch.dtype, num_heads: int | None = None) -> Tensor:
        """[B, T, H, ...] -> [num_chunks, num_heads, C, ...] in `dtype`; heads repeat for those that share them."""
        x = self.pad(x.to(dtype).flatten(0, 1)).transpose(1, 2)
        return x if num_heads in (None, x.shape[1]) else x.repeat_interleave(num_heads // x.shape[1], dim=1)

    def from_chunks(self, x: Tensor, like: Tensor) -> Tensor:
        """[num_chunks, H, C, V] -> [B, T, H, V], the shape of `like`."""
        return self.unpad(x.transpose(1, 2)).view_as(like)


class _Scatter(torch.autograd.Function):
    """Rows [T, ...] to distinct rows of a zero [num_rows, ...].

    Both directions are copies: autograd's own backward of indexing accumulates, which is slower and would turn the
    copy of a NaN's neighbour into a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


class _Gather(torch.autograd.Function):
    """Distinct rows of [num_rows, ...] to [T, ...]; the inverse of `_Scatter`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, rows, grad), None


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 when any input is, else float32: what the operators compute and keep states in."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def initial_states(
    state: Tensor | None, layout: ChunkLayout, shape: tuple[int, ...], v_first: bool, like: Tensor
) -> Tensor:
    """Scan-ordered start states [N, H, K, V] from a caller's state ([N, H, V, K] when `v_first`) or zeros."""
    num_documents = len(layout.order)
    if state is None:
        return like.new_zeros(num_documents, *shape)
    if state.shape[0] != num_documents:
        raise UserError(f"initial_state holds {state.shape[0]} states for {num_documents} documents")
    state = state.to(like.dtype)
    return (state.transpose(-1, -2) if v_first else state).index_select(0, layout.order)


def final_states(finished: list[Tensor], layout: ChunkLayout, v_first: bool) -> Tensor:
    """Caller-ordered final states from those of documents in the order in which they finish the scan (last first)."""
    state = torch.cat(finished[::-1]).index_select(0, layout.order.argsort())
    return state.transpose(-1, -2).contiguous() if v_first else state


def scan_states(decay: Tensor, writes: Tensor, state: Tensor, active: list[int]) -> tuple[Tensor, list[Tensor]]:
    """States at the start of every chunk [M, H, K, V] of S -> decay S + write, and those of finished documents.

    Args:
        decay: [M, H, ...], broadcast over [H, K, V]; writes: [M, H, K, V]; M chunks in `ChunkLayout` order.
        state: [N, H, K, V] at the documents' starts, in scan order.
        active: documents with a chunk at each step.

    Returns:
        The start states, and the final states in the order in which documents finish, for `final_states`.
    """
    states, finished = [writes[:0]], []
    for decay_step, write_step in zip(decay.split(active), writes.split(active), strict=True):
        if len(write_step) < len(state):
            finished.append(state[len(write_step) :])
            state = state[: len(write_step)]
        states.append(state)
        state = torch.addcmul(write_step, decay_step, state)
    finished.append(state)
    return torch.cat(states), finished
