"""Softmax attention over packed documents, as torch has it: the kernels behind `flame.models.attention`.

The packed forms have one signature: q [Tq, H, D] over k, v [Tk, Hkv, D], the documents, the scale (None for D ** -0.5)
and the window; they return [Tq, H, D].
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """Keys from `left` before to `right` after a query's own position; -1 is unlimited."""

    left: int
    right: int

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int, int]) -> Window:
        left, right = window_size
        return cls(left, 0 if causal else right)

    @property
    def is_causal(self) -> bool:
        return (self.left, self.right) == (-1, 0)

    def mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Boolean [num_queries, num_keys], queries aligned with the last keys; None when all is visible."""
        if (self.left, self.right) == (-1, -1) or (self.is_causal and num_queries == 1):
            return None
        query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
        distance = query - torch.arange(num_keys, device=device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            visible &= distance <= self.left
        if self.right >= 0:
            visible &= distance >= -self.right
        return visible


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents begin and end in packed queries and in the keys they see.

    Attributes:
        bounds_q, bounds_k: int32 [n + 1], the first token of each and the end.
        longest_q, longest_k: no document has more tokens.
    """

    bounds_q: Tensor
    bounds_k: Tensor
    longest_q: int
    longest_k: int

    @property
    def have_all_queries(self) -> bool:
        """Whether there are as many queries as keys, at the same positions; not so when decoding with padding."""
        return self.bounds_q is self.bounds_k  # comparing values would wait for the device


def fits_flash(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention takes these: half precision, heads of at most 256."""
    return q.dtype in (torch.float16, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= 256


def expand_kv_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads of x [..., Hkv, D] for grouped queries: query head i reads key head i // (H / Hkv)."""
    return x if x.shape[-2] == num_heads else x.repeat_interleave(num_heads // x.shape[-2], dim=-2)


def dense_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: Window) -> Tensor:
    num_heads, num_queries, num_keys = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = (expand_kv_heads(x, num_heads).transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    if window.is_causal and num_queries == num_keys:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = window.mask(num_queries, num_keys, q.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return o.transpose(1, 2)


def grouped_sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window) -> Tensor:
    """One dense call per group of documents whose lengths round up to the same power of two.

    Documents are padded at their ends, which a causal query never sees. Without causality, or with more keys than
    queries, only documents of equal lengths share a group, so that there is no padding.
    """
    bounds_q, bounds_k = (x.to("cpu", torch.int64) for x in (documents.bounds_q, documents.bounds_k))
    lengths_q, lengths_k = bounds_q.diff(), bounds_k.diff()
    pads = window.right == 0 and torch.equal(lengths_q, lengths_k)
    groups: dict[tuple[int, int], list[int]] = {}
    for document, pair in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        key = (1 << (pair[0] - 1).bit_length(), 0) if pads and pair[0] else pair
        groups.setdefault(key, []).append(document)
    rows, outputs = [], []
    for members in groups.values():
        rows_q, valid = _group_rows(bounds_q[members], lengths_q[members])
        rows_k, _ = _group_rows(bounds_k[members], lengths_k[members])
        group_q = q[rows_q.to(q.device)]  # [documents, longest, H, D]
        group_k, group_v = (x[rows_k.to(q.device)] for x in (k, v))
        o = dense_sdpa(group_q, group_k, group_v, scale, window)
        rows.append(rows_q[valid])
        # As numbers, since how many places a mask has cannot be known of tensors without memory.
        outputs.append(o[tuple(place.to(q.device) for place in valid.nonzero(as_tuple=True))])
    order = torch.cat(rows).argsort().to(q.device)
    return torch.cat(outputs)[order]


def _group_rows(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Token rows [documents, longest] of documents and which of them are real; padding repeats the last token."""
    position = torch.arange(int(lengths.max()))
    valid = position < lengths[:, None]
    return starts[:, None] + torch.minimum(position, lengths[:, None] - 1), valid


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    head_dim = v.shape[-1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    padding = -q.shape[-1] % 8  # the kernel takes multiples of 8
    q, k, v = (pad_heads(x, padding) for x in (q, k, v))
    # torch 2.11 has grouped queries without saying so; later releases want to be told.
    options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    o = varlen_attn(
        q,
        k,
        v,
        documents.bounds_q.int(),
        documents.bounds_k.int(),
        documents.longest_q,
        documents.longest_k,
        scale=scale,
        window_size=(window.left, window.right),
        **options,
    )
    return o[..., :head_dim]


def pad_heads(x: Tensor, padding: int) -> Tensor:
    """Zeros behind the last dimension, which change no product."""
    return F.pad(x, (0, padding)) if padding else x
