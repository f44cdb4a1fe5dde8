from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flame.errors import UserError
from flame.models.reference.generalized_delta_rule import (
    chunk_dplr_delta_rule,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_dplr_delta_rule,
)
from tests.models.reference import recurrences
from tests.models.reference.recurrences import (
    CU_SEQLENS,
    DTYPES,
    TOLERANCE,
    assert_nan_stays_in_its_document,
    assert_same_with_gradients,
    decode,
)

# The relative errors that float64 and float32 arithmetic leave over chunks of 64 and some 170 tokens.


def make_inputs(bounds, num_heads=2, head_dim=8, value_dim=6, decay="rwkv7"):
    torch.manual_seed(0)
    shape = (bounds[-1], num_heads, head_dim)
    log_decay = {
        "none": lambda: torch.zeros(shape),
        "rwkv7": lambda: -0.6065 * torch.rand(shape),
        "strong": lambda: -torch.rand(shape) * 30,  # a chunk's sum is near -1000
        "mixed": lambda: -torch.where(torch.rand(shape) < 0.1, 300.0, 0.01),
    }[decay]()
    removal = F.normalize(torch.randn(shape), dim=-1)
    inputs = {
        "q": torch.randn(shape),
        "k": torch.randn(shape),
        "v": torch.randn(*shape[:2], value_dim),
        "a": -removal,
        "b": removal * torch.rand(shape),
        "g": log_decay,
        "state": torch.randn(len(bounds) - 1, num_heads, head_dim, value_dim),
    }
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds, scale):
    def run(q, k, v, a, b, g, state):
        return recurrences.generalized_delta_rule(q, k, v, a, b, g, scale, state, list(bounds))

    return run


def chunked(bounds, **options):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)

    def run(state, **tensors):
        q, k, v, a, b, g = (tensors[name][None] for name in ("q", "k", "v", "a", "b", "g"))
        o, final = chunk_dplr_delta_rule(
            q, k, v, a, b, g, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, **options
        )
        return o[0], final

    return run


@DTYPES
@pytest.mark.parametrize("decay", ["none", "rwkv7", "strong", "mixed"])
def test_packed_documents_follow_the_recurrence(decay, dtype):
    inputs = make_inputs(CU_SEQLENS, decay=decay)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS, 8**-0.5), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    bounds = (0, length)
    run, inputs = chunked(bounds, scale=1.0), make_inputs(bounds)
    assert_same_with_gradients(run, truth(bounds, 1.0), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("chunk_size", [1, 2, 16])
def test_any_chunk_size_follows_the_recurrence(chunk_size, dtype):
    run = chunked(CU_SEQLENS, chunk_size=chunk_size)
    assert_same_with_gradients(run, truth(CU_SEQLENS, 8**-0.5), make_inputs(CU_SEQLENS), TOLERANCE[dtype], dtype)


@DTYPES
def test_rows_are_documents(dtype):
    bounds = (0, 70, 140)

    def run(state, **tensors):
        q, k, v, a, b, g = (tensors[name].unflatten(0, (2, 70)) for name in ("q", "k", "v", "a", "b", "g"))
        o, final = fused_recurrent_dplr_delta_rule(q, k, v, a, b, g, initial_state=state, output_final_state=True)
        return o.flatten(0, 1), final

    assert_same_with_gradients(run, truth(bounds, 8**-0.5), make_inputs(bounds), TOLERANCE[dtype], dtype)


def test_rwkv7s_form_of_the_rule():
    inputs = {name: x.unflatten(0, (2, 20)) for name, x in make_inputs((0, 40)).items() if name != "state"}
    q, k, v, a, g = (inputs[name] for name in ("q", "k", "v", "a", "g"))
    rate = torch.rand_like(a)
    o, final = fused_mul_recurrent_rwkv7(q, g, k, v, -a, rate, output_final_state=True)
    expected = chunk_dplr_delta_rule(q, k, v, a, -a * rate, g, scale=1.0, output_final_state=True)
    assert torch.equal(o, expected[0])
    assert torch.equal(final, expected[1])


def test_decoding_token_by_token_equals_the_whole_sequence():
    inputs = make_inputs((0, 40))
    rows = {name: inputs[name].unflatten(0, (2, 20)) for name in ("q", "k", "v", "a", "b", "g")}
    whole, final = chunk_dplr_delta_rule(*rows.values(), output_final_state=True)

    def step(token, state):
        return fused_recurrent_dplr_delta_rule(*token.values(), initial_state=state, output_final_state=True)

    decoded, state = decode(step, rows)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), "qkvabg")


def test_empty_documents_keep_their_state():
    bounds = (0, 0, 5, 5)
    inputs = make_inputs(bounds)
    _, final = chunked(bounds)(**inputs)
    assert torch.equal(final[[0, 2]], inputs["state"][[0, 2]])


def test_half_precision_computes_in_float32_and_returns_the_input_dtype():
    o, final = chunked(CU_SEQLENS)(**{name: x.bfloat16() for name, x in make_inputs(CU_SEQLENS).items()})
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32


def test_what_is_not_there_is_refused():
    inputs = [x[None] for name, x in make_inputs((0, 4)).items() if name != "state"]
    with pytest.raises(UserError, match="context parallelism"):
        chunk_dplr_delta_rule(*inputs, cp_context=object())
    with pytest.raises(UserError, match="forward in time"):
        fused_recurrent_dplr_delta_rule(*inputs, reverse=True)
