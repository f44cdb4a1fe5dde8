from __future__ import annotations

import math

import pytest
import torch

from flame.errors import UserError
from flame.models.reference.retention import chunk_retention, fused_recurrent_retention, retention_decay
from tests.models.reference import recurrences
from tests.models.reference.recurrences import (
    CU_SEQLENS,
    DTYPES,
    TOLERANCE,
    assert_nan_stays_in_its_document,
    assert_same_with_gradients,
    decode,
)

NUM_HEADS = 3


def make_inputs(bounds, head_dim=8, value_dim=6):
    torch.manual_seed(0)
    shapes = {"q": head_dim, "k": head_dim, "v": value_dim}
    inputs = {name: torch.randn(bounds[-1], NUM_HEADS, size) for name, size in shapes.items()}
    inputs["state"] = torch.randn(len(bounds) - 1, NUM_HEADS, head_dim, value_dim)
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds, scale=8**-0.5):
    def run(q, k, v, state):
        log_decay = [math.log(1 - 2.0 ** (-5 - head)) for head in range(NUM_HEADS)]
        g = torch.tensor(log_decay, dtype=torch.float64)[:, None].expand_as(k)
        return recurrences.gated_linear_attention(q, k, v, g, scale, state, list(bounds))

    return run


def chunked(bounds, **options):
    def run(q, k, v, state):
        packed = dict(initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(bounds))
        o, final = chunk_retention(q[None], k[None], v[None], **packed, **options)
        return o[0], final

    return run


@DTYPES
def test_packed_documents_follow_the_recurrence(dtype):
    inputs = make_inputs(CU_SEQLENS)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    run, expected = chunked((0, length), scale=0.5), truth((0, length), 0.5)
    assert_same_with_gradients(run, expected, make_inputs((0, length)), TOLERANCE[dtype], dtype)


def test_decay_of_many_heads_stays_below_zero():
    assert (retention_decay(40) < 0).all()


def test_decoding_token_by_token_equals_the_whole_sequence():
    rows = {name: x.view(2, 20, *x.shape[1:]) for name, x in make_inputs((0, 20, 40)).items() if name != "state"}
    whole, final = chunk_retention(**rows, output_final_state=True)

    def step(token, state):
        return fused_recurrent_retention(**token, initial_state=state, output_final_state=True)

    decoded, state = decode(step, rows)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), "qkv")


def test_reverse_is_refused():
    rows = [x[None] for name, x in make_inputs((0, 4)).items() if name != "state"]
    with pytest.raises(UserError, match="forward in time"):
        fused_recurrent_retention(*rows, reverse=True)
