"""FlexAttention over packed documents (arXiv:2412.05496): torch's, with a mask that knows where they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flame.models.attention_kernels import Documents, Window, pad_heads

BLOCK_SIZE = 128  # tokens; FlexAttention skips or keeps blocks of so many queries and keys
MOST_SHAPES = 64
NARROWEST = 16  # heads of its kernels, whose widths are powers of two


class FlexAttention:
    """A packed form of attention (see `flame.models.attention_kernels`) with a mask that layers share.

    Args:
        compiler: backend of torch.compile; None runs it as plain operators, with all scores in memory.
    """

    def __init__(self, compiler: str | Callable | None = "inductor") -> None:
        self._compiler = compiler
        self._attend: Callable | None = None
        self._key: tuple | None = None
        self._block_mask: Any = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window
    ) -> Tensor:
        if self._attend is None:
            self._attend = self._compile()
        head_dim = v.shape[-1]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (pad_heads(x, _padding(x.shape[-1])).transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
        mask = self._mask(documents.bounds_q, q.shape[2], window)
        o = self._attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return o[0].transpose(0, 1)[..., :head_dim]

    def _compile(self) -> Callable:
        from torch.nn.attention.flex_attention import flex_attention

        if self._compiler is None:
            return flex_attention
        # Each shape and window is compiled once. Past its limit torch would go on without a kernel, and out of memory.
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, MOST_SHAPES)
        return torch.compile(flex_attention, dynamic=False, backend=self._compiler)

    def _mask(self, cu_seqlens: Tensor, num_tokens: int, window: Window) -> Any:
        # Compared by identity, with the tensor kept alive: comparing values would wait for the device.
        if self._key is None or self._key[0] is not cu_seqlens or self._key[1:] != (num_tokens, window):
            self._key = (cu_seqlens, num_tokens, window)
            self._block_mask = document_block_mask(cu_seqlens, num_tokens, window)
        return self._block_mask


def document_block_mask(cu_seqlens: Tensor, num_tokens: int, window: Window) -> Any:
    """What a query sees, as torch's BlockMask: keys of its document and in its window.

    Made from the documents at the ends of each block, where torch's own `create_block_mask` looks at every pair of
    tokens: 4 GiB for a row of 65,536. All shapes follow from `num_tokens`, whatever the number of documents.
    """
    from torch.nn.attention.flex_attention import BlockMask

    position = torch.arange(num_tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].long(), position, right=True).int()

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = document[query] == document[key]
        if window.right >= 0:
            seen = seen & (key - query <= window.right)
        if window.left >= 0:
            seen = seen & (query - key <= window.left)
        return seen

    some, every = _visible_blocks(document, num_tokens, window)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(every), BLOCK_SIZE, visible, seq_lengths=(num_tokens, num_tokens)
    )


def _visible_blocks(document: Tensor, num_tokens: int, window: Window) -> tuple[Tensor, Tensor]:
    """Whether queries of a block may see some key of a block, and whether all see all: bool [blocks, blocks] each."""
    first = torch.arange(0, num_tokens, BLOCK_SIZE, device=document.device)
    last = (first + BLOCK_SIZE - 1).clamp(max=num_tokens - 1)
    query_first, query_last, key_first, key_last = first[:, None], last[:, None], first, last
    first_document, last_document = document[first], document[last]
    some = (first_document[:, None] <= last_document) & (last_document[:, None] >= first_document)
    # Numbers of documents never fall: blocks whose ends agree are of one document.
    every = (first_document[:, None] == last_document) & (last_document[:, None] == first_document)
    every &= (first + BLOCK_SIZE <= num_tokens)[:, None] & (first + BLOCK_SIZE <= num_tokens)
    if window.right >= 0:
        some &= key_first - query_last <= window.right
        every &= key_last - query_first <= window.right
    if window.left >= 0:
        some &= query_first - key_last <= window.left
        every &= query_last - key_first <= window.left
    return some, every


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries sees, int32 [1, 1, n], and all, those first [1, 1, n, n]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], order[None, None]


def _padding(width: int) -> int:
    return max(NARROWEST, 1 << (width - 1).bit_length()) - width
