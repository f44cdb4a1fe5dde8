from __future__ import annotations

import pytest
import torch

from flame.models.reference.attnres import fused_attnres
from tests.models.reference.recurrences import assert_same_with_gradients


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_mixture_of_residuals(dtype, tolerance):
    def run(query, a, b, weight, output_weight):
        return fused_attnres(query, [a, b], weight, output_weight, scale=0.7, return_weights=True)

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def expected(query, a, b, weight, output_weight):
        scores = torch.stack([(rms(x, weight) * query[:, 0]).sum(-1) * 0.7 for x in (a, b)])
        weights = scores.exp() / scores.exp().sum(0)
        return rms(weights[0, ..., None] * a + weights[1, ..., None] * b, output_weight), weights

    torch.manual_seed(0)
    shapes = {"query": (6, 1), "a": (2, 3, 6), "b": (2, 3, 6), "weight": (6,), "output_weight": (6,)}
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    assert_same_with_gradients(run, expected, inputs, tolerance, dtype)
