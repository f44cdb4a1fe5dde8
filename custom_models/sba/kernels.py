"""Stick-breaking attention as Triton kernels, for packed rows, forward and backward.

With logits z_ij = scale q_i·k_j and spent_ij = softplus(z_ij) = −log(1 − sigmoid(z_ij)), query i gives key j < i

    A_ij = exp(z_ij − Σ_{j ≤ l < i} spent_il),        rest_i = exp(−Σ_{l < i} spent_il)

(Tan et al. 2024, arXiv:2410.17980, eq. 2 in logarithms). The exponent is a sum of terms ≤ 0, so nothing overflows.
Keys are walked from the query backwards, and a block's columns hold them in that order, nearest first: the sum is then
a running one, and is never taken as the difference of two larger ones. Once it passes ``_SPENT`` for all queries of a
block, exp gives 0 in float32 and the walk ends; what lies further back gets weight 0 and gradient 0 exactly.

With e_ij = A_ij do_i·v_j the gradient of a logit is

    dz_ij = e_ij (1 − sigmoid(z_ij)) − sigmoid(z_ij) (rest_i drest_i + Σ_{l < j} e_il).

Backward first walks back, keeping what is spent before each block, then forward, adding up Σ e from the far end: as
a difference from the total, the sum would leave rounding noise on every far key. A second kernel collects dk and dv by
blocks of keys from what the first kept. No atomics: the same input gives the same bits.

Neither kernel depends on where documents lie within a block: every query knows the first token of its document, every
key the end of its own. Memory kept for the backward is q, k and v; while it runs, two numbers for each query, head and
block of keys up to the longest document.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # queries, and keys, a block
_SPENT = 110.0  # exp(-_SPENT) is 0 in float32, denormals included


def stick_breaking_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    longest: int | None = None,
    scale: float | None = None,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """Stick-breaking attention over packed documents; a query does not see its own key.

    Args:
        q: [B, T, H, D], float32, bfloat16 or float16.
        k: as q.
        v: as q.
        cu_seqlens: int32 [N + 1], document bounds of one packed row (B = 1); None: each row is a document.
        longest: tokens of the longest document; found from ``cu_seqlens`` when None.
        scale: factor of the logits; D ** -0.5 when None.
        block: queries and keys of a block, a power of two, at least 16.

    Returns:
        o [B, T, H, D] in q's dtype, and what is left of each query's stick, float32 [B, T, H].

    Raises:
        ValueError: ``cu_seqlens`` with several rows.
    """
    num_rows, seq_len, num_heads, head_dim = q.shape
    if cu_seqlens is None:
        bounds = torch.arange(0, num_rows * seq_len + 1, seq_len, device=q.device)
        longest = seq_len
    elif num_rows != 1:
        raise ValueError(f"cu_seqlens needs one packed row, got {num_rows}")
    else:
        bounds = cu_seqlens.long()
        longest = int(bounds.diff().max()) if longest is None else longest
    token = torch.arange(num_rows * seq_len, device=q.device)
    document = torch.searchsorted(bounds, token, right=True)
    starts, ends = bounds[document - 1].int(), bounds[document].int()  # of each token's document, [B * T]
    flat = (x.reshape(-1, num_heads, head_dim).contiguous() for x in (q, k, v))
    scale = head_dim**-0.5 if scale is None else scale
    o, rest = _StickBreaking.apply(*flat, starts, ends, longest, scale, block)
    return o.view_as(q), rest.view(num_rows, seq_len, num_heads)


class _StickBreaking(torch.autograd.Function):
    """On [T, H, D], all rows one after the other."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, longest: int, scale: float, block: int
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads, head_dim = q.shape
        o = torch.empty_like(q)
        rest = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
        _forward_kernel[triton.cdiv(num_tokens, block), num_heads](
            q, k, v, starts, o, rest, num_tokens, scale, **_constants(num_heads, head_dim, block)
        )
        ctx.save_for_backward(q, k, v, starts, ends)
        ctx.longest, ctx.scale, ctx.block = longest, scale, block
        return o, rest

    @staticmethod
    def backward(ctx: Any, do: Tensor, drest: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, starts, ends = ctx.saved_tensors
        num_tokens, num_heads, head_dim = q.shape
        do, drest = do.contiguous(), drest.float().contiguous()
        num_blocks = triton.cdiv(num_tokens, ctx.block)
        # By distance, in blocks, of the keys from the queries: a document reaches no further than its length.
        num_distances = min(triton.cdiv(ctx.longest, ctx.block) + 1, num_blocks)
        spent = torch.empty(num_distances, num_heads, num_tokens, dtype=torch.float32, device=q.device)
        earlier = torch.empty_like(spent)
        first = torch.empty(num_heads, num_blocks, dtype=torch.int32, device=q.device)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        constants = _constants(num_heads, head_dim, ctx.block)
        _query_kernel[num_blocks, num_heads](
            q, k, v, do, drest, starts, dq, spent, earlier, first, num_tokens, num_blocks, ctx.scale, **constants
        )
        _key_kernel[num_blocks, num_heads](
            q, k, v, do, starts, ends, dk, dv, spent, earlier, first, num_tokens, num_blocks, ctx.scale, **constants
        )
        return dq, dk, dv, None, None, None, None, None


def _constants(num_heads: int, head_dim: int, block: int) -> dict[str, Any]:
    padded = max(16, triton.next_power_of_2(head_dim))
    return {"H": num_heads, "D": head_dim, "BLOCK_D": padded, "BLOCK": block, "SPENT": _SPENT, "num_warps": 4}


@triton.jit
def _softplus(z):
    """log(1 + exp(z)), also right where exp(z) would overflow or vanish beside 1."""
    x = tl.exp(-tl.abs(z))
    u = 1.0 + x
    # log1p(x): what rounding took from u is put back, to first order, which is all there is of a small x.
    return tl.maximum(z, 0.0) + (tl.log(u) + (x - (u - 1.0)))


@triton.jit
def _load_rows(x, rows, head, T, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head, [BLOCK, BLOCK_D]; zeros beyond the T rows and the D columns."""
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < T)[:, None] & (columns < D)[None, :]
    return tl.load(x + (rows.to(tl.int64) * H + head)[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(x, values, rows, head, T, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < T)[:, None] & (columns < D)[None, :]
    target = x + (rows.to(tl.int64) * H + head)[:, None] * D + columns[None, :]
    tl.store(target, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _walk_logits(q, k, queries, keys, starts, scale):
    """Logits [queries, keys], which keys are seen, and what each seen key takes off the log of the stick."""
    z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (keys[None, :] < queries[:, None]) & (keys[None, :] >= starts[:, None])
    return z, seen, tl.where(seen, _softplus(z), 0.0)


@triton.jit
def _logit_gradients(z, seen, own, e, earlier):
    """dz; ``own`` is softplus(z), ``earlier`` [queries] what the keys before the block and the rest contribute."""
    # Columns run from the nearest key to the farthest: what follows a column belongs to earlier keys.
    before = tl.sum(e, 1)[:, None] - tl.cumsum(e, 1) + earlier[:, None]
    return tl.where(seen, e * tl.exp(-own) - tl.exp(z - own) * before, 0.0)


@triton.jit
def _is_unfinished(starts, spent, block, BLOCK: tl.constexpr, SPENT: tl.constexpr):
    """1 while any query has both keys left in ``block`` or before it, and stick left for them."""
    return tl.max(((starts < (block + 1) * BLOCK) & (spent < SPENT)).to(tl.int32), 0)


@triton.jit
def _forward_kernel(
    q, k, v, starts, o, rest, T, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, SPENT: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    queries = block * BLOCK + tl.arange(0, BLOCK)
    query_starts = tl.load(starts + queries, mask=queries < T, other=T)
    q_block = _load_rows(q, queries, head, T, H, D, BLOCK_D)
    spent = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)

    n = block
    going = _is_unfinished(query_starts, spent, n, BLOCK, SPENT)
    while going > 0:
        keys = (n + 1) * BLOCK - 1 - tl.arange(0, BLOCK)  # nearest first
        k_block = _load_rows(k, keys, head, T, H, D, BLOCK_D)
        v_block = _load_rows(v, keys, head, T, H, D, BLOCK_D)
        z, seen, own = _walk_logits(q_block, k_block, queries, keys, query_starts, scale)
        weights = tl.where(seen, tl.exp(z - tl.cumsum(own, 1) - spent[:, None]), 0.0)
        total += tl.dot(weights.to(v_block.dtype), v_block, input_precision="ieee")
        spent += tl.sum(own, 1)
        n -= 1
        going = _is_unfinished(query_starts, spent, n, BLOCK, SPENT)

    _store_rows(o, total, queries, head, T, H, D, BLOCK_D)
    tl.store(rest + queries.to(tl.int64) * H + head, tl.exp(-spent), mask=queries < T)


@triton.jit
def _query_kernel(
    q, k, v, do, drest, starts, dq, spent_before, earlier_sums, first, T, num_blocks, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, SPENT: tl.constexpr,
):  # fmt: skip
    """dq, and for `_key_kernel` what is spent after, and the sum of e before, each block of keys."""
    block, head = tl.program_id(0), tl.program_id(1)
    queries = block * BLOCK + tl.arange(0, BLOCK)
    inside = queries < T
    query_starts = tl.load(starts + queries, mask=inside, other=T)
    q_block = _load_rows(q, queries, head, T, H, D, BLOCK_D)
    spent = tl.zeros([BLOCK], dtype=tl.float32)

    n = block
    going = _is_unfinished(query_starts, spent, n, BLOCK, SPENT)
    while going > 0:
        place = ((block - n).to(tl.int64) * H + head) * T + queries
        tl.store(spent_before + place, spent, mask=inside)
        keys = (n + 1) * BLOCK - 1 - tl.arange(0, BLOCK)
        k_block = _load_rows(k, keys, head, T, H, D, BLOCK_D)
        z, seen, own = _walk_logits(q_block, k_block, queries, keys, query_starts, scale)
        spent += tl.sum(own, 1)
        n -= 1
        going = _is_unfinished(query_starts, spent, n, BLOCK, SPENT)

    n += 1
    tl.store(first + head * num_blocks + block, n)
    # The rest of the stick is like one more key before all others.
    earlier = tl.exp(-spent) * tl.load(drest + queries.to(tl.int64) * H + head, mask=inside, other=0.0)
    do_block = _load_rows(do, queries, head, T, H, D, BLOCK_D)
    dq_block = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    while n <= block:
        place = ((block - n).to(tl.int64) * H + head) * T + queries
        tl.store(earlier_sums + place, earlier, mask=inside)
        spent = tl.load(spent_before + place, mask=inside, other=0.0)
        keys = (n + 1) * BLOCK - 1 - tl.arange(0, BLOCK)
        k_block = _load_rows(k, keys, head, T, H, D, BLOCK_D)
        v_block = _load_rows(v, keys, head, T, H, D, BLOCK_D)
        z, seen, own = _walk_logits(q_block, k_block, queries, keys, query_starts, scale)
        weights = tl.where(seen, tl.exp(z - tl.cumsum(own, 1) - spent[:, None]), 0.0)
        e = weights * tl.dot(do_block, tl.trans(v_block), input_precision="ieee")
        dz = _logit_gradients(z, seen, own, e, earlier)
        dq_block += tl.dot(dz.to(k_block.dtype), k_block, input_precision="ieee")
        earlier += tl.sum(e, 1)
        n += 1
    _store_rows(dq, dq_block * scale, queries, head, T, H, D, BLOCK_D)


@triton.jit
def _key_kernel(
    q, k, v, do, starts, ends, dk, dv, spent_before, earlier_sums, first, T, num_blocks, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, SPENT: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, from the queries of its documents that walk back to it."""
    n, head = tl.program_id(0), tl.program_id(1)
    keys = (n + 1) * BLOCK - 1 - tl.arange(0, BLOCK)
    k_block = _load_rows(k, keys, head, T, H, D, BLOCK_D)
    v_block = _load_rows(v, keys, head, T, H, D, BLOCK_D)
    dk_block = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv_block = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    end = tl.max(tl.load(ends + keys, mask=keys < T, other=0), 0)

    for block in range(n, tl.cdiv(end, BLOCK)):
        if tl.load(first + head * num_blocks + block) <= n:
            queries = block * BLOCK + tl.arange(0, BLOCK)
            inside = queries < T
            query_starts = tl.load(starts + queries, mask=inside, other=T)
            place = ((block - n).to(tl.int64) * H + head) * T + queries
            spent = tl.load(spent_before + place, mask=inside, other=0.0)
            earlier = tl.load(earlier_sums + place, mask=inside, other=0.0)
            q_block = _load_rows(q, queries, head, T, H, D, BLOCK_D)
            do_block = _load_rows(do, queries, head, T, H, D, BLOCK_D)
            z, seen, own = _walk_logits(q_block, k_block, queries, keys, query_starts, scale)
            weights = tl.where(seen, tl.exp(z - tl.cumsum(own, 1) - spent[:, None]), 0.0)
            dv_block += tl.dot(tl.trans(weights.to(do_block.dtype)), do_block, input_precision="ieee")
            e = weights * tl.dot(do_block, tl.trans(v_block), input_precision="ieee")
            dz = _logit_gradients(z, seen, own, e, earlier)
            dk_block += tl.dot(tl.trans(dz.to(q_block.dtype)), q_block, input_precision="ieee")

    _store_rows(dk, dk_block * scale, keys, head, T, H, D, BLOCK_D)
    _store_rows(dv, dv_block, keys, head, T, H, D, BLOCK_D)
