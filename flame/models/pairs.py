"""Closed forms for what attention computes over documents of given lengths; all take lengths in tokens, int [N]."""

from __future__ import annotations

import torch


def causal_pairs(lengths: torch.Tensor, window: int | None = None) -> float:
    """Number of (query, key) pairs with key ≤ query inside each document, at most ``window`` keys to a query."""
    head = lengths if window is None else lengths.clamp(max=window)
    pairs = head * (head + 1) // 2
    if window is not None:
        pairs = pairs + (lengths - head) * window
    return float(pairs.sum())


def own_block_pairs(lengths: torch.Tensor, block_size: int) -> float:
    """Number of causal pairs whose query and key lie in the same block of ``block_size`` tokens of a document."""
    whole, rest = lengths // block_size, lengths % block_size
    return float((whole * (block_size * (block_size + 1) // 2) + rest * (rest + 1) // 2).sum())


def earlier_blocks(lengths: torch.Tensor, block_size: int, max_blocks: int | None = None) -> float:
    """Blocks before a query's own, at most ``max_blocks`` of them, summed over the queries: Σ_i min(⌊i/size⌋, max)."""
    whole = lengths // block_size
    reached = whole if max_blocks is None else whole.clamp(max=max_blocks)
    return float((block_size * reached * (reached - 1) // 2 + (lengths - block_size * reached) * reached).sum())


def ones_in_binary(lengths: torch.Tensor) -> float:
    """Ones in the binary digits of 0, 1, …, length − 1: the buckets that a Fenwick tree keeps of each prefix."""
    total = 0.0
    for digit in range(int(lengths.max()).bit_length()):
        half, period = 1 << digit, 2 << digit
        total += float((lengths // period * half + (lengths % period - half).clamp(min=0)).sum())
    return total
