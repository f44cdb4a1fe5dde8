from __future__ import annotations

import itertools

import pytest
import torch

from flame.models.reference.rotary import rotary_embedding
from tests.models.reference.recurrences import DTYPES, TOLERANCE, assert_same_with_gradients

BOUNDS = (0, 1, 4, 9)
INV_FREQ = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)  # 6 of the 8 channels rotate


def tables():
    angles = torch.outer(torch.arange(32, dtype=torch.float64), INV_FREQ)
    return angles.cos(), angles.sin()


def rotate_token(x, position, interleaved):
    """x [H, 8] as complex numbers times exp(i position inv_freq)."""
    pairs = x[:, :6].unflatten(-1, (3, 2)) if interleaved else torch.stack([x[:, :3], x[:, 3:6]], dim=-1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * position * INV_FREQ)
    turned = torch.view_as_real(turned)
    turned = turned.flatten(-2) if interleaved else torch.cat([turned[..., 0], turned[..., 1]], dim=-1)
    return torch.cat([turned, x[:, 6:]], dim=-1)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 5, "per document"])
def test_packed_documents(offset, interleaved, dtype):
    offsets = torch.tensor([3, 0, 7]) if offset == "per document" else offset
    positions = [
        t - start + (int(offsets[n]) if torch.is_tensor(offsets) else offsets)
        for n, (start, end) in enumerate(itertools.pairwise(BOUNDS))
        for t in range(start, end)
    ]

    def run(x):
        cos, sin = (table.to(x.dtype) for table in tables())
        y = rotary_embedding(
            x[None], cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32)
        )
        return (y[0],)

    def expected(x):
        return (torch.stack([rotate_token(x[t], p, interleaved) for t, p in enumerate(positions)]),)

    torch.manual_seed(0)
    inputs = {"x": torch.randn(9, 2, 8, dtype=torch.float64)}
    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


def test_rows_of_a_batch_with_their_own_offsets():
    cos, sin = tables()
    x = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    y = rotary_embedding(x, cos, sin, seqlen_offsets=torch.tensor([0, 4]))
    torch.testing.assert_close(y[1, 2], rotate_token(x[1, 2], 6, interleaved=False))


def test_in_place():
    cos, sin = tables()
    x = torch.randn(1, 3, 1, 8, dtype=torch.float64)
    expected = rotary_embedding(x, cos, sin)
    assert rotary_embedding(x, cos, sin, inplace=True) is x
    assert torch.equal(x, expected)
