from __future__ import annotations

import pytest
import torch

from flame.errors import UserError
from flame.models.reference.gla import chunk_gla, fused_recurrent_gla
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
        "g": log_decays(decay, shape),
        "state": torch.randn(len(bounds) - 1, num_heads, head_dim, value_dim),
    }
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds, scale=8**-0.5):
    return lambda q, k, v, g, state: recurrences.gated_linear_attention(q, k, v, g, scale, state, list(bounds))


def chunked(bounds, **options):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)

    def run(q, k, v, g, state):
        o, final = chunk_gla(
            *(x[None] for x in (q, k, v, g)),
            initial_state=state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            **options,
        )
        return o[0], final

    return run


@DTYPES
@pytest.mark.parametrize("decay", ["mild", "strong", "mixed"])
def test_packed_documents_follow_the_recurrence(decay, dtype):
    inputs = make_inputs(CU_SEQLENS, decay)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    bounds = (0, length)
    assert_same_with_gradients(
        chunked(bounds, scale=0.5), truth(bounds, 0.5), make_inputs(bounds), TOLERANCE[dtype], dtype
    )


def test_a_chunk_whose_decay_overflows_exp_is_right():
    """exp(-G) is infinite in float32 past 88: the chunk's sum here is -192 for every channel."""
    inputs = make_inputs((0, 64))
    inputs["g"] = torch.full_like(inputs["g"], -3.0)
    assert_same_with_gradients(chunked((0, 64)), truth((0, 64)), inputs, 1e-5, torch.float32)


def test_decoding_token_by_token_equals_the_whole_sequence():
    rows = {name: x.view(2, 20, *x.shape[1:]) for name, x in make_inputs((0, 20, 40)).items() if name != "state"}
    whole, final = chunk_gla(**rows, output_final_state=True, state_v_first=True)

    def step(token, state):
        gk = token.pop("g")
        return fused_recurrent_gla(**token, gk=gk, initial_state=state, output_final_state=True, state_v_first=True)

    decoded, state = decode(step, rows)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), "qkvg")


@DTYPES
@pytest.mark.parametrize("channels", ["values", "keys and values"])
@pytest.mark.parametrize("decay", ["mild", "strong", "mixed"])
def test_decays_of_value_channels(decay, channels, dtype):
    inputs = make_inputs(CU_SEQLENS, decay)
    inputs["gv"] = make_inputs(CU_SEQLENS, decay, head_dim=6)["g"].flip(0)
    if channels == "values":
        del inputs["g"]

    def run(q, k, v, state, gv, g=None):
        options = dict(initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(CU_SEQLENS))
        rows = {name: x if x is None else x[None] for name, x in dict(q=q, k=k, v=v, gk=g, gv=gv).items()}
        o, final = fused_recurrent_gla(**rows, **options)
        return o[0], final

    def expected(q, k, v, state, gv, g=None):
        g = torch.zeros_like(k) if g is None else g
        return recurrences.gated_linear_attention(q, k, v, g, 8**-0.5, state, list(CU_SEQLENS), gv)

    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


def test_what_is_not_there_is_refused():
    rows = [x[None] for name, x in make_inputs((0, 4)).items() if name in "qkv"]
    with pytest.raises(UserError, match="forward in time"):
        fused_recurrent_gla(*rows, reverse=True)
    with pytest.raises(UserError, match="2 states for 1 documents"):
        chunk_gla(*rows, None, initial_state=torch.zeros(2, 2, 8, 6))
