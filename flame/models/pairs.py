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


def own_block_pairs(lengths: torch.Tensor, block: int) -> float:
    """Number of causal pairs whose query and key lie in the same block of ``block`` tokens of a document."""
    whole, rest = lengths // block, lengths % block
    return float((whole * (block * (block + 1) // 2) + rest * (rest + 1) // 2).sum())


def earlier_blocks(lengths: torch.Tensor, block: int, most: int | None = None) -> float:
    """Blocks before a query's own, at most ``most`` of them, summed over the queries i: Σ min(⌊i/block⌋, most)."""
    whole = lengths // block
    reached = whole if most is None else whole.clamp(max=most)
    return float((block * reached * (reached - 1) // 2 + (lengths - block * reached) * reached).sum())


def ones_in_binary(lengths: torch.Tensor) -> float:
    """Ones in the binary digits of 0, 1, …, length − 1: the buckets that a Fenwick tree keeps of each prefix."""
    total = 0.0
    for digit in range(int(lengths.max()).bit_length()):
        half, period = 1 << digit, 2 << digit
        total += float((lengths // period * half + (lengths % period - half).clamp(min=0)).sum())
    return total
