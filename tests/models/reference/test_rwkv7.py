"""RWKV-7's element-wise operators against their definitions, written out token by token and channel by channel."""

from __future__ import annotations

import pytest
import torch

from flame.models.reference.rwkv7 import fused_addcmul_rwkv7, fused_k_rwkv7, gate_output_correction
from tests.models.reference.recurrences import assert_same_with_gradients

SHAPE = (2, 5, 12)  # [B, T, D], three heads of four channels
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float64", "float32"])


def draw(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@DTYPES
def test_mixtures_with_the_predecessor(dtype):
    names = ["x", "delta", "xr", "xw", "xk", "xv", "xa", "xg"]
    inputs = dict(zip(names, draw(SHAPE, SHAPE, *[(1, 1, 12)] * 6), strict=True))

    def truth(x, delta, **mixes):
        return tuple(x + delta * mix for mix in mixes.values())

    def run(x, delta, **mixes):
        return fused_addcmul_rwkv7(x, delta, **mixes)

    assert_same_with_gradients(run, truth, inputs, TOLERANCE[dtype], dtype)
    assert fused_addcmul_rwkv7(*list(inputs.values())[:7])[5] is None


@DTYPES
def test_written_key(dtype):
    inputs = dict(zip(["k", "a", "ka"], draw(SHAPE, SHAPE, (12,)), strict=True))
    assert_same_with_gradients(
        lambda **x: (fused_k_rwkv7(**x),),
        lambda k, a, ka: (k + k * (a - 1) * ka,),
        inputs,
        TOLERANCE[dtype],
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("value_dim", [4, 8])
def test_bonus_and_gate(value_dim, dtype):
    heads, values = (*SHAPE[:2], 3, 4), (*SHAPE[:2], 3, value_dim)
    flat = (*SHAPE[:2], 3 * value_dim)
    inputs = dict(zip(["o", "r", "k", "r_k", "v", "g"], draw(flat, heads, heads, (3, 4), values, flat), strict=True))

    def truth(o, r, k, r_k, v, g):
        bonus = torch.einsum("bthk,bthk,hk,bthv->bthv", r, k, r_k, v).reshape(o.shape)
        return ((o + bonus) * g,)

    def run(**x):
        return (gate_output_correction(**x),)

    assert_same_with_gradients(run, truth, inputs, TOLERANCE[dtype], dtype)


def test_half_precision_returns_the_input_dtype():
    o, k = (x.bfloat16() for x in draw(SHAPE, (*SHAPE[:2], 3, 4)))
    assert gate_output_correction(o, k, k, k[0, 0], k, o).dtype == torch.bfloat16
    assert fused_k_rwkv7(o, o, o[0, 0].float()).dtype == torch.bfloat16
    assert fused_addcmul_rwkv7(o, o, *[o[:1, :1].float()] * 5)[0].dtype == torch.bfloat16
