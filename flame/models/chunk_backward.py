"""The backward of chunked gated attention in plain PyTorch, for GPUs where FLA's Triton kernel cannot run.

FLA's `chunk_bwd_dqkwg` refuses gates on Hopper GPUs with Triton 3.4 to 3.7.0, whose compiler gets a transposed product
wrong (flash-linear-attention issue 640), unless tilelang is installed. Given what the other kernels leave, this step
has no recurrence: it is a handful of batched matrix products over chunks.

For a chunk with start state h [K, V], scores p_ij = q_i . k_j, decay d_ij = 2^(g_i - g_j) and the forward

    o_i = scale (2^g_i q_i^T h + sum_{j <= i} d_ij p_ij v_j),   h' = 2^g_last h + sum_j 2^(g_last - g_j) k_j v_j^T,

the gradients of q, k, g and w (v = u - w h) follow from those of o and h'.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, w and the log decay, for FLA's gated operators.

    Args:
        q, k: [B, T, H, K]; v, do, dv: [B, T, HV, V], HV a multiple of H.
        h, dh: [B, NT, HV, K, V] ([..., V, K] with `state_v_first`): each chunk's start state and the gradient of the
            state at its end.
        g: [B, T, HV] log2 of the decay, cumulated within chunks.
        cu_seqlens, chunk_indices: [N + 1] bounds and [NT, 2] (document, chunk) pairs of a packed row.

    Returns:
        dq, dk [B, T, H, K]; dw [B, T, HV, K] or None; dg [B, T, HV] float32, per natural log decay and before the
        reversed sum over the chunk.
    """
    assert g is not None and g_gamma is None, "FLA's own kernel runs without a data-dependent decay"
    batch_size, num_tokens, num_heads, _ = k.shape
    num_v_heads = v.shape[2]
    rows, valid = _chunk_rows(batch_size, num_tokens, chunk_size, cu_seqlens, chunk_indices, k.device)

    def chunks(x: Tensor) -> Tensor:  # [B, T, H or HV, D] -> [chunks, HV, C, D]; zeros past a document's end
        x = x.flatten(0, 1)[rows.clamp_max(batch_size * num_tokens - 1)].masked_fill(~valid[..., None, None], 0)
        x = x.transpose(1, 2)
        return x if x.shape[1] == num_v_heads else x.repeat_interleave(num_v_heads // x.shape[1], dim=1)

    # [chunks, HV, V, K]
    h, dh = (x.flatten(0, 1).to(q.dtype) if state_v_first else x.flatten(0, 1).to(q.dtype).mT for x in (h, dh))
    q_chunks, k_chunks, v_chunks, do_chunks = map(chunks, (q, k, v, do))
    log_decay = chunks(g[..., None])[..., 0]  # [chunks, HV, C]
    log_decay = log_decay.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    # Rows past the end get the last real value, so that no exponent is positive.
    last = torch.where(valid[:, None], log_decay, torch.inf).amin(-1, keepdim=True)
    log_decay = torch.where(valid[:, None], log_decay, last)
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    decay = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~causal, -torch.inf).exp2()
    scores = (_product(do_chunks, v_chunks.transpose(-1, -2)) * decay * scale).to(k.dtype)

    dk_states = _product(v_chunks, dh) * (last - log_decay).exp2()[..., None]
    dq_chunks = _product(do_chunks, h) * (scale * log_decay.exp2())[..., None] + _product(scores, k_chunks)
    dk_chunks = dk_states + _product(scores.transpose(-1, -2), q_chunks)
    dg_chunks = (dq_chunks * q_chunks).sum(-1) - (dk_chunks * k_chunks).sum(-1)
    at_end = last[..., 0].exp2() * (h * dh).sum((-1, -2), dtype=log_decay.dtype) + (dk_states * k_chunks).sum((-1, -2))
    is_last = valid & ~F.pad(valid, (0, 1))[:, 1:]
    dg_chunks = dg_chunks + torch.where(is_last[:, None], at_end[..., None], 0.0)

    def tokens(x: Tensor, dtype: torch.dtype) -> Tensor:  # [chunks, HV, C, D] -> [B, T, HV, D]
        # One row more catches everything past the documents' ends.
        out = x.new_empty(batch_size * num_tokens + 1, *x.shape[1:2], x.shape[-1], dtype=dtype)
        out[rows.flatten()] = x.transpose(1, 2).flatten(0, 1).to(dtype)
        return out[:-1].view(batch_size, num_tokens, *out.shape[1:])

    dq, dk = tokens(dq_chunks, q.dtype), tokens(dk_chunks, k.dtype)
    if num_heads != num_v_heads:
        dq, dk = (x.unflatten(2, (num_heads, -1)).sum(3) for x in (dq, dk))
    dw = None if w is None else tokens(-_product(chunks(dv.to(q.dtype)), h), w.dtype)
    return dq, dk, dw, tokens(dg_chunks[..., None], log_decay.dtype)[..., 0]


def _chunk_rows(
    batch_size: int,
    num_tokens: int,
    chunk_size: int,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Flat token row of every position [chunks, C], B * T past the end of a document, and which are within."""
    if cu_seqlens is None:
        num_chunks = -(-num_tokens // chunk_size)
        start = torch.arange(batch_size, device=device).repeat_interleave(num_chunks) * num_tokens
        end = start + num_tokens
        start = start + torch.arange(num_chunks, device=device).repeat(batch_size) * chunk_size
    else:
        document, chunk = chunk_indices.long().unbind(1)
        bounds = cu_seqlens.long()
        start, end = bounds[document] + chunk * chunk_size, bounds[document + 1]
    rows = start[:, None] + torch.arange(chunk_size, device=device)
    valid = rows < end[:, None]
    return torch.where(valid, rows, batch_size * num_tokens), valid


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b in float32 (or float64): half-precision operands, accumulated and returned in float32."""
    if not a.is_cpu and a.dtype in (torch.float16, torch.bfloat16):
        batch = a.shape[:2]
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, batch)
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    return a.to(dtype) @ b.to(dtype)
