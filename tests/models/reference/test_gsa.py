from __future__ import annotations

import pytest
import torch

from flame.errors import UserError
from flame.models.reference.gsa import chunk_gsa, fused_recurrent_gsa
from tests.models.reference import recurrences
from tests.models.reference.recurrences import (
    CU_SEQLENS,
    DTYPES,
    TOLERANCE,
    assert_nan_stays_in_its_document,
    assert_same_with_gradients,
    decode,
    log_decays,
)


def make_inputs(bounds, decay="mild", num_heads=2, num_kv_heads=2, head_dim=8, value_dim=6, num_slots=5):
    torch.manual_seed(0)
    num_tokens, slots = bounds[-1], (bounds[-1], num_kv_heads, num_slots)
    inputs = {
        "q": torch.randn(num_tokens, num_heads, head_dim),
        "k": torch.randn(num_tokens, num_kv_heads, head_dim),
        "v": torch.randn(num_tokens, num_kv_heads, value_dim),
        "s": torch.rand(slots),
        "g": log_decays(decay, slots),
        "keys": torch.randn(len(bounds) - 1, num_kv_heads, head_dim, num_slots),
        "values": torch.randn(len(bounds) - 1, num_kv_heads, num_slots, value_dim),
    }
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds, scale=8**-0.5):
    def run(q, k, v, s, g, keys, values):
        groups = q.shape[1] // k.shape[1]
        k, v, s, g = (x.repeat_interleave(groups, dim=1) for x in (k, v, s, g))
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        o, keys, values = recurrences.gated_slot_attention(q, k, v, s, g, scale, keys, values, list(bounds))
        return o, keys[:, ::groups], values[:, ::groups]

    return run


def chunked(bounds, **options):
    def run(keys, values, **tokens):
        rows = {name: x[None] for name, x in tokens.items()}
        packed = dict(initial_state=(keys, values), output_final_state=True, cu_seqlens=torch.tensor(bounds))
        o, (keys, values) = chunk_gsa(**rows, **packed, **options)
        return o[0], keys, values

    return run


@DTYPES
@pytest.mark.parametrize("decay", ["mild", "strong", "mixed"])
def test_packed_documents_follow_the_recurrence(decay, dtype):
    inputs = make_inputs(CU_SEQLENS, decay)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    run, expected = chunked((0, length), scale=1.0), truth((0, length), 1.0)
    assert_same_with_gradients(run, expected, make_inputs((0, length)), TOLERANCE[dtype], dtype)


@DTYPES
def test_more_query_heads_than_key_heads(dtype):
    inputs = make_inputs(CU_SEQLENS, num_heads=6)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


def test_decoding_token_by_token_equals_the_whole_sequence():
    inputs = make_inputs((0, 20, 40), num_heads=4)
    rows = {name: inputs[name].view(2, 20, *inputs[name].shape[1:]) for name in "qkvsg"}
    whole, final = chunk_gsa(**rows, output_final_state=True)

    def step(token, state):
        return fused_recurrent_gsa(**token, initial_state=state, output_final_state=True)

    decoded, state = decode(step, rows)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), "qkvsg")


def test_half_precision_computes_in_float32_and_returns_the_input_dtype():
    outputs = chunked(CU_SEQLENS)(**{name: x.bfloat16() for name, x in make_inputs(CU_SEQLENS).items()})
    assert [x.dtype for x in outputs] == [torch.bfloat16, torch.float32, torch.float32]


def test_no_final_state_unless_asked_for():
    rows = {name: x[None] for name, x in make_inputs((0, 4)).items() if len(name) == 1}
    assert chunk_gsa(**rows)[1] == (None, None)


def test_what_is_not_there_is_refused():
    rows = {name: x[None] for name, x in make_inputs((0, 4)).items() if len(name) == 1}
    with pytest.raises(UserError, match="forward in time"):
        fused_recurrent_gsa(**rows, reverse=True)
    with pytest.raises(UserError, match="forget gates"):
        chunk_gsa(**{**rows, "g": None})
    with pytest.raises(UserError, match="3 query heads is not a multiple of 2"):
        chunk_gsa(**{**rows, "q": torch.zeros(1, 4, 3, 8)})
