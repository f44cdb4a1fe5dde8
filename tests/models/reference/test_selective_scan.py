from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flame.models.reference.selective_scan import selective_scan, selective_scan_step
from tests.models.reference.recurrences import (
    CU_SEQLENS,
    DTYPES,
    TOLERANCE,
    assert_nan_stays_in_its_document,
    assert_same_with_gradients,
    decode,
    per_document,
)

TOKENS = ("x", "dt", "B", "C", "z")


def make_inputs(bounds, decay="mild", num_channels=6, state_size=4):
    torch.manual_seed(0)
    num_tokens = bounds[-1]
    inputs = {name: torch.randn(num_tokens, num_channels) for name in ("x", "dt", "z")}
    inputs |= {name: torch.randn(num_tokens, state_size) for name in "BC"}
    if decay == "strong":
        inputs["dt"] = inputs["dt"] * 20 + 5
    elif decay == "weak":
        inputs["dt"] -= 12
    inputs["A"] = -torch.arange(1.0, state_size + 1) * (1 + 0.1 * torch.rand(num_channels, 1))
    inputs["D"], inputs["dt_bias"] = torch.randn(num_channels), torch.randn(num_channels)
    inputs["initial_state"] = torch.randn(len(bounds) - 1, num_channels, state_size)
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds):
    """The recurrence of the module's docstring, one token after the other."""

    def run(x, dt, A, B, C, D, z, dt_bias, initial_state):
        def step(h, token):
            step_size = F.softplus(token["dt"] + dt_bias)[:, None]
            h = torch.exp(step_size * A) * h + step_size * token["x"][:, None] * token["B"]
            return h, ((h * token["C"]).sum(-1) + D * token["x"]) * F.silu(token["z"])

        return per_document(step, {"x": x, "dt": dt, "B": B, "C": C, "z": z}, initial_state, list(bounds))

    return run


def chunked(bounds, scan=selective_scan, device="cpu"):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)

    def run(**inputs):
        rows = {name: x[None] if name in TOKENS else x for name, x in inputs.items()}
        y, final = scan(**rows, output_final_state=True, cu_seqlens=cu_seqlens)
        return y[0], final

    return run


@DTYPES
@pytest.mark.parametrize("decay", ["mild", "strong", "weak"])
def test_packed_documents_follow_the_recurrence(decay, dtype):
    inputs = make_inputs(CU_SEQLENS, decay)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17, 130])
def test_any_length_follows_the_recurrence(length, dtype):
    bounds = (0, length)
    assert_same_with_gradients(chunked(bounds), truth(bounds), make_inputs(bounds), TOLERANCE[dtype], dtype)


def test_rows_without_bounds_are_documents():
    inputs = make_inputs((0, 20, 40))
    rows = {name: x.unflatten(0, (2, 20)) if name in TOKENS else x for name, x in inputs.items()}
    y, final = selective_scan(**rows, output_final_state=True)
    packed, packed_final = chunked((0, 20, 40))(**inputs)
    torch.testing.assert_close(y.flatten(0, 1), packed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, packed_final, rtol=1e-12, atol=1e-12)


def test_an_empty_document_keeps_its_state():
    inputs = make_inputs((0, 5, 5, 9))
    _, final = chunked((0, 5, 5, 9))(**inputs)
    assert torch.equal(final[1], inputs["initial_state"][1])


def test_no_skip_gate_bias_or_state():
    bounds = (0, 30)
    inputs = {name: x for name, x in make_inputs(bounds).items() if name in ("x", "dt", "A", "B", "C")}

    def plain(x, dt, A, B, C):
        zeros = x.new_zeros(x.shape[1])
        # silu(z) = 1 at this z
        z = torch.full_like(x, 1.2784645427610738)
        return truth(bounds)(x, dt, A, B, C, zeros, z, zeros, A.new_zeros(1, *A.shape))

    assert_same_with_gradients(chunked(bounds), plain, inputs, 1e-9, torch.float64)


def test_decoding_token_by_token_equals_the_whole_sequence():
    inputs = make_inputs((0, 20, 40))
    tokens = {name: inputs.pop(name).unflatten(0, (2, 20)) for name in TOKENS}
    whole, final = selective_scan(**tokens, **inputs, output_final_state=True)
    start = inputs.pop("initial_state")
    decoded, state = decode(
        lambda token, state: selective_scan_step(**token, **inputs, initial_state=state), tokens, start
    )
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), TOKENS)


def test_bfloat16_inputs_are_computed_in_float32():
    inputs = {name: x.bfloat16() for name, x in make_inputs((0, 70)).items()}
    y, final = chunked((0, 70))(**inputs)
    expected, expected_final = chunked((0, 70))(**{name: x.float() for name, x in inputs.items()})
    assert y.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert torch.equal(y, expected.bfloat16()) and torch.equal(final, expected_final)
