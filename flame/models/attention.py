"""Softmax attention for FLA's layers when the `flash_attn` package is not installed.

`make_attention` returns replacements for `flash_attn_func` and `flash_attn_varlen_func` on top of torch:

- varlen: torch's variable-length FlashAttention (CUDA, half precision); no host synchronisation.
- sdpa: `scaled_dot_product_attention` per group of documents of similar length; exact document isolation on any device.
  On CUDA it reads the document bounds back to the host.
- flex: FlexAttention with a document mask, compiled (CUDA).
- flash: the `flash_attn` package itself, nothing is replaced.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError

ATTENTION_BACKENDS = ("auto", "varlen", "sdpa", "flex", "flash")


def resolve_attention_backend(name: str, device_type: str) -> str:
    """The backend that `model.attention_backend` stands for on a device type ("cpu", "cuda").

    Raises:
        UserError: an unknown name, or one that cannot run there.
    """
    if name not in ATTENTION_BACKENDS:
        raise UserError(f"model.attention_backend = {name!r}; allowed: {', '.join(ATTENTION_BACKENDS)}")
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if name == "auto":
        if device_type != "cuda":
            return "sdpa"
        return "flash" if has_flash else "varlen"
    if name == "flash" and not has_flash:
        raise UserError("model.attention_backend = 'flash' needs the flash_attn package; install it, or use 'varlen'")
    if name != "sdpa" and device_type != "cuda":
        raise UserError(f"model.attention_backend = {name!r} needs a CUDA device, this is {device_type}; use 'sdpa'")
    return name


def make_attention(backend: str, context_len: int | None = None) -> tuple[Callable, Callable]:
    """(dense, varlen) functions with the signatures of flash_attn_func and flash_attn_varlen_func.

    Args:
        backend: a resolved one.
        context_len: longest document, in tokens, of a row that packs several; FLA's layers only know the row's length.
    """
    if backend == "flash":
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        return flash_attn_func, flash_attn_varlen_func
    packed = {"varlen": _varlen_attention, "sdpa": _grouped_sdpa, "flex": _FlexAttention()}[backend]

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Attention of q [B, Tq, H, D] over k, v [B, Tk, Hkv, D]; Tq queries are the last of Tk positions."""
        return _dense_sdpa(q, k, v, softmax_scale, _Window.of(causal, window_size))

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Attention within documents of q [Tq, H, D] over k, v [Tk, Hkv, D]."""
        window = _Window.of(causal, window_size)
        num_documents = len(cu_seqlens_q) - 1
        longest_q = _longest(max_seqlen_q, len(q), num_documents, context_len)
        longest_k = _longest(max_seqlen_k, len(k), num_documents, context_len)
        run = packed
        if backend == "varlen" and not _fits_flash(q, v):
            run = _grouped_sdpa
        return run(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, softmax_scale, window)

    return flash_attn_func, flash_attn_varlen_func


@dataclass(frozen=True)
class _Window:
    """Keys from `left` before to `right` after a query's own position; -1 is unlimited."""

    left: int
    right: int

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int, int]) -> _Window:
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


def _longest(max_seqlen: int, num_tokens: int, num_documents: int, context_len: int | None) -> int:
    if num_documents == 1:
        return num_tokens
    # FLA passes the whole row's length (or max_position_embeddings) for packed rows: an upper bound only.
    if max_seqlen >= num_tokens and context_len is not None:
        return min(num_tokens, context_len)
    return min(max_seqlen, num_tokens)


def _fits_flash(q: Tensor, v: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= 256


def _expand_kv_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads of x [..., Hkv, D] for grouped queries: query head i reads key head i // (H / Hkv)."""
    return x if x.shape[-2] == num_heads else x.repeat_interleave(num_heads // x.shape[-2], dim=-2)


def _dense_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: _Window) -> Tensor:
    num_heads, num_queries, num_keys = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = (_expand_kv_heads(x, num_heads).transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    if window.is_causal and num_queries == num_keys:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = window.mask(num_queries, num_keys, q.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return o.transpose(1, 2)


def _grouped_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    window: _Window,
) -> Tensor:
    """One dense call per group of documents whose lengths round up to the same power of two.

    Documents are padded at their ends, which a causal query never sees. Without causality, or with more keys than
    queries, only documents of equal lengths share a group, so that there is no padding. `longest_q` and `longest_k`
    are not needed: they stand here because the three packed forms have one signature.
    """
    bounds_q, bounds_k = (x.to("cpu", torch.int64) for x in (cu_seqlens_q, cu_seqlens_k))
    lengths_q, lengths_k = bounds_q.diff(), bounds_k.diff()
    pads = window.right == 0 and torch.equal(lengths_q, lengths_k)
    groups: dict[tuple[int, int], list[int]] = {}
    for document, pair in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        key = (1 << (pair[0] - 1).bit_length(), 0) if pads and pair[0] else pair
        groups.setdefault(key, []).append(document)
    rows, outputs = [], []
    for documents in groups.values():
        rows_q, valid = _group_rows(bounds_q[documents], lengths_q[documents])
        rows_k, _ = _group_rows(bounds_k[documents], lengths_k[documents])
        group_q = q[rows_q.to(q.device)]  # [documents, longest, H, D]
        group_k, group_v = (x[rows_k.to(q.device)] for x in (k, v))
        o = _dense_sdpa(group_q, group_k, group_v, scale, window)
        rows.append(rows_q[valid])
        outputs.append(o[valid.to(q.device)])
    order = torch.cat(rows).argsort().to(q.device)
    return torch.cat(outputs)[order]


def _group_rows(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Token rows [documents, longest] of documents and which of them are real; padding repeats the last token."""
    position = torch.arange(int(lengths.max()))
    valid = position < lengths[:, None]
    return starts[:, None] + torch.minimum(position, lengths[:, None] - 1), valid


def _varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    window: _Window,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    head_dim = v.shape[-1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    padding = -q.shape[-1] % 8  # the kernel takes multiples of 8
    q, k, v = (F.pad(x, (0, padding)) if padding else x for x in (q, k, v))
    # torch 2.11 has grouped queries without saying so; later releases want to be told.
    options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    o = varlen_attn(
        q,
        k,
        v,
        cu_seqlens_q.int(),
        cu_seqlens_k.int(),
        longest_q,
        longest_k,
        scale=scale,
        window_size=(window.left, window.right),
        **options,
    )
    return o[..., :head_dim]


class _FlexAttention:
    """FlexAttention with a document mask; all layers of a step share the mask of their cu_seqlens tensor."""

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._block_mask = None
        self._compiled: Callable | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        longest_q: int,
        longest_k: int,
        scale: float | None,
        window: _Window,
    ) -> Tensor:
        if cu_seqlens_q is not cu_seqlens_k:
            return _grouped_sdpa(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, scale, window)
        if self._compiled is None:
            from torch.nn.attention.flex_attention import flex_attention

            self._compiled = torch.compile(flex_attention, dynamic=False)
        num_heads = q.shape[1]
        q, k, v = (_expand_kv_heads(x, num_heads).transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
        o = self._compiled(q, k, v, block_mask=self._mask(cu_seqlens_q, q.shape[2], window), scale=scale)
        return o[0].transpose(0, 1)

    def _mask(self, cu_seqlens: Tensor, num_tokens: int, window: _Window):
        # Compared by identity, with the tensor kept alive: comparing values would wait for the device.
        if self._key is None or self._key[0] is not cu_seqlens or self._key[1:] != (num_tokens, window):
            self._key = (cu_seqlens, num_tokens, window)
            self._block_mask = _document_block_mask(cu_seqlens, num_tokens, window)
        return self._block_mask


def _document_block_mask(cu_seqlens: Tensor, num_tokens: int, window: _Window):
    from torch.nn.attention.flex_attention import create_block_mask

    position = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, position, right=True)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = document[query] == document[key]
        if window.right >= 0:
            seen = seen & (key - query <= window.right)
        if window.left >= 0:
            seen = seen & (query - key <= window.left)
        return seen

    return create_block_mask(visible, None, None, num_tokens, num_tokens, device=cu_seqlens.device)
