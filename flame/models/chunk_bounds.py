"""Chunks of packed documents, counted on the host.

FLA's operators count the chunks of a row's documents on the device and then wait for the count, gated linear attention
three times a layer: the device has nothing to do meanwhile, and the host cannot run ahead of it. The bounds of flame's
batches are known on the host (flame/host_copy.py). These functions stand in for FLA's of the same names; bounds that
only the device knows are left to FLA's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flame.host_copy import HostCopy, host_copy, send

# FLA module, function, name of the stand-in's maker here.
REPLACED = (
    ("fla.ops.utils.index", "prepare_chunk_indices", "make_chunk_indices"),
    ("fla.ops.utils.index", "prepare_chunk_offsets", "make_chunk_offsets"),
    ("fla.ops.utils.index", "get_max_num_splits", "make_max_num_splits"),
    ("fla.modules.token_shift", "prepare_maxlens", "make_maxlens"),
)


class ChunkOffsets(Tensor):
    """Offsets on a device, int64 [N + 1], whose last one, the number of chunks, is read without waiting."""

    num_chunks: Tensor | None = None  # on the CPU, a scalar; None for what is computed from offsets

    def __getitem__(self, index: Any) -> Tensor:
        is_last = isinstance(index, int) and index == -1
        return self.num_chunks if is_last and self.num_chunks is not None else super().__getitem__(index)


def make_chunk_indices(original: Callable) -> Callable:
    """(document, chunk in the document) of each chunk: [NT, 2], of the bounds' type and device."""

    def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
        known = host_copy(cu_seqlens)
        if known is None:
            return original(cu_seqlens, chunk_size, cu_seqlens_cpu)

        def compute() -> Tensor:
            counts = _chunk_counts(known, chunk_size)
            document = torch.repeat_interleave(torch.arange(len(counts)), counts)
            first = counts.cumsum(0) - counts  # chunk of each document
            chunk = torch.arange(len(document)) - first[document]
            return send(torch.stack([document, chunk], 1).to(cu_seqlens.dtype), cu_seqlens.device)

        return known.once(("indices", chunk_size), compute)

    return prepare_chunk_indices


def make_chunk_offsets(original: Callable) -> Callable:
    """Chunks before each document and, last, in all of them: int64 [N + 1]."""

    def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
        known = host_copy(cu_seqlens)
        if known is None:
            return original(cu_seqlens, chunk_size)

        def compute() -> Tensor:
            counts = _chunk_counts(known, chunk_size)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            result = send(offsets, cu_seqlens.device).as_subclass(ChunkOffsets)
            result.num_chunks = offsets[-1]
            return result

        return known.once(("offsets", chunk_size), compute)

    return prepare_chunk_offsets


def make_max_num_splits(original: Callable) -> Callable:
    """Chunks of the longest document."""

    def get_max_num_splits(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> int:
        known = host_copy(cu_seqlens)
        if known is None:
            return original(cu_seqlens, chunk_size, cu_seqlens_cpu)
        return known.once(("splits", chunk_size), lambda: int(_chunk_counts(known, chunk_size).max()))

    return get_max_num_splits


def make_maxlens(original: Callable) -> Callable:
    """Tokens of the longest document."""

    def prepare_maxlens(cu_seqlens: Tensor) -> int:
        known = host_copy(cu_seqlens)
        if known is None:
            return original(cu_seqlens)
        return known.once("longest", lambda: int(known.values.diff().max()))

    return prepare_maxlens


def longest_first(cu_seqlens: Tensor) -> Tensor:
    """The documents by length, int32 [N]."""

    def by_length(bounds: Tensor) -> Tensor:
        return bounds.diff().argsort(descending=True, stable=True).int()

    known = host_copy(cu_seqlens)
    if known is None:
        return by_length(cu_seqlens)
    return known.once("longest first", lambda: send(by_length(known.values), cu_seqlens.device))


def _chunk_counts(known: HostCopy, chunk_size: int) -> Tensor:
    """Chunks of each document, int64 [N]; the last chunk of each may be short."""
    return (known.values.long().diff() + chunk_size - 1) // chunk_size
