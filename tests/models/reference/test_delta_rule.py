from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flame.errors import UserError
from flame.models.reference.delta_rule import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    decay_gate,
    fused_recurrent_gated_delta_rule,
)
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

# The relative errors that float64 and float32 arithmetic leave over chunks of 64 and some 170 tokens.


def make_inputs(bounds, num_heads=2, num_v_heads=2, head_dim=8, value_dim=6, decay="mild", seed=0):
    torch.manual_seed(seed)
    num_tokens = bounds[-1]
    inputs = {
        "q": torch.randn(num_tokens, num_heads, head_dim),
        "k": F.normalize(torch.randn(num_tokens, num_heads, head_dim), dim=-1),
        "v": torch.randn(num_tokens, num_v_heads, value_dim),
        "g": log_decays(decay, (num_tokens, num_v_heads)),
        "beta": torch.rand(num_tokens, num_v_heads),
        "state": torch.randn(len(bounds) - 1, num_v_heads, head_dim, value_dim),
    }
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds, scale):
    def run(q, k, v, g, beta, state):
        groups = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))
        return recurrences.delta_rule(q, k, v, g, beta, scale, state, list(bounds))

    return run


def chunked(bounds, **options):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)

    def run(q, k, v, g, beta, state):
        o, final = chunk_gated_delta_rule(
            *(x[None] for x in (q, k, v, g, beta)),
            initial_state=state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            **options,
        )
        return o[0], final

    return run


@DTYPES
@pytest.mark.parametrize("decay", ["none", "mild", "strong", "mixed"])
def test_packed_documents_follow_the_recurrence(decay, dtype):
    inputs = make_inputs(CU_SEQLENS, decay=decay)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS, 8**-0.5), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    bounds = (0, length)
    assert_same_with_gradients(
        chunked(bounds, scale=0.5), truth(bounds, 0.5), make_inputs(bounds), TOLERANCE[dtype], dtype
    )


@DTYPES
def test_more_value_heads_than_key_heads(dtype):
    inputs = make_inputs(CU_SEQLENS, num_heads=2, num_v_heads=6)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS, 8**-0.5), inputs, TOLERANCE[dtype], dtype)


@DTYPES
def test_value_first_states(dtype):
    def run(state, **inputs):
        o, final = chunked(CU_SEQLENS, state_v_first=True)(state=state.transpose(-1, -2), **inputs)
        return o, final.transpose(-1, -2)

    assert_same_with_gradients(run, truth(CU_SEQLENS, 8**-0.5), make_inputs(CU_SEQLENS), TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gate_beta_and_l2norm_inside_the_operator(allow_neg_eigval, dtype):
    """As the gated delta net layer calls it: raw gate input, beta logits, unnormalised queries and keys."""
    inputs = make_inputs(CU_SEQLENS)
    inputs["k"] = inputs["k"] * 3
    inputs["g"] = torch.randn_like(inputs["g"]) * 2
    inputs["beta"] = torch.randn_like(inputs["beta"])
    inputs["A_log"] = torch.tensor([-1.0, 3.0]).double()  # decays from mild to -60 a token
    inputs["dt_bias"] = torch.tensor([-2.0, 1.0]).double()

    def run(A_log, dt_bias, **rest):
        options = dict(
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=allow_neg_eigval,
            use_qk_l2norm_in_kernel=True,
        )
        return chunked(CU_SEQLENS, **options)(**rest)

    def expected(q, k, v, g, beta, state, A_log, dt_bias):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g = -A_log.exp() * torch.log1p((g + dt_bias).exp())
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        return truth(CU_SEQLENS, 8**-0.5)(q, k, v, g, beta, state)

    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


@DTYPES
def test_delta_rule_without_decay_on_a_batch(dtype):
    bounds = (0, 70, 140)
    inputs = make_inputs(bounds)
    del inputs["g"]

    def run(q, k, v, beta, state):
        rows = [x.view(2, 70, *x.shape[1:]) for x in (q, k, v, beta)]
        o, final = chunk_delta_rule(*rows, initial_state=state, output_final_state=True)
        return o.flatten(0, 1), final

    def expected(q, k, v, beta, state):
        return truth(bounds, 8**-0.5)(q, k, v, torch.zeros_like(beta), beta, state)

    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


def test_decoding_token_by_token_equals_the_whole_sequence():
    rows = {name: x.view(2, 20, *x.shape[1:]) for name, x in make_inputs((0, 20, 40)).items() if name != "state"}
    whole, final = chunk_gated_delta_rule(**rows, output_final_state=True)

    def step(token, state):
        return fused_recurrent_gated_delta_rule(**token, initial_state=state, output_final_state=True)

    decoded, state = decode(step, rows)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), ("q", "k", "v"))


def test_empty_documents_keep_their_state():
    bounds = (0, 0, 5, 5)
    inputs = make_inputs(bounds)
    _, final = chunked(bounds)(**inputs)
    assert torch.equal(final[[0, 2]], inputs["state"][[0, 2]])


def test_half_precision_computes_in_float32_and_returns_the_input_dtype():
    inputs = {name: x.bfloat16() for name, x in make_inputs(CU_SEQLENS).items()}
    o, final = chunked(CU_SEQLENS)(**inputs)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32


def test_decay_gate_is_finite_for_large_inputs():
    g = decay_gate(torch.tensor([-200.0, 0.0, 200.0]), torch.tensor(3.0), None)
    assert torch.isfinite(g).all()
    assert (g <= 0).all()


def test_what_is_not_there_is_refused():
    inputs = {name: x[None] for name, x in make_inputs((0, 4)).items() if name != "state"}
    with pytest.raises(UserError, match="context parallelism"):
        chunk_gated_delta_rule(**inputs, cp_context=object())
    with pytest.raises(UserError, match="use_beta_sigmoid_in_kernel"):
        chunk_gated_delta_rule(**inputs, allow_neg_eigval=True)
    with pytest.raises(UserError, match="multiple"):
        chunk_gated_delta_rule(**{**inputs, "v": inputs["v"][:, :, :1]})
    with pytest.raises(UserError, match="cu_seqlens must rise"):
        chunk_gated_delta_rule(**inputs, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(UserError, match="scalar decays"):
        fused_recurrent_gated_delta_rule(**inputs, gk=inputs["k"])
