"""Stick-breaking attention (arXiv:2410.17980): attention without positions or softmax.

Query i walks back from its own position. Each key j takes the share sigmoid(z_ij) of the stick that the nearer keys
have left, z_ij = scale * q_i . k_j:

    A_ij = sigmoid(z_ij) prod_{j < l} (1 - sigmoid(z_il)),   o_i = sum_j A_ij v_j,   rem_i = prod_l (1 - sigmoid(z_il))

over the visible keys, those before the query (with `attend_current`, its own too). The product is a sum of
log sigmoid(-z), which never exceeds 0: no logit, however large, overflows or turns a weight into 0 / 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flame.errors import UserError
from flame.models.reference.packing import compute_dtype, document_lengths

# Queries computed at once; longer documents recompute their weights in the backward pass, a block at a time.
_BLOCK = 256


def stickbreaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    attend_current: bool = False,
) -> tuple[Tensor, Tensor]:
    """Stick-breaking attention over packed documents.

    Args:
        q: [B, T, HQ, K].
        k: [B, T, H, K]; HQ a multiple of H: query head i reads key head i // (HQ // H). Without `cu_seqlens` there
            may be more keys than queries: the queries are then the last positions (decoding with a cache).
        v: [B, T, H, V].
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        scale: factor of the logits, K**-0.5 by default.
        attend_current: whether a query sees the key of its own position.

    Returns:
        o [B, T, HQ, V] and the rest of the stick, rem [B, T, HQ], both in q's dtype.

    Raises:
        UserError: heads that do not divide, or shapes that do not fit together.
    """
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] > k.shape[1]:
        raise UserError(
            "stick-breaking attention takes q [B, T, HQ, K], k [B, T, H, K] and v [B, T, H, V], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads is not a multiple of {k.shape[2]} key heads")
    dtype, out_dtype = compute_dtype(q, k, v), q.dtype
    q = q.to(dtype) * (k.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = q.transpose(1, 2), k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)  # [B, H, T, D]
    if cu_seqlens is None:
        o, rem = _attend_document(q, k, v, attend_current)
    else:
        lengths = document_lengths(q.shape[0], q.shape[2], cu_seqlens).tolist()
        documents = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        outputs = [_attend_document(*document, attend_current) for document in documents]
        o, rem = (torch.cat(parts, dim=2) for parts in zip(*outputs, strict=True))
    return o.transpose(1, 2).to(out_dtype), rem.transpose(1, 2).to(out_dtype)


def parallel_stickbreaking_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    attend_current: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`stickbreaking_attention` behind the signature of FLA's kernel."""
    return stickbreaking_attention(q, k, v, cu_seqlens, scale, attend_current)


def layer_forward(
    layer: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    use_cache: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None, None]:
    """What FLA's layer computes, for any device and dtype; `attention_mask` [B, T] is 0 for padding.

    Raises:
        UserError: a cache or attention weights, which FLA's layer does not have either.
    """
    if use_cache or past_key_values is not None or output_attentions:
        raise UserError("stick-breaking attention has no cache and returns no weights; set use_cache to false")
    from fla.layers import stickbreaking_attn as home
    from fla.layers.utils import repad_hidden_states, unpad_hidden_states

    batch_size, num_tokens, _ = hidden_states.shape
    x, indices, cu_seqlens = unpad_hidden_states(
        hidden_states=hidden_states, cu_seqlens=cu_seqlens, attention_mask=attention_mask, q_len=num_tokens
    )
    q, k, v = (
        projection(x).unflatten(-1, (-1, layer.head_dim)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if layer.qk_norm:
        q, k = layer.q_norm(q), layer.k_norm(k)
    # By the name that FLA's module binds, which context parallelism wraps.
    o, _ = home.parallel_stickbreaking_attn(q=q, k=k, v=v, attend_current=layer.attend_current, cu_seqlens=cu_seqlens)
    o = layer.o_proj(o.flatten(-2))
    return repad_hidden_states(hidden_states=o, indices=indices, batch_size=batch_size, q_len=num_tokens), None, None


def _attend_document(q: Tensor, k: Tensor, v: Tensor, attend_current: bool) -> tuple[Tensor, Tensor]:
    """o [B, HQ, T, V] and rem [B, HQ, T] of scaled q [B, HQ, T, K], the last T of the positions of k and v."""
    num_before = k.shape[2] - q.shape[2]
    outputs = []
    for start in range(0, max(q.shape[2], 1), _BLOCK):
        q_block = q[:, :, start : start + _BLOCK]
        end = num_before + start + q_block.shape[2]
        inputs = (q_block, k[:, :, :end], v[:, :, :end], attend_current)
        if q.shape[2] <= _BLOCK:
            outputs.append(_attend_block(*inputs))
        else:
            outputs.append(checkpoint(_attend_block, *inputs, use_reentrant=False, preserve_rng_state=False))
    o, rem = (torch.cat(parts, dim=2) for parts in zip(*outputs, strict=True))
    return o, rem


def _attend_block(q: Tensor, k: Tensor, v: Tensor, attend_current: bool) -> tuple[Tensor, Tensor]:
    """`_attend_document` of queries at the last of the positions of k and v, with all their weights at once."""
    num_groups, num_queries, num_keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(num_groups, dim=1) if num_groups > 1 else x for x in (k, v))
    z = q @ k.transpose(-1, -2)  # [B, HQ, num_queries, num_keys]
    query = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    hidden = torch.arange(num_keys, device=q.device) >= query + int(attend_current)
    log_kept = F.logsigmoid(-z).masked_fill(hidden, 0)
    # log of what each key and all nearer ones leave; what a key finds is the same sum without its own term, taken
    # from its neighbour: subtracting the term would cancel where a logit is large.
    log_left = log_kept.flip(-1).cumsum(-1).flip(-1)
    log_found = F.pad(log_left[..., 1:], (0, 1))
    weights = (F.logsigmoid(z) + log_found).masked_fill(hidden, -torch.inf).exp()
    return weights @ v, log_left[..., 0].exp() if num_keys else torch.ones_like(q[..., 0])
