from __future__ import annotations

import itertools

import pytest
import torch

from flame.errors import UserError
from flame.models.reference import stickbreaking
from flame.models.reference.stickbreaking import parallel_stickbreaking_attn, stickbreaking_attention
from tests.models.reference.recurrences import CU_SEQLENS, DTYPES, assert_same_with_gradients

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def make_inputs(bounds, num_heads=2, num_kv_heads=2, size=1.0):
    torch.manual_seed(0)
    num_tokens = bounds[-1]
    return {
        "q": size * torch.randn(num_tokens, num_heads, 8).double(),
        "k": torch.randn(num_tokens, num_kv_heads, 8).double(),
        "v": torch.randn(num_tokens, num_kv_heads, 6).double(),
    }


def walk_back(q, k, v, bounds, scale, attend_current):
    """The definition, key by key: each takes its share of what is left of the query's stick."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    outputs, rests = [], []
    for start, end in itertools.pairwise(bounds):
        for i in range(start, end):
            left, o = 1 + 0 * q[i, :, 0], 0 * v[i] + 0 * k[i, :, :1]
            for j in range(i if attend_current else i - 1, start - 1, -1):
                share = (scale * (q[i] * k[j]).sum(-1)).sigmoid()
                o = o + (left * share)[:, None] * v[j]
                # 1 - sigmoid(z) as sigmoid(-z), so that the truth itself does not cancel
                left = left * (-scale * (q[i] * k[j]).sum(-1)).sigmoid()
            outputs.append(o)
            rests.append(left)
    return torch.stack(outputs), torch.stack(rests)


def packed(bounds, **options):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)

    def run(q, k, v):
        o, rem = stickbreaking_attention(q[None], k[None], v[None], cu_seqlens, **options)
        return o[0], rem[0]

    return run


@DTYPES
@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["mild", "saturated"])
def test_packed_documents_follow_the_definition(size, attend_current, dtype):
    bounds = (0, 1, 2, 9, 42, 43, 60)

    def truth(q, k, v):
        return walk_back(q, k, v, bounds, 0.5, attend_current)

    run = packed(bounds, scale=0.5, attend_current=attend_current)
    # Logits near 100 carry float32's rounding error of 1e-5 into the exponents.
    tolerance = TOLERANCE[dtype] * (10 if size > 1 else 1)
    assert_same_with_gradients(run, truth, make_inputs(bounds, size=size), tolerance, dtype)


@DTYPES
def test_more_query_heads_than_key_heads(dtype):
    bounds = (0, 20, 33)

    def truth(q, k, v):
        return walk_back(q, k, v, bounds, 8**-0.5, False)

    assert_same_with_gradients(packed(bounds), truth, make_inputs(bounds, 6, 2), TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 70])
def test_blocks_of_queries(length, dtype, monkeypatch):
    monkeypatch.setattr(stickbreaking, "_BLOCK", 16)
    bounds = (0, length)

    def truth(q, k, v):
        return walk_back(q, k, v, bounds, 8**-0.5, False)

    assert_same_with_gradients(packed(bounds), truth, make_inputs(bounds), TOLERANCE[dtype], dtype)


def test_rows_are_documents():
    rows = {name: x.view(2, 20, *x.shape[1:]) for name, x in make_inputs((0, 40)).items()}
    o, rem = parallel_stickbreaking_attn(**rows)
    packed_o, packed_rem = packed((0, 20, 40))(**make_inputs((0, 40)))
    torch.testing.assert_close(o.flatten(0, 1), packed_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rem.flatten(0, 1), packed_rem, rtol=1e-12, atol=1e-12)


def test_decoding_token_by_token_equals_the_whole_sequence():
    rows = {name: x.view(2, 20, *x.shape[1:]) for name, x in make_inputs((0, 40)).items()}
    whole, _ = stickbreaking_attention(**rows)
    for t in range(20):
        o, _ = stickbreaking_attention(rows["q"][:, t : t + 1], rows["k"][:, : t + 1], rows["v"][:, : t + 1])
        torch.testing.assert_close(o, whole[:, t : t + 1], rtol=1e-12, atol=1e-12)


def test_weights_and_rest_make_up_the_stick():
    inputs = make_inputs(CU_SEQLENS)
    inputs["v"] = torch.ones_like(inputs["v"])
    o, rem = packed(CU_SEQLENS)(**inputs)
    torch.testing.assert_close(o[..., 0] + rem, torch.ones_like(rem))
    assert torch.equal(o[0], torch.zeros_like(o[0]))  # nothing comes before a document's first token


def test_changing_a_document_leaves_the_others_bit_equal():
    inputs = {name: x.float().requires_grad_() for name, x in make_inputs(CU_SEQLENS).items()}
    start, end = CU_SEQLENS[3:5]
    changed = {name: x.detach().clone() for name, x in inputs.items()}
    for x in changed.values():
        x[start:end] = torch.nan
        x.requires_grad_()
    others = torch.ones(CU_SEQLENS[-1], dtype=torch.bool)
    others[start:end] = False
    o, o_changed = (packed(CU_SEQLENS)(**x)[0] for x in (inputs, changed))
    assert torch.equal(o[others], o_changed[others])
    o.square().sum().backward()
    o_changed.square().sum().backward()
    for name, x in inputs.items():
        assert torch.equal(x.grad[others], changed[name].grad[others]), name


def test_half_precision_returns_the_input_dtype():
    o, rem = packed(CU_SEQLENS)(**{name: x.bfloat16() for name, x in make_inputs(CU_SEQLENS).items()})
    assert o.dtype == rem.dtype == torch.bfloat16


def test_shapes_that_do_not_fit_are_refused():
    x = torch.zeros(1, 4, 3, 8)
    with pytest.raises(UserError, match="multiple"):
        stickbreaking_attention(x, x[:, :, :2], x[:, :, :2])
    with pytest.raises(UserError, match="takes q"):
        stickbreaking_attention(x, x[:, :2], x[:, :2])
    with pytest.raises(UserError, match="cu_seqlens must rise"):
        stickbreaking_attention(x, x, x, torch.tensor([0, 3]))
