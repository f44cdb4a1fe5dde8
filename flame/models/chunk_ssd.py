"""Mamba-2's scan for training on Hopper GPUs: `flame.models.ssd` with kernels of flame's own.

As linear attention by FLA's kernels it wants B and C repeated for every head, which is 32 times their size and four
times that of x in mamba2_340M, with copies and sums of that size around them. These kernels read B and C as they are,
scale x by its step sizes and add D x themselves, and keep only their inputs for the backward. They take bfloat16 heads
of 64 channels and states of 64 or 128; others go to FLA's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flame.models.chunk_ssd_kernels import ssd_backward_kernel, ssd_forward_kernel, ssd_gradient_kernel
from flame.models.chunks import BT, Chunks, count_documents, is_on_hopper

HEAD_DIM = 64
STATE_SIZES = (64, 128)  # a state [P, N] stays in the registers of a program
STATE_WARPS, STATE_STAGES = 4, 2
GRADIENT_WARPS, GRADIENT_STAGES = 8, 3


def make_chunk_ssd(original: Callable) -> Callable:
    """`flame.models.ssd.make_ssd`'s function; what these kernels do not take is left to it."""

    def chunk_ssd(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `flame.models.ssd.ssd`."""
        is_refused = (
            (cu_seqlens is not None and len(x) != 1)
            or (D is not None and D.numel() != x.shape[2])
            or (initial_state is not None and len(initial_state) != count_documents(x, cu_seqlens))
        )
        if is_refused or not takes(x, dt, A, B, C):
            return original(x, dt, A, B, C, D, initial_state, output_final_state, cu_seqlens)
        chunks = Chunks.of(x, cu_seqlens)
        x, B, C = map(_with_even_rows, (x, B, C))
        D = None if D is None else D.float().flatten()
        state = None if initial_state is None else initial_state.float().contiguous()
        return _ChunkSSD.apply(x, dt.contiguous(), A.contiguous(), B, C, D, state, output_final_state, chunks)

    return chunk_ssd


def takes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether the kernels do: bfloat16 heads of known widths, on the kind of GPU that they were written for."""
    is_bfloat16 = all(each.dtype == torch.bfloat16 for each in (x, B, C))
    are_groups = B.shape == C.shape and x.shape[2] % B.shape[2] == 0
    is_known = x.shape[-1] == HEAD_DIM and B.shape[-1] in STATE_SIZES and are_groups
    return is_bfloat16 and dt.dtype == A.dtype == torch.float32 and is_known and is_on_hopper(x)


def _with_even_rows(x: Tensor) -> Tensor:
    """x [B, T, H, D] with rows [H, D] that are each contiguous and all as far apart, such as columns of a matrix."""
    stride = x.stride()
    is_even = stride[3] == 1 and stride[2] == x.shape[3] and (len(x) == 1 or stride[0] == x.shape[1] * _row_stride(x))
    return x if is_even else x.contiguous()


def _row_stride(x: Tensor) -> int:
    """How far apart rows of x [B, T, H, D] are: a dimension of one element may have any stride."""
    return x.stride(0) if x.shape[1] == 1 else x.stride(1)


class _ChunkSSD(torch.autograd.Function):
    """Outputs in one pass over the states; the backward computes all that lies between again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial_state: Tensor | None,
        output_final_state: bool,
        chunks: Chunks,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, dt, A, B, C, D, initial_state)
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        y = x.new_empty(x.shape)
        final_state = _new_states(x, B, chunks) if output_final_state else None
        _run_forward(x, dt, A, B, C, D, chunks, y=y, s_first=initial_state, s_last=final_state)
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, initial_state = ctx.saved_tensors
        chunks = ctx.chunks
        dy = x.new_zeros(x.shape) if dy is None else dy.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        num_heads, head_dim = x.shape[2:]
        shape = chunks.num_chunks, num_heads, head_dim, B.shape[3]
        states, dstates = (x.new_empty(shape) for _ in range(2))
        decays, ddt, *dg = (torch.empty_like(dt) for _ in range(4))
        _run_forward(x, dt, A, B, C, None, chunks, states=states, decays=decays, s_first=initial_state)
        dx, dB, dC = _empty_columns(x, B, C)
        dD = dt.new_empty(shape[:2])
        dinitial = None if initial_state is None else torch.empty_like(initial_state)
        sizes = dict(H=num_heads, G=B.shape[2], P=head_dim, N=B.shape[3], BT=BT)
        options = dict(STAGES=GRADIENT_STAGES, num_warps=GRADIENT_WARPS, **sizes)
        shared, grid = (chunks.cu_seqlens, chunks.indices, x.shape[1]), (chunks.num_chunks * B.shape[2],)
        with torch.cuda.device_of(x):
            ssd_backward_kernel[(chunks.num_documents * num_heads,)](
                B, C, dt, decays, D, dy, dstates, dx, dfinal, dinitial, chunks.cu_seqlens, chunks.offsets, chunks.order,
                x.shape[1], *map(_row_stride, (B, C, dx)), STAGES=STATE_STAGES, num_warps=STATE_WARPS, **sizes,
            )  # fmt: skip
            ssd_gradient_kernel[grid](
                C, B, dy, x, states, None, dt, decays, dC, dg[0], dD, *shared,
                *map(_row_stride, (C, B, dy, x, dC)), **options,
            )  # fmt: skip
            ssd_gradient_kernel[grid](
                B, C, x, dy, dstates, states, dt, decays, dB, dg[1], ddt, *shared,
                *map(_row_stride, (B, C, x, dy, dB)), **options,
            )  # fmt: skip
        dg = dg[0] + dg[1]
        dA = (dg * dt).sum((0, 1))
        return dx, torch.addcmul(ddt, dg, A), dA, dB, dC, None if D is None else dD.sum(0), dinitial, None, None


def _run_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    chunks: Chunks,
    *,
    y: Tensor | None = None,
    states: Tensor | None = None,
    decays: Tensor | None = None,
    s_first: Tensor | None = None,
    s_last: Tensor | None = None,
) -> None:
    """The forward kernel over all documents, which says itself what it leaves where."""
    num_heads, head_dim = x.shape[2:]
    with torch.cuda.device_of(x):
        ssd_forward_kernel[(chunks.num_documents * num_heads,)](
            x, B, C, dt, A, D, states, decays, y, s_first, s_last, chunks.cu_seqlens, chunks.offsets, chunks.order,
            x.shape[1], *map(_row_stride, (x, B, C)), H=num_heads, G=B.shape[2], P=head_dim, N=B.shape[3], BT=BT,
            STAGES=STATE_STAGES, num_warps=STATE_WARPS,
        )  # fmt: skip


def _empty_columns(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of these shapes [B, T, H, D], side by side in one matrix (`flame.models.columns`)."""
    widths = [x.shape[2] * x.shape[3] for x in tensors]
    columns = tensors[0].new_empty(*tensors[0].shape[:2], sum(widths)).split(widths, dim=-1)
    return tuple(each.unflatten(-1, x.shape[2:]) for each, x in zip(columns, tensors, strict=True))


def _new_states(x: Tensor, B: Tensor, chunks: Chunks) -> Tensor:
    """Float32 [documents, H, N, P]."""
    return x.new_empty(chunks.num_documents, x.shape[2], B.shape[3], x.shape[3], dtype=torch.float32)
