"""flame.models.pairs: closed forms against counting."""

from __future__ import annotations

import pytest
import torch

from flame.models.pairs import causal_pairs, earlier_blocks, ones_in_binary, own_block_pairs

LENGTHS = [1, 5, 8, 20, 64]
QUERIES = [i for length in LENGTHS for i in range(length)]


@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_causal_pairs(window):
    assert causal_pairs(torch.tensor(LENGTHS), window) == sum(min(i + 1, window or i + 1) for i in QUERIES)


@pytest.mark.parametrize("block_size", [1, 3, 8, 100])
def test_own_block_pairs(block_size):
    assert own_block_pairs(torch.tensor(LENGTHS), block_size) == sum(i % block_size + 1 for i in QUERIES)


@pytest.mark.parametrize("block_size", [1, 3, 8, 100])
@pytest.mark.parametrize("max_blocks", [None, 0, 1, 2, 50])
def test_earlier_blocks(block_size, max_blocks):
    counted = sum(i // block_size if max_blocks is None else min(i // block_size, max_blocks) for i in QUERIES)
    assert earlier_blocks(torch.tensor(LENGTHS), block_size, max_blocks) == counted


def test_ones_in_binary():
    assert ones_in_binary(torch.tensor(LENGTHS)) == sum(i.bit_count() for i in QUERIES)
