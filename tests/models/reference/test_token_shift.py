from __future__ import annotations

import pytest
import torch

from flame.errors import UserError
from flame.models.reference.token_shift import token_shift
from tests.models.reference.recurrences import CU_SEQLENS, assert_same_with_gradients, per_document


def make_inputs(bounds=CU_SEQLENS):
    torch.manual_seed(0)
    return {"x": torch.randn(bounds[-1], 5).double(), "cache": torch.randn(len(bounds) - 1, 5).double()}


def truth(bounds):
    def run(x, cache):
        return per_document(lambda before, row: (row["x"], before - row["x"]), {"x": x}, cache, list(bounds))

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_documents(dtype):
    def run(x, cache):
        y, last = token_shift(x[None], torch.tensor(CU_SEQLENS), cache, output_cache=True)
        return y[0], last

    assert_same_with_gradients(run, truth(CU_SEQLENS), make_inputs(), 1e-6, dtype)


def test_rows_are_documents():
    bounds = (0, 7, 14)

    def run(x, cache):
        y, last = token_shift(x.unflatten(0, (2, 7)), cache=cache, output_cache=True)
        return y.flatten(0, 1), last

    assert_same_with_gradients(run, truth(bounds), make_inputs(bounds), 1e-12, torch.float64)


def test_without_a_cache_a_document_starts_from_zero():
    x = make_inputs()["x"][None]
    y = token_shift(x, torch.tensor([0, 3, x.shape[1]]))
    assert torch.equal(y[:, [0, 3]], -x[:, [0, 3]])
    assert torch.equal(y[:, 1], x[:, 0] - x[:, 1])


def test_an_empty_document_keeps_its_cache():
    inputs = make_inputs((0, 0, 5, 5))
    y, last = token_shift(inputs["x"][None], torch.tensor([0, 0, 5, 5]), inputs["cache"], output_cache=True)
    assert torch.equal(last[[0, 2]], inputs["cache"][[0, 2]])
    assert torch.equal(last[1], inputs["x"][-1])
    assert torch.equal(y[0, 0], inputs["cache"][1] - inputs["x"][0])


def test_changing_a_document_leaves_the_others_bit_equal():
    start, end = CU_SEQLENS[3:5]
    others = torch.ones(CU_SEQLENS[-1], dtype=torch.bool)
    others[start:end] = False
    x = make_inputs()["x"].requires_grad_()
    changed = x.detach().index_fill(0, torch.arange(start, end), torch.nan).requires_grad_()
    outputs = [token_shift(rows[None], torch.tensor(CU_SEQLENS))[0] for rows in (x, changed)]
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(outputs[0][others], outputs[1][others])
    assert torch.equal(x.grad[others], changed.grad[others])


def test_a_cache_of_other_documents_is_refused():
    with pytest.raises(UserError, match="2 tokens for 1 documents"):
        token_shift(torch.zeros(1, 4, 5), cache=torch.zeros(2, 5))
