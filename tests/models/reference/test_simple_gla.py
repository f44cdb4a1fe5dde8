from __future__ import annotations

import pytest
import torch

from flame.models.reference.simple_gla import chunk_simple_gla
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


def make_inputs(bounds, decay="mild", num_heads=2, head_dim=8, value_dim=6):
    torch.manual_seed(0)
    shape = (bounds[-1], num_heads, head_dim)
    inputs = {
        "q": torch.randn(shape),
        "k": torch.randn(shape),
        "v": torch.randn(bounds[-1], num_heads, value_dim),
        "g": log_decays(decay, shape[:2]),
        "state": torch.randn(len(bounds) - 1, num_heads, head_dim, value_dim),
    }
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds, scale=8**-0.5):
    def run(q, k, v, state, g=0.0, g_gamma=0.0):
        g = (g + g_gamma)[..., None].expand_as(k)
        return recurrences.gated_linear_attention(q, k, v, g, scale, state, list(bounds))

    return run


def chunked(bounds, **options):
    def run(state, g_gamma=None, **tokens):
        rows = {name: x[None] for name, x in tokens.items()}
        packed = dict(initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(bounds))
        o, final = chunk_simple_gla(**rows, g_gamma=g_gamma, **packed, **options)
        return o[0], final

    return run


@DTYPES
@pytest.mark.parametrize("decay", ["none", "mild", "strong", "mixed"])
def test_packed_documents_follow_the_recurrence(decay, dtype):
    inputs = make_inputs(CU_SEQLENS, decay)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    run, expected = chunked((0, length), scale=0.5), truth((0, length), 0.5)
    assert_same_with_gradients(run, expected, make_inputs((0, length)), TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("with_g", [False, True])
def test_constant_decays_of_heads(with_g, dtype):
    inputs = make_inputs(CU_SEQLENS) | {"g_gamma": torch.tensor([-0.03, -2.0]).double()}
    if not with_g:
        del inputs["g"]
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
def test_value_first_states(dtype):
    def run(state, **tokens):
        o, final = chunked(CU_SEQLENS, state_v_first=True)(state=state.mT, **tokens)
        return o, final.mT

    assert_same_with_gradients(run, truth(CU_SEQLENS), make_inputs(CU_SEQLENS), TOLERANCE[dtype], dtype)


def test_decoding_token_by_token_equals_the_whole_sequence():
    rows = {name: x.view(2, 20, *x.shape[1:]) for name, x in make_inputs((0, 20, 40)).items() if name != "state"}
    whole, final = chunk_simple_gla(**rows, output_final_state=True, state_v_first=True)

    def step(token, state):
        return chunk_simple_gla(**token, initial_state=state, output_final_state=True, state_v_first=True)

    decoded, state = decode(step, rows)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), "qkvg")


def test_half_precision_computes_in_float32_and_returns_the_input_dtype():
    o, final = chunked(CU_SEQLENS)(**{name: x.bfloat16() for name, x in make_inputs(CU_SEQLENS).items()})
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
