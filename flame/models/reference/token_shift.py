"""Token shift (RWKV): the difference between each token's predecessor and the token itself."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.reference.packing import document_lengths


def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y_t = x_{t-1} - x_t within each document, where x_{-1} is the cache's (0 without one).

    Args:
        x: [B, T, D].
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        cache: [N, D], the last token before each document.
        output_cache: also return the last token of each document (an empty one's stays).
        chunk_indices: FLA's form of `cu_seqlens`, not needed here.

    Returns:
        y [B, T, D] in x's dtype, and with `output_cache` the new cache [N, D].
    """
    lengths = document_lengths(*x.shape[:2], cu_seqlens)
    if cache is None:
        cache = x.new_zeros(len(lengths), x.shape[-1])
    elif cache.shape[0] != len(lengths):
        raise UserError(f"cache holds {cache.shape[0]} tokens for {len(lengths)} documents")
    cache, filled = cache.to(x.dtype), lengths > 0
    rows, ends = x.flatten(0, 1), lengths.cumsum(0)
    documents, last = filled.nonzero()[:, 0].to(x.device), (ends - 1)[filled].to(x.device)
    first = (ends - lengths)[filled].to(x.device)
    # A copy, not a mask: a neighbour's NaN times 0 would be NaN.
    before = F.pad(rows, (0, 0, 1, 0))[:-1].index_copy(0, first, cache.index_select(0, documents))
    y = before.view_as(x) - x
    return (y, cache.index_copy(0, documents, rows.index_select(0, last))) if output_cache else y
