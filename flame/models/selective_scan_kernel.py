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
import triton.language as tl
from torch import Tensor

CHUNK_SIZE = 64
_TILE_SIZE = 512  # state elements a program holds, 16 for each thread of a warp
_PROGRAMS_PER_PROCESSOR = 8  # of the backward pass
_LOG2_E = tl.constexpr(1.4426950408889634)


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
        _scan_chunks_kernel[(len(last), self.num_blocks)](
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
            _added_states_kernel[grid](bounds=chunks.bounds, states=starts, durations=durations, **inputs.scan)
            inputs.scan_chunks(chunks, durations, starts, first=state, last=final, reverse=False)
            _outputs_kernel[grid](bounds=chunks.bounds, starts=starts, y=y, **inputs.output)
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
            _added_gradients_kernel[num_chunks, num_blocks](
                bounds=bounds, grad_y=grad_y, grad_states=grad_states, **inputs.output
            )
            inputs.scan_chunks(chunks, durations, grad_states, first=grad_final, last=grad_state, reverse=True)
            _gradients_kernel[(num_programs,)](
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


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), by its series where 1 + exp(x) rounds too much of exp(x) away."""
    u = tl.exp(tl.minimum(x, 20.0))
    series = u * (1 - u * (1 / 2 - u * (1 / 3 - u * (1 / 4 - u * (1 / 5 - u * (1 / 6))))))
    return tl.where(x > 20.0, x, tl.where(u < 0.1, series, tl.log(1 + u)))


@triton.jit
def _load_decays(A, o_d, o_n, D, N):
    """[BD, BN] of A for powers of 2; states beyond N neither decay nor are written to."""
    mask = (o_d < D)[:, None] & (o_n < N)[None, :]
    return tl.load(A + o_d[:, None] * N + o_n[None, :], mask=mask, other=0.0) * _LOG2_E


@triton.jit
def _load_row(x, t, stride, offsets, size):
    return tl.load(x + t * stride + offsets, mask=offsets < size, other=0.0).to(tl.float32)


@triton.jit
def _load_vector(x, offsets, size, PRESENT: tl.constexpr):
    """x [size], zeros when it is not there."""
    b_x = tl.zeros_like(offsets).to(tl.float32)
    if PRESENT:
        b_x = tl.load(x + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _load_states(states, index, o_d, o_n, D, N):
    """[BD, BN] of states [:, D, N]."""
    mask = (o_d < D)[:, None] & (o_n < N)[None, :]
    return tl.load(states + (index.to(tl.int64) * D + o_d[:, None]) * N + o_n[None, :], mask=mask, other=0.0)


@triton.jit
def _store_states(states, index, value, o_d, o_n, D, N):
    mask = (o_d < D)[:, None] & (o_n < N)[None, :]
    tl.store(states + (index.to(tl.int64) * D + o_d[:, None]) * N + o_n[None, :], value, mask=mask)


@triton.jit
def _added_states_kernel(
    bounds, x, dt, dt_bias, A, b, states, durations, stride_x, stride_dt, stride_b, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The state [BD, BN] that a chunk reaches from zero, and the sum of its step sizes [BD]."""
    i_c, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
    b_h = tl.zeros((BD, BN), dtype=tl.float32)
    b_duration = tl.zeros((BD,), dtype=tl.float32)
    for t in range(start, end):
        b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
        b_x = _load_row(x, t, stride_x, o_d, D)
        b_b = _load_row(b, t, stride_b, o_n, N)
        b_h = b_h * tl.exp2(b_dt[:, None] * b_A) + (b_dt * b_x)[:, None] * b_b[None, :]
        b_duration += b_dt
    _store_states(states, i_c, b_h, o_d, o_n, D, N)
    tl.store(durations + i_c.to(tl.int64) * D + o_d, b_duration, mask=o_d < D)


@triton.jit
def _scan_chunks_kernel(
    offsets, durations, A, states, first, last, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_FIRST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """A document's states between its chunks, from what the chunks add; in place."""
    i_n, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(offsets + i_n), tl.load(offsets + i_n + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_h = tl.zeros((BD, BN), dtype=tl.float32)
    if HAS_FIRST:
        b_h = _load_states(first, i_n, o_d, o_n, D, N)
    for i in range(0, end - start):
        i_c = start + i
        if REVERSE:
            i_c = end - 1 - i
        b_added = _load_states(states, i_c, o_d, o_n, D, N)
        _store_states(states, i_c, b_h, o_d, o_n, D, N)
        b_duration = tl.load(durations + i_c.to(tl.int64) * D + o_d, mask=o_d < D, other=0.0)
        b_h = b_h * tl.exp2(b_duration[:, None] * b_A) + b_added
    _store_states(last, i_n, b_h, o_d, o_n, D, N)


@triton.jit
def _outputs_kernel(
    bounds, x, dt, dt_bias, A, b, c, skip, z, starts, y,
    stride_x, stride_dt, stride_b, stride_c, stride_z, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk, from the state at its start."""
    i_c, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
    b_skip = _load_vector(skip, o_d, D, HAS_SKIP)
    b_h = _load_states(starts, i_c, o_d, o_n, D, N)
    for t in range(start, end):
        b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
        b_x = _load_row(x, t, stride_x, o_d, D)
        b_b = _load_row(b, t, stride_b, o_n, N)
        b_c = _load_row(c, t, stride_c, o_n, N)
        b_h = b_h * tl.exp2(b_dt[:, None] * b_A) + (b_dt * b_x)[:, None] * b_b[None, :]
        b_y = tl.sum(b_h * b_c[None, :], axis=1) + b_skip * b_x
        if HAS_GATE:
            b_z = _load_row(z, t, stride_z, o_d, D)
            b_y *= b_z * tl.sigmoid(b_z)
        tl.store(y + t * D + o_d, b_y.to(y.dtype.element_ty), mask=o_d < D)


@triton.jit
def _added_gradients_kernel(
    bounds, x, dt, dt_bias, A, b, c, skip, z, grad_y, grad_states,
    stride_x, stride_dt, stride_b, stride_c, stride_z, D, N,
    BD: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """What a chunk's outputs add to the gradient of the state at its start."""
    i_c, i_d = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
    o_d, o_n = i_d * BD + tl.arange(0, BD), tl.arange(0, BN)
    b_A = _load_decays(A, o_d, o_n, D, N)
    b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
    b_g = tl.zeros((BD, BN), dtype=tl.float32)
    for i in range(0, end - start):
        t = end - 1 - i
        b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
        b_c = _load_row(c, t, stride_c, o_n, N)
        b_ds = _load_row(grad_y, t, D, o_d, D)
        if HAS_GATE:
            b_z = _load_row(z, t, stride_z, o_d, D)
            b_ds *= b_z * tl.sigmoid(b_z)
        b_g = (b_g + b_ds[:, None] * b_c[None, :]) * tl.exp2(b_dt[:, None] * b_A)
    _store_states(grad_states, i_c, b_g, o_d, o_n, D, N)


@triton.jit
def _gradients_kernel(
    bounds, x, dt, dt_bias, A, b, c, skip, z, starts, scratch, grad_y, grad_states,
    grad_x, grad_dt, grad_z, grad_b, grad_c, grad_skip, grad_bias,
    stride_x, stride_dt, stride_b, stride_c, stride_z, D, N, num_tokens, num_chunks, num_blocks,
    BD: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk after the other, from the state at its start and the gradient of that at its end.

    That gradient gives way to the chunk's gradient of A. With a_t = exp(dt_t A), g_t the gradient of h_t and s_t the
    output before the gate: g_t = C_t ds_t + a_(t+1) g_(t+1), and h_t = a_t h_(t-1) + dt_t x_t B_t does the rest.
    """
    pid = tl.program_id(0)
    o_n = tl.arange(0, BN)
    p_scratch = scratch + pid.to(tl.int64) * (CHUNK * BD * BN) + tl.arange(0, BD)[:, None] * BN + o_n[None, :]
    for work in range(pid, num_chunks * num_blocks, tl.num_programs(0)):
        i_c, i_d = work // num_blocks, work % num_blocks
        i_c = tl.cast(i_c, tl.int64)
        start, end = tl.load(bounds + 2 * i_c), tl.load(bounds + 2 * i_c + 1)
        o_d = i_d * BD + tl.arange(0, BD)
        m_d, m_n = o_d < D, o_n < N
        b_A = _load_decays(A, o_d, o_n, D, N)
        b_bias = _load_vector(dt_bias, o_d, D, HAS_BIAS)
        b_skip = _load_vector(skip, o_d, D, HAS_SKIP)

        b_h = _load_states(starts, i_c, o_d, o_n, D, N)
        for t in range(start, end):
            tl.store(p_scratch + (t - start) * (BD * BN), b_h)
            b_dt = _softplus(_load_row(dt, t, stride_dt, o_d, D) + b_bias)
            b_x = _load_row(x, t, stride_x, o_d, D)
            b_b = _load_row(b, t, stride_b, o_n, N)
            b_h = b_h * tl.exp2(b_dt[:, None] * b_A) + (b_dt * b_x)[:, None] * b_b[None, :]
        tl.debug_barrier()

        b_g = _load_states(grad_states, i_c, o_d, o_n, D, N)
        b_dA = tl.zeros((BD, BN), dtype=tl.float32)
        b_dskip = tl.zeros((BD,), dtype=tl.float32)
        b_dbias = tl.zeros((BD,), dtype=tl.float32)
        for i in range(0, end - start):
            t = end - 1 - i
            b_raw = _load_row(dt, t, stride_dt, o_d, D) + b_bias
            b_dt = _softplus(b_raw)
            b_x = _load_row(x, t, stride_x, o_d, D)
            b_b = _load_row(b, t, stride_b, o_n, N)
            b_c = _load_row(c, t, stride_c, o_n, N)
            b_ds = _load_row(grad_y, t, D, o_d, D)
            b_before = tl.load(p_scratch + (t - start) * (BD * BN))
            b_a = tl.exp2(b_dt[:, None] * b_A)
            b_h = b_before * b_a + (b_dt * b_x)[:, None] * b_b[None, :]
            if HAS_GATE:
                b_z = _load_row(z, t, stride_z, o_d, D)
                b_sigmoid = tl.sigmoid(b_z)
                b_s = tl.sum(b_h * b_c[None, :], axis=1) + b_skip * b_x
                b_dz = b_ds * b_s * b_sigmoid * (1 + b_z * (1 - b_sigmoid))
                tl.store(grad_z + t * D + o_d, b_dz.to(grad_z.dtype.element_ty), mask=m_d)
                b_ds *= b_z * b_sigmoid

            b_g += b_ds[:, None] * b_c[None, :]
            p_n = (i_d * num_tokens + t) * N + o_n
            tl.store(grad_c + p_n, tl.sum(b_ds[:, None] * b_h, axis=0), mask=m_n)
            tl.store(grad_b + p_n, tl.sum(b_g * (b_dt * b_x)[:, None], axis=0), mask=m_n)
            b_dwritten = tl.sum(b_g * b_b[None, :], axis=1)
            b_g *= b_a
            b_dexponent = b_g * b_before
            b_dA += b_dexponent * b_dt[:, None]
            b_dskip += b_ds * b_x
            b_ddt = b_x * b_dwritten + tl.sum(b_dexponent * b_A, axis=1) / _LOG2_E
            b_draw = b_ddt * tl.sigmoid(b_raw)
            b_dbias += b_draw
            b_dx = b_dt * b_dwritten + b_skip * b_ds
            tl.store(grad_x + t * D + o_d, b_dx.to(grad_x.dtype.element_ty), mask=m_d)
            tl.store(grad_dt + t * D + o_d, b_draw.to(grad_dt.dtype.element_ty), mask=m_d)
        tl.debug_barrier()  # the next chunk writes to the scratch buffer that this one has read

        _store_states(grad_states, i_c, b_dA, o_d, o_n, D, N)
        tl.store(grad_skip + i_c * D + o_d, b_dskip, mask=m_d)
        tl.store(grad_bias + i_c * D + o_d, b_dbias, mask=m_d)
