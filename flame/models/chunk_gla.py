"""Gated linear attention for training on Hopper GPUs: FLA's `chunk_gla` with kernels of flame's own.

FLA's chunked kernels take twelve launches and 4.7 ms for one layer of gla_340M forward and backward (65,536 tokens),
most of it in scalar loops within chunks and float32 copies of states and gradients. These take six launches and 1.3 ms,
and keep only their inputs for the backward. They take bfloat16 heads of 64 or 128 key channels (gla_340M, hgrn2_340M);
others go to FLA's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flame.models.chunk_gla_kernels import gla_gradient_kernel, gla_prepare_kernel, gla_state_kernel
from flame.models.chunks import BT, Chunks, count_documents, is_on_hopper

TILE = 64  # channels of keys or values that a program holds, where it need not hold all of them
KEY_DIMS = (64, 128)  # a state [TILE, K] stays in the registers of a program
# The fastest on an H200. 168 registers: three programs of 128 threads on a multiprocessor.
NUM_WARPS = 4
PREPARE_REGISTERS = 168
STATE_STAGES, OUTPUT_STAGES, GRADIENT_STAGES = 3, 2, 3


def make_chunk_gla(original: Callable) -> Callable:
    """FLA's `chunk_gla`; what these kernels do not take is left to FLA's."""

    def chunk_gla(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Gated linear attention, see `flame.models.chunk_gla_kernels`.

        Args:
            q, k, g: [B, T, H, K]; g: natural logarithms of decays. v: [B, T, H, V].
            scale: of q; K ** -0.5 when not given.
            initial_state: float32 [N, H, V, K] with ``state_v_first``, of each document.
            cu_seqlens: bounds of packed documents, [N + 1], for a batch of one row; the last is T.

        Returns:
            o [B, T, H, V] and, float32 [N, H, V, K], the final states, None without ``output_final_state``.
        """
        has_states = initial_state is not None or output_final_state
        is_refused = (cu_seqlens is not None and len(q) != 1) or not _are_states(initial_state, q, cu_seqlens)
        if is_refused or not takes(q, k, v, g) or (has_states and not state_v_first):
            return original(
                q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu
            )
        chunks = Chunks.of(q, cu_seqlens, cu_seqlens_cpu)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        inputs = (None if x is None else x.contiguous() for x in (q, k, v, g, initial_state))
        return _ChunkGLA.apply(*inputs, scale, output_final_state, chunks)

    return chunk_gla


def _are_states(initial_state: Tensor | None, q: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether they are what FLA takes: float32, one for each document."""
    if initial_state is None:
        return True
    return initial_state.dtype == torch.float32 and len(initial_state) == count_documents(q, cu_seqlens)


def takes(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> bool:
    """Whether the kernels do: bfloat16 heads of known widths, on the kind of GPU that they were written for."""
    is_bfloat16 = all(x.dtype == torch.bfloat16 for x in (q, k, v, g))
    is_known = q.shape[-1] in KEY_DIMS and v.shape[-1] % TILE == 0 and q.shape == k.shape == g.shape
    return is_bfloat16 and is_known and q.shape[:-1] == v.shape[:-1] and is_on_hopper(q)


class _ChunkGLA(torch.autograd.Function):
    """Outputs in one pass over the states; the backward computes all that lies between again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        initial_state: Tensor | None,
        scale: float,
        output_final_state: bool,
        chunks: Chunks,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(q, k, v, g, initial_state)
        ctx.scale, ctx.chunks = scale, chunks
        ctx.set_materialize_grads(False)
        o, final_state = torch.empty_like(v), _new_states(k, v, chunks) if output_final_state else None
        with torch.cuda.device_of(q):
            q_decayed, k_decayed, A, decay = _prepare(q, k, g, scale, chunks)
            _run_states(k_decayed, v, decay, chunks, z=q_decayed, A=A, o=o, s_first=initial_state, s_last=final_state)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, initial_state = ctx.saved_tensors
        scale, chunks = ctx.scale, ctx.chunks
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        shape = chunks.num_chunks, q.shape[2], v.shape[3], q.shape[3]
        states, dstates = (k.new_empty(shape) for _ in range(2))  # [chunks, H, V, K]
        dinitial = None if initial_state is None else _new_states(k, v, chunks)
        dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
        grid = (chunks.num_chunks * q.shape[2] * (q.shape[3] // TILE),)
        with torch.cuda.device_of(q):
            q_decayed, k_decayed, A, decay = _prepare(q, k, g, scale, chunks)
            _run_states(k_decayed, v, decay, chunks, states=states, s_first=initial_state)
            _run_states(
                q_decayed, do, decay, chunks, states=dstates, z=k_decayed, A=A, o=dv, s_first=dfinal, s_last=dinitial,
                backward=True,
            )  # fmt: skip
            gla_gradient_kernel[grid](
                q, k, v, g, states, do, dstates, dq, dk, dg, chunks.cu_seqlens, chunks.indices, scale, q.shape[1],
                H=q.shape[2], K=q.shape[3], V=v.shape[3], BT=BT, BK=TILE, BV=TILE, STAGES=GRADIENT_STAGES,
                num_warps=NUM_WARPS,
            )  # fmt: skip
        return dq, dk, dv, dg, dinitial, None, None, None


def _new_states(k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
    shape = chunks.num_documents, k.shape[2], v.shape[3], k.shape[3]
    return k.new_empty(shape, dtype=torch.float32)


def _prepare(q: Tensor, k: Tensor, g: Tensor, scale: float, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q 2^G scale, k 2^(G_last - G), A and 2^G_last; the backward computes them again."""
    num_heads, key_dim = q.shape[2:]
    q_decayed, k_decayed = torch.empty_like(q), torch.empty_like(k)
    A = q.new_empty(*q.shape[:3], BT)  # [B, T, H, BT]
    decay = q.new_empty(chunks.num_chunks, num_heads, key_dim, dtype=torch.float32)  # [chunks, H, K]
    gla_prepare_kernel[(chunks.num_chunks * num_heads,)](
        q, k, g, q_decayed, k_decayed, A, decay, chunks.cu_seqlens, chunks.indices, scale, q.shape[1],
        H=num_heads, K=key_dim, BT=BT, BK=TILE, num_warps=NUM_WARPS, maxnreg=PREPARE_REGISTERS,
    )  # fmt: skip
    return q_decayed, k_decayed, A, decay


def _run_states(
    x: Tensor,
    y: Tensor,
    decay: Tensor,
    chunks: Chunks,
    *,
    states: Tensor | None = None,
    z: Tensor | None = None,
    A: Tensor | None = None,
    o: Tensor | None = None,
    s_first: Tensor | None = None,
    s_last: Tensor | None = None,
    backward: bool = False,
) -> None:
    """The state kernel over all documents, which says itself what x, y, z and o are."""
    _, num_tokens, num_heads, key_dim = x.shape
    grid = (chunks.num_documents * num_heads * (y.shape[3] // TILE),)
    gla_state_kernel[grid](
        x, y, decay, states, z, A, o, s_first, s_last, chunks.cu_seqlens, chunks.offsets, chunks.order, num_tokens,
        H=num_heads, K=key_dim, V=y.shape[3], BT=BT, BV=TILE, BACKWARD=backward,
        STAGES=STATE_STAGES if o is None else OUTPUT_STAGES, num_warps=NUM_WARPS,
    )  # fmt: skip
