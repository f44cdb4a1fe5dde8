"""Selective scan of Mamba (arXiv:2312.00752, algorithm 2), chunked, in memory far below one state a token.

Every channel d carries a state h [N] with its own decays A_d [N] < 0 and a step size dt_t > 0:

    h_t = exp(dt_t A_d) h_{t-1} + dt_t x_t B_t,   y_t = (C_t . h_t + D_d x_t) silu(z_t)

Decays differ for every channel and state, so there is no matrix product to fall back on. Documents are cut into chunks
of about the square root of the longest one, and all chunks advance together, one position at a time: once from zero
for what each adds to its document's state, once more from the right states for the outputs. That takes two square
roots of Python steps and holds one state a chunk. The backward pass repeats the states, keeping those of a few
positions only. No exponent is positive, so that no decay can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.models.reference.packing import ChunkLayout, compute_dtype, document_lengths, initial_states


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Selective scan over packed documents, with the step size softplus(dt + dt_bias).

    Args:
        x, dt, z: [B, T, D] inputs, raw step sizes and gates (none when `z` is None).
        A: [D, N], negative; B, C: [B, T, N]; D, dt_bias: [D].
        initial_state: [num_documents, D, N]; zeros by default.
        cu_seqlens: [num_documents + 1] bounds of one packed row; without it each row is a document.

    Returns:
        y [B, T, D] in x's dtype, and the final states [num_documents, D, N] (float32) or None.
    """
    out_dtype, dtype = x.dtype, compute_dtype(x, dt, A, B, C, D, z, dt_bias, initial_state)
    x, dt, A, B, C = (tensor.to(dtype) for tensor in (x, dt, A, B, C))
    layout = _Layout.build(document_lengths(*x.shape[:2], cu_seqlens), x.device)
    state = initial_states(initial_state, layout.steps, tuple(A.shape), v_first=False, like=x)
    step_size = F.softplus(dt if dt_bias is None else dt + dt_bias.to(dtype))
    tokens = [layout.positions.pad(tensor.flatten(0, 1)).squeeze(1) for tensor in (x, step_size, B, C)]
    y, final = _SelectiveScan.apply(tokens[0], tokens[1], A, tokens[2], tokens[3], state, layout)
    y = layout.positions.unpad(y[:, None]).view_as(x)
    final = final.index_select(0, layout.steps.order.argsort()) if output_final_state else None
    return _skip_and_gate(y, x, D, z).to(out_dtype), final


def selective_scan_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    initial_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """`selective_scan` of rows of one token, T = 1, for decoding; always returns the states."""
    out_dtype, dtype = x.dtype, compute_dtype(x, dt, A, B, C, D, z, dt_bias, initial_state)
    x, dt, A, B, C, state = (tensor.to(dtype) for tensor in (x, dt, A, B, C, initial_state))
    step_size = F.softplus(dt if dt_bias is None else dt + dt_bias.to(dtype))
    state = _Tokens([len(x)], x[:, 0], step_size[:, 0], A, B[:, 0], C[:, 0]).advance(0, state.clone())
    y = (state * C).sum(-1)[:, None]
    return _skip_and_gate(y, x, D, z).to(out_dtype), state


def _skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        y = torch.addcmul(y, x, D.to(x.dtype))
    return y if z is None else y * F.silu(z.to(x.dtype))


@dataclass(frozen=True)
class _Layout:
    """Order in which tokens and chunks are visited.

    Attributes:
        positions: tokens by position in their chunk; its "documents" are the chunks, longest first.
        steps: chunks by position in their document; its "tokens" are the chunks.
        rows: place of each chunk, in reading order, among the chunks longest first, [M].
    """

    positions: ChunkLayout
    steps: ChunkLayout
    rows: Tensor

    @classmethod
    def build(cls, lengths: Tensor, device: torch.device) -> _Layout:
        """Cut documents of the given lengths [num_documents] (CPU) into chunks."""
        longest = int(lengths.max()) if len(lengths) else 0
        chunk_size = 1 << (longest.bit_length() // 2)
        num_chunks = -(-lengths // chunk_size)
        chunk_lengths = torch.full((int(num_chunks.sum()),), chunk_size)
        some = num_chunks > 0
        chunk_lengths[num_chunks.cumsum(0)[some] - 1] = (lengths - (num_chunks - 1) * chunk_size)[some]
        positions = ChunkLayout.build(chunk_lengths, device, max_chunk_size=1)
        steps = ChunkLayout.build(num_chunks, device, max_chunk_size=1)
        return cls(positions, steps, positions.order.argsort())

    def to_steps(self, x: Tensor) -> tuple[Tensor, ...]:
        """Values of chunks, longest first, [M, ...] -> one tensor [active documents, ...] a step."""
        return self.steps.pad(x.index_select(0, self.rows)).squeeze(1).split(self.steps.active)

    def from_steps(self, x: list[Tensor], like: Tensor) -> Tensor:
        """Back from one tensor a step; `like` gives shape and dtype."""
        if not x:
            return torch.zeros_like(like)
        return self.steps.unpad(torch.cat(x)[:, None]).index_select(0, self.positions.order)


class _SelectiveScan(torch.autograd.Function):
    """y_t = C_t . h_t of tokens in `layout.positions` order and documents' states in `layout.steps` order.

    x and dt (step sizes) are [T, D], A [D, N], B and C [T, N], states [num_documents, D, N].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, layout: _Layout
    ) -> tuple[Tensor, Tensor]:
        tokens = _Tokens(layout.positions.active, x, dt, A, B, C)
        num_chunks = len(layout.rows)
        added, duration = x.new_zeros(num_chunks, *A.shape), x.new_zeros(num_chunks, A.shape[0])
        for t, num_rows in enumerate(tokens.active):
            tokens.advance(t, added)
            duration[:num_rows] += tokens.dt[t]
        decay = torch.exp(duration[..., None] * A)  # of whole chunks, [M, D, N]

        final = state.clone()
        starts = _scan(final, layout.to_steps(decay), layout.to_steps(added))
        starts = layout.from_steps(starts, like=added)
        states, y = starts.clone(), torch.empty_like(x)
        for t, y_t in enumerate(y.split(tokens.active)):
            y_t.copy_((tokens.advance(t, states) * tokens.C[t][:, None]).sum(-1))
        ctx.save_for_backward(x, dt, A, B, C, starts, decay)
        ctx.layout = layout
        return y, final

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, starts, decay = ctx.saved_tensors
        layout = ctx.layout
        tokens = _Tokens(layout.positions.active, x, dt, A, B, C)
        grad_y_ = grad_y.split(tokens.active)

        added = torch.zeros_like(starts)  # to the gradients of the states at the chunks' starts
        for t in reversed(range(len(tokens.active))):
            tokens.retreat(t, added, grad_y_[t])
        grad_state = grad_final.clone()
        ends = _scan(grad_state, layout.to_steps(decay)[::-1], layout.to_steps(added)[::-1])
        grad_states = layout.from_steps(ends[::-1], like=added)

        grads = _Gradients(tokens, [torch.zeros_like(tensor) for tensor in (x, dt, A, B, C)])
        for t, before in _states_backwards(tokens, starts):
            grads.add(t, before, grad_states, grad_y_[t])
        return *grads.full, grad_state, None


def _states_backwards(tokens: _Tokens, starts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each position, last first, with the states before it; holds about two square roots of the positions' states."""
    num_positions = len(tokens.active)
    segment = max(1, math.isqrt(num_positions))
    kept, states = [], starts.clone()
    for t in range(num_positions):
        if t % segment == 0:
            kept.append((t, states[: tokens.active[t]].clone()))
        tokens.advance(t, states)
    while kept:
        first, states = kept.pop()
        before = []
        for t in range(first, min(first + segment, num_positions)):
            before.append(states[: tokens.active[t]].clone())
            tokens.advance(t, states)
        while before:
            yield first + len(before) - 1, before.pop()


def _scan(state: Tensor, decays: Sequence[Tensor], added: Sequence[Tensor]) -> list[Tensor]:
    """state = decay state + added, in place over steps that each concern the first rows; the states before each."""
    before = []
    for decay, addition in zip(decays, added, strict=True):
        rows = state[: len(decay)]
        before.append(rows.clone())
        rows.mul_(decay).add_(addition)
    return before


class _Tokens:
    """Inputs of the scan, a slice for each position in the chunks, and one position's step of all chunks."""

    def __init__(self, active: list[int], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
        self.active, self.A = active, A
        self.x, self.dt, self.B, self.C = (tensor.split(active) for tensor in (x, dt, B, C))

    def decay(self, t: int) -> Tensor:
        return torch.exp(self.dt[t][..., None] * self.A)  # [active chunks, D, N]

    def advance(self, t: int, states: Tensor) -> Tensor:
        """Move the states [M, D, N] of the chunks that reach position t past it, in place; returns their rows."""
        rows = states[: self.active[t]]
        return rows.mul_(self.decay(t)).add_((self.dt[t] * self.x[t])[..., None] * self.B[t][:, None])

    def retreat(self, t: int, grads: Tensor, grad_y: Tensor) -> None:
        """Turn the gradients of the states after position t into those of the states before it, in place."""
        grads[: self.active[t]].add_(grad_y[..., None] * self.C[t][:, None]).mul_(self.decay(t))


class _Gradients:
    """Gradients of the scan's inputs (x, dt, A, B, C), filled in position by position, last first."""

    def __init__(self, tokens: _Tokens, full: list[Tensor]) -> None:
        self.tokens, self.full = tokens, full
        x, dt, self.A, B, C = full
        self.x, self.dt, self.B, self.C = (tensor.split(tokens.active) for tensor in (x, dt, B, C))

    def add(self, t: int, before: Tensor, grads: Tensor, grad_y: Tensor) -> None:
        """Position t, given the states before it and the gradients [M, D, N] of those after it, which move on."""
        tokens = self.tokens
        x, dt, B, decay = tokens.x[t], tokens.dt[t], tokens.B[t], tokens.decay(t)
        written = dt * x
        after = torch.addcmul(written[..., None] * B[:, None], before, decay)
        rows = grads[: len(before)].add_(grad_y[..., None] * tokens.C[t][:, None])
        self.C[t].copy_((grad_y[..., None] * after).sum(1))
        self.B[t].copy_((rows * written[..., None]).sum(1))
        grad_written = (rows * B[:, None]).sum(-1)
        rows.mul_(decay)
        grad_exponent = rows * before
        self.x[t].copy_(dt * grad_written)
        self.dt[t].copy_(x * grad_written + (grad_exponent * tokens.A).sum(-1))
        self.A.add_((grad_exponent * dt[..., None]).sum(0))
