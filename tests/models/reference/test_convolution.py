from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flame.errors import UserError
from flame.models.reference.convolution import causal_conv1d, causal_conv1d_update
from tests.models.reference.recurrences import CU_SEQLENS, DTYPES, TOLERANCE, assert_same_with_gradients


def make_inputs(bounds=CU_SEQLENS, width=4, channels=5):
    torch.manual_seed(0)
    shapes = {
        "x": (bounds[-1], channels),
        "weight": (channels, width),
        "bias": (channels,),
        "residual": (bounds[-1], channels),
        "state": (len(bounds) - 1, channels, width),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def token_by_token(x, weight, bias, residual, state, bounds=CU_SEQLENS):
    outputs, finals = [], []
    for window, start, end in zip(state, bounds, bounds[1:], strict=False):
        for t in range(start, end):
            window = torch.cat([window[:, 1:], x[t][:, None]], dim=1)
            outputs.append(F.silu((window * weight).sum(1) + bias) + residual[t])
        finals.append(window)
    return torch.stack(outputs), torch.stack(finals)


@DTYPES
def test_packed_documents_with_states(dtype):
    def run(x, weight, bias, residual, state):
        y, final = causal_conv1d(
            x[None], weight, bias, residual[None], state, True, "silu", cu_seqlens=torch.tensor(CU_SEQLENS)
        )
        return y[0], final

    assert_same_with_gradients(run, token_by_token, make_inputs(), TOLERANCE[dtype], dtype)


@DTYPES
def test_batch_with_states(dtype):
    bounds = (0, 3, 6)

    def run(x, weight, bias, residual, state):
        y, final = causal_conv1d(x.view(2, 3, -1), weight, bias, residual.view(2, 3, -1), state, True, "swish")
        return y.flatten(0, 1), final

    def expected(**inputs):
        return token_by_token(**inputs, bounds=bounds)

    assert_same_with_gradients(run, expected, make_inputs(bounds), TOLERANCE[dtype], dtype)


def test_documents_start_from_zeros_and_plain_convolution_agrees():
    x, weight = torch.randn(1, 10, 3), torch.randn(3, 4)
    y, state = causal_conv1d(x, weight)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], groups=3).transpose(1, 2)
    torch.testing.assert_close(y, expected)
    assert state is None
    packed, _ = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 4, 10]))
    alone, _ = causal_conv1d(x[:, 4:], weight)
    torch.testing.assert_close(packed[:, 4:], alone)


def test_decoding_steps_equal_the_whole_sequence():
    inputs = make_inputs((0, 6, 12))
    x, weight, bias, residual = (inputs[name] for name in ("x", "weight", "bias", "residual"))
    x, residual = x.view(2, 6, -1), residual.view(2, 6, -1)
    whole, final = causal_conv1d(x, weight, bias, residual, output_final_state=True, activation="silu")
    cache = torch.zeros_like(final)
    for t in range(6):
        y, returned = causal_conv1d_update(x[:, t : t + 1], cache, residual[:, t : t + 1], weight, bias, "silu")
        torch.testing.assert_close(y, whole[:, t : t + 1])
    assert returned is cache
    torch.testing.assert_close(cache, final)


def test_changing_a_document_leaves_the_others_bit_equal():
    inputs = make_inputs()
    x, weight = inputs["x"].float()[None], inputs["weight"].float()
    start, end = CU_SEQLENS[3:5]
    changed = x.clone()
    changed[:, start:end] = torch.nan
    y, y_changed = (causal_conv1d(z, weight, cu_seqlens=torch.tensor(CU_SEQLENS))[0] for z in (x, changed))
    assert torch.equal(y[:, :start], y_changed[:, :start])
    assert torch.equal(y[:, end:], y_changed[:, end:])


def test_what_is_not_there_is_refused():
    x, weight = torch.randn(1, 4, 3), torch.randn(3, 4)
    with pytest.raises(UserError, match="silu, swish or none, got 'gelu'"):
        causal_conv1d(x, weight, activation="gelu")
    with pytest.raises(UserError, match="context parallelism"):
        causal_conv1d(x, weight, cp_context=object())
    with pytest.raises(UserError, match="without weight"):
        causal_conv1d(x)
