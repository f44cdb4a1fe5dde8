"""Selective scan of Mamba (arXiv:2312.00752, algorithm 2) in Triton, for packed documents; float32 throughout.

The recurrence and the arguments are those of flame.models.reference.selective_scan. Documents are cut into chunks of
`CHUNK_SIZE` tokens, which run in parallel with a block of channels each:

    1. what every chunk adds to its document's state, from zero;
    2. the state at the start of every chunk, one document after its chunks;
    3. the outputs of every chunk.

The backward pass does the same in reverse for the gradients of the states. It repeats a chunk's states into a scratch
buffer, one for each program in flight, so that only the states at the chunks' starts outlive the forward pass. Sums
over channels and chunks are written out and added by torch, so that gradients are the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from flame.models.selective_scan_kernels import (
    added_gradients_kernel,
    added_states_kernel,
    gradients_kernel,
    outputs_kernel,
    scan_chunks_kernel,
)

CHUNK_SIZE = 64
_TILE_SIZE = 512  # state elements a program holds, 16 for each thread of a warp
_PROGRAMS_PER_PROCESSOR = 8  # of the backward pass


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
    y, final = _SelectiveScan.apply(x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens)
    return y, final if output_final_state else None


@dataclass(frozen=True)
class _Chunks:
    """Where chunks lie, computed on the device without waiting for it, which leaves a few empty chunks at the end.

    Attributes:
        bounds: first token and the one after the last of every chunk, int64 [M, 2].
        offsets: first chunk of every document, int32 [num_documents + 1].
    """

    bounds: Tensor
    offsets: Tensor

    @classmethod
    def build(cls, cu_seqlens: Tensor, num_tokens: int) -> _Chunks:
        cu_seqlens = cu_seqlens.long()
        num_documents = len(cu_seqlens) - 1
        offsets = torch.zeros_like(cu_seqlens)
        offsets[1:] = ((cu_seqlens.diff() + CHUNK_SIZE - 1) // CHUNK_SIZE).cumsum(0)
        chunk = torch.arange(num_tokens // CHUNK_SIZE + num_documents, device=cu_seqlens.device)
        document = (torch.searchsorted(offsets, chunk, right=True) - 1).clamp_max(num_documents - 1)
        start = cu_seqlens[document] + (chunk - offsets[document]) * CHUNK_SIZE
        end = torch.minimum(start + CHUNK_SIZE, cu_seqlens[document + 1])
        return cls(torch.stack([start, end], dim=1), offsets.int())

    @property
    def num_chunks(self) -> int:
        return len(self.bounds)


class _Inputs:
    """Tensors of the scan as rows of tokens, and what every kernel must be told about them."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
    ) -> None:
        self.num_channels, self.state_size = A.shape
        self.x, self.dt, self.B, self.C = map(_token_rows, (x, dt, B, C))
        self.z = None if z is None else _token_rows(z)
        block_n = triton.next_power_of_2(self.state_size)
        block_d = max(4, _TILE_SIZE // block_n)
        self.num_blocks = triton.cdiv(self.num_channels, block_d)
        self.tile_size = block_d * block_n
        self.A = A.float().contiguous()
        self.states = dict(A=self.A, D=self.num_channels, N=self.state_size, BD=block_d, BN=block_n, num_warps=1)
        self.scan = self.states | dict(
            x=self.x,
            dt=self.dt,
            dt_bias=dt_bias,
            b=self.B,
            stride_x=self.x.stride(0),
            stride_dt=self.dt.stride(0),
            stride_b=self.B.stride(0),
            HAS_BIAS=dt_bias is not None,
        )
        self.output = self.scan | dict(
            c=self.C,
            skip=D,
            z=self.z,
            stride_c=self.C.stride(0),
            stride_z=0 if z is None else self.z.stride(0),
            HAS_SKIP=D is not None,
            HAS_GATE=z is not None,
        )

    def empty_states(self, count: int) -> Tensor:
        return self.x.new_empty(count, self.num_channels, self.state_size, dtype=torch.float32)

    def scan_chunks(
        self, chunks: _Chunks, durations: Tensor, states: Tensor, first: Tensor | None, last: Tensor, reverse: bool
    ) -> None:
        """Replace what each chunk adds by the state before it (after it, going in reverse), in place."""
        first = None if first is None else first.float().contiguous()
        options = dict(HAS_FIRST=first is not None, REVERSE=reverse)
        scan_chunks_kernel[(len(last), self.num_blocks)](
            offsets=chunks.offsets, durations=durations, states=states, first=first, last=last, **options, **self.states
        )


class _SelectiveScan(torch.autograd.Function):
    """All but the last step of `selective_scan`: the final states always come along."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        batch_size, num_tokens, _ = x.shape
        if cu_seqlens is None:
            cu_seqlens = torch.arange(batch_size + 1, device=x.device) * num_tokens
        inputs = _Inputs(x, dt, A, B, C, D, z, dt_bias)
        chunks = _Chunks.build(cu_seqlens, batch_size * num_tokens)
        starts, final = inputs.empty_states(chunks.num_chunks), inputs.empty_states(len(cu_seqlens) - 1)
        durations = x.new_empty(chunks.num_chunks, inputs.num_channels, dtype=torch.float32)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grid = (chunks.num_chunks, inputs.num_blocks)
        with torch.cuda.device_of(x):
            added_states_kernel[grid](bounds=chunks.bounds, states=starts, durations=durations, **inputs.scan)
            inputs.scan_chunks(chunks, durations, starts, first=state, last=final, reverse=False)
            outputs_kernel[grid](bounds=chunks.bounds, starts=starts, y=y, **inputs.output)
        ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, state, starts, durations, chunks.bounds, chunks.offsets)
        return y, final

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, state, starts, durations, bounds, offsets = ctx.saved_tensors
        x, dt, A, B, C, D, z, dt_bias = tensors
        chunks, inputs = _Chunks(bounds, offsets), _Inputs(*tensors)
        num_chunks, num_blocks = chunks.num_chunks, inputs.num_blocks
        grad_y = grad_y.contiguous()
        grad_states, grad_state = torch.empty_like(starts), torch.empty_like(grad_final)
        grad_x, grad_dt = (torch.empty(rows.shape, dtype=rows.dtype, device=x.device) for rows in (x, dt))
        grad_z = None if z is None else torch.empty(z.shape, dtype=z.dtype, device=x.device)
        grad_b, grad_c = x.new_empty(2, num_blocks, *inputs.B.shape, dtype=torch.float32)  # to be summed over blocks
        grad_skip, grad_bias = torch.empty_like(durations), torch.empty_like(durations)  # to be summed over chunks
        num_programs = min(_max_programs(x.device), num_chunks * num_blocks)
        scratch = x.new_empty(num_programs, CHUNK_SIZE, inputs.tile_size, dtype=torch.float32)
        with torch.cuda.device_of(x):
            added_gradients_kernel[num_chunks, num_blocks](
                bounds=bounds, grad_y=grad_y, grad_states=grad_states, **inputs.output
            )
            inputs.scan_chunks(chunks, durations, grad_states, first=grad_final, last=grad_state, reverse=True)
            gradients_kernel[(num_programs,)](
                bounds=bounds,
                starts=starts,
                scratch=scratch,
                grad_y=grad_y,
                grad_states=grad_states,
                grad_x=grad_x,
                grad_dt=grad_dt,
                grad_z=grad_z,
                grad_b=grad_b,
                grad_c=grad_c,
                grad_skip=grad_skip,
                grad_bias=grad_bias,
                num_tokens=len(inputs.x),
                num_chunks=num_chunks,
                num_blocks=num_blocks,
                CHUNK=CHUNK_SIZE,
                **inputs.output,
            )
        return (
            grad_x,
            grad_dt,
            grad_states.sum(0).to(A.dtype),  # by now each chunk's gradient of A
            grad_b.sum(0).to(B.dtype).view(B.shape),
            grad_c.sum(0).to(C.dtype).view(C.shape),
            None if D is None else grad_skip.sum(0).to(D.dtype),
            grad_z,
            None if dt_bias is None else grad_bias.sum(0).to(dt_bias.dtype),
            None if state is None else grad_state.to(state.dtype),
            None,
        )


def _token_rows(x: Tensor) -> Tensor:
    """[B, T, D] -> [B * T, D] with adjacent channels; a copy only where there must be one."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _max_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter, where a program has several chunks to do as well
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
