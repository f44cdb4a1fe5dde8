from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flame.errors import UserError
from flame.models.reference.kda import channel_gate, chunk_kda, fused_recurrent_kda
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


def make_inputs(bounds, num_heads=2, num_v_heads=2, head_dim=8, value_dim=6, decay="mild"):
    torch.manual_seed(0)
    num_tokens = bounds[-1]
    channels = (num_tokens, num_v_heads, head_dim)
    inputs = {
        "q": torch.randn(num_tokens, num_heads, head_dim),
        "k": F.normalize(torch.randn(num_tokens, num_heads, head_dim), dim=-1),
        "v": torch.randn(num_tokens, num_v_heads, value_dim),
        "g": log_decays(decay, channels),
        "beta": torch.rand(num_tokens, num_v_heads),
        "state": torch.randn(len(bounds) - 1, num_v_heads, head_dim, value_dim),
    }
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds, scale=8**-0.5):
    def run(q, k, v, g, beta, state):
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], dim=1) for x in (q, k))
        return recurrences.delta_rule(q, k, v, g, beta, scale, state, list(bounds))

    return run


def chunked(bounds, **options):
    def run(state, **tokens):
        rows = {name: x[None] for name, x in tokens.items()}
        packed = dict(initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(bounds))
        o, final = chunk_kda(**rows, **packed, **options)
        return o[0], final

    return run


@DTYPES
@pytest.mark.parametrize("decay", ["none", "mild", "strong", "mixed"])
def test_packed_documents_follow_the_recurrence(decay, dtype):
    inputs = make_inputs(CU_SEQLENS, decay=decay)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    run, expected = chunked((0, length), scale=0.5), truth((0, length), 0.5)
    assert_same_with_gradients(run, expected, make_inputs((0, length)), TOLERANCE[dtype], dtype)


@DTYPES
def test_more_value_heads_than_key_heads(dtype):
    inputs = make_inputs(CU_SEQLENS, num_heads=2, num_v_heads=6)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
def test_value_first_states(dtype):
    def run(state, **tokens):
        o, final = chunked(CU_SEQLENS, state_v_first=True)(state=state.mT, **tokens)
        return o, final.mT

    assert_same_with_gradients(run, truth(CU_SEQLENS), make_inputs(CU_SEQLENS), TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gate_beta_and_l2norm_inside_the_operator(allow_neg_eigval, lower_bound, dtype):
    """As the layer calls it: raw gate input, beta logits, unnormalised queries and keys."""
    inputs = make_inputs(CU_SEQLENS)
    inputs["k"] = inputs["k"] * 3
    inputs["g"] = torch.randn_like(inputs["g"]) * 2
    inputs["beta"] = torch.randn_like(inputs["beta"])
    inputs["A_log"] = torch.tensor([-1.0, 3.0]).double()  # decays from mild to -60 a token
    inputs["dt_bias"] = torch.linspace(-2, 1, 16).double()

    def run(A_log, dt_bias, **rest):
        gate = dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
        beta = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow_neg_eigval)
        return chunked(CU_SEQLENS, use_qk_l2norm_in_kernel=True, **gate, **beta)(**rest)

    def expected(q, k, v, g, beta, state, A_log, dt_bias):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        x, rate = g + dt_bias.view(2, 8), A_log.exp()[:, None]
        g = -rate * torch.log1p(x.exp()) if lower_bound is None else lower_bound / (1 + (-rate * x).exp())
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        return truth(CU_SEQLENS)(q, k, v, g, beta, state)

    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


def test_decoding_token_by_token_equals_the_whole_sequence():
    rows = {name: x.view(2, 20, *x.shape[1:]) for name, x in make_inputs((0, 20, 40)).items() if name != "state"}
    whole, final = chunk_kda(**rows, output_final_state=True, state_v_first=True)

    def step(token, state):
        return fused_recurrent_kda(**token, initial_state=state, output_final_state=True, state_v_first=True)

    decoded, state = decode(step, rows)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), ("q", "k", "v", "g", "beta"))


def test_half_precision_computes_in_float32_and_returns_the_input_dtype():
    o, final = chunked(CU_SEQLENS)(**{name: x.bfloat16() for name, x in make_inputs(CU_SEQLENS).items()})
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)


def test_gates_are_finite_for_large_inputs():
    x = torch.tensor([[-200.0, 0.0, 200.0]])
    for lower_bound in (None, -5.0):
        g = channel_gate(x, torch.tensor([3.0]), None, lower_bound)
        assert torch.isfinite(g).all()
        assert (g <= 0).all()
    assert torch.equal(channel_gate(x, None, None, -5.0), -5 * x.sigmoid())


def test_what_is_not_there_is_refused():
    rows = {name: x[None] for name, x in make_inputs((0, 4)).items() if name != "state"}
    with pytest.raises(UserError, match="does not have cp_context"):
        chunk_kda(**rows, cp_context=object())
    with pytest.raises(UserError, match="use_beta_sigmoid_in_kernel"):
        chunk_kda(**rows, allow_neg_eigval=True)
    with pytest.raises(UserError, match="multiple"):
        chunk_kda(**{**rows, "v": rows["v"][:, :, :1]})
    with pytest.raises(UserError, match="A_log or lower_bound"):
        chunk_kda(**rows, use_gate_in_kernel=True)
