from __future__ import annotations

import pytest
import torch

from flame.models.reference.simple_gla import chunk_simple_gla
from flame.models.ssd import ssd, ssd_step
from tests.models.reference.recurrences import (
    CU_SEQLENS,
    TOLERANCE,
    assert_nan_stays_in_its_document,
    assert_same_with_gradients,
    decode,
    per_document,
)

TOKENS = ("x", "dt", "B", "C")
NUM_HEADS = 4


def make_inputs(bounds, decay="mild", num_groups=2, head_dim=3, state_size=5):
    torch.manual_seed(0)
    num_tokens, num_documents = bounds[-1], len(bounds) - 1
    inputs = {
        "x": torch.randn(num_tokens, NUM_HEADS, head_dim),
        "dt": torch.rand(num_tokens, NUM_HEADS) * {"mild": 0.1, "strong": 20}[decay],
        "A": -1 - torch.rand(NUM_HEADS) * 15,
        "B": torch.randn(num_tokens, num_groups, state_size),
        "C": torch.randn(num_tokens, num_groups, state_size),
        "initial_state": torch.randn(num_documents, NUM_HEADS, state_size, head_dim),
    }
    return {name: x.double() for name, x in inputs.items()}


def truth(bounds):
    """The recurrence of the module's docstring, one token after the other."""

    def run(x, dt, A, B, C, initial_state):
        group = torch.arange(NUM_HEADS) // (NUM_HEADS // B.shape[1])

        def step(state, token):
            written = torch.einsum("hn,hp->hnp", token["B"][group], token["dt"][:, None] * token["x"])
            state = torch.exp(token["dt"] * A)[:, None, None] * state + written
            return state, torch.einsum("hnp,hn->hp", state, token["C"][group])

        return per_document(step, {"x": x, "dt": dt, "B": B, "C": C}, initial_state, list(bounds))

    return run


def chunked(bounds):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)

    def run(**inputs):
        rows = {name: x[None] if name in TOKENS else x for name, x in inputs.items()}
        y, final = ssd(**rows, linear_attention=chunk_simple_gla, output_final_state=True, cu_seqlens=cu_seqlens)
        return y[0], final

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("decay", ["mild", "strong"])
def test_packed_documents_follow_the_recurrence(decay, num_groups, dtype):
    inputs = make_inputs(CU_SEQLENS, decay, num_groups)
    assert_same_with_gradients(chunked(CU_SEQLENS), truth(CU_SEQLENS), inputs, TOLERANCE[dtype], dtype)


def test_decoding_token_by_token_equals_the_whole_sequence():
    inputs = make_inputs((0, 20, 40))
    tokens = {name: inputs[name].unflatten(0, (2, 20)) for name in TOKENS}
    A, start = inputs["A"], inputs["initial_state"]
    options = dict(linear_attention=chunk_simple_gla, output_final_state=True)
    whole, final = ssd(**tokens, A=A, initial_state=start, **options)
    decoded, state = decode(lambda token, state: ssd_step(**token, A=A, initial_state=state), tokens, start)
    torch.testing.assert_close(decoded, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_nan_in_a_document_leaves_the_others_bit_equal():
    assert_nan_stays_in_its_document(chunked(CU_SEQLENS), make_inputs(CU_SEQLENS), TOKENS)


def test_what_is_repeated_for_every_head_is_not_kept_for_the_backward_pass():
    inputs = {name: x[None] if name in TOKENS else x for name, x in make_inputs((0, 64), num_groups=1).items()}
    inputs = {name: x.requires_grad_() for name, x in inputs.items() if name != "initial_state"}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ssd(**inputs, linear_attention=chunk_simple_gla)
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in inputs.values())
