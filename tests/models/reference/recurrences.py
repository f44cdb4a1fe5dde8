"""Token-by-token float64 recurrences that the chunked operators are tested against, and the comparison itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

CU_SEQLENS = (0, 1, 2, 9, 42, 43, 106, 170, 171)  # one-token documents, odd lengths, a whole chunk of 64


def per_document(step: Callable, tensors: dict[str, Tensor], states: Tensor | None, bounds: list[int]) -> tuple:
    """Run `step(state, token) -> (state, output)` over each document of one packed row; float64.

    Args:
        tensors: [T, ...] inputs by name; a token is the dict of their rows.
        states: [N, ...] start states, indexable by document.
    """
    outputs, finals = [], []
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = states[document]
        for t in range(start, end):
            state, output = step(state, {name: x[t] for name, x in tensors.items()})
            outputs.append(output)
        finals.append(state)
    return torch.stack(outputs), torch.stack(finals)


def delta_rule(q, k, v, g, beta, scale, state, bounds) -> tuple[Tensor, Tensor]:
    """Gated delta rule of q, k [T, H, K], v [T, H, V], g, beta [T, H], states [N, H, K, V]."""

    def step(s: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        s = s * x["g"].exp()[:, None, None]
        u = x["beta"][:, None] * (x["v"] - torch.einsum("hkv,hk->hv", s, x["k"]))
        s = s + torch.einsum("hk,hv->hkv", x["k"], u)
        return s, scale * torch.einsum("hkv,hk->hv", s, x["q"])

    return per_document(step, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, state, bounds)


def gated_linear_attention(q, k, v, g, scale, state, bounds, gv=None) -> tuple[Tensor, Tensor]:
    """Gated linear attention of q, k, g [T, H, K], v, gv [T, H, V], states [N, H, K, V]."""

    def step(s: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        s = s * x["g"].exp()[..., None] * x["gv"].exp()[..., None, :] + torch.einsum("hk,hv->hkv", x["k"], x["v"])
        return s, scale * torch.einsum("hkv,hk->hv", s, x["q"])

    gv = torch.zeros_like(v) if gv is None else gv
    return per_document(step, {"q": q, "k": k, "v": v, "g": g, "gv": gv}, state, bounds)


def generalized_delta_rule(q, k, v, a, b, g, scale, state, bounds) -> tuple[Tensor, Tensor]:
    """RWKV-7's rule of q, k, a, b, g [T, H, K], v [T, H, V], states [N, H, K, V]."""

    def step(s: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        read = torch.einsum("hkv,hk->hv", s, x["a"])
        s = s * x["g"].exp()[..., None] + torch.einsum("hk,hv->hkv", x["b"], read)
        s = s + torch.einsum("hk,hv->hkv", x["k"], x["v"])
        return s, scale * torch.einsum("hkv,hk->hv", s, x["q"])

    return per_document(step, {"q": q, "k": k, "v": v, "a": a, "b": b, "g": g}, state, bounds)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Euclidean norm (absolute when expected is 0)."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = (actual - expected).norm()
    norm = expected.norm()
    return (difference / norm if norm > 0 else difference).item()


def assert_same_with_gradients(
    run: Callable[..., tuple[Tensor, ...]],
    truth: Callable[..., tuple[Tensor, ...]],
    inputs: dict[str, Tensor],
    tolerance: float,
    dtype: torch.dtype,
) -> None:
    """Compare outputs and the gradients of every input for one random cotangent.

    `run` gets the inputs rounded to `dtype`, `truth` the same values in float64.
    """
    low = {name: x.to(dtype).detach().requires_grad_() for name, x in inputs.items()}
    high = {name: x.detach().double().requires_grad_() for name, x in low.items()}
    outputs, expected = run(**low), truth(**high)
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in expected]
    for index, (y, target) in enumerate(zip(outputs, expected, strict=True)):
        assert y.shape == target.shape
        assert relative_error(y, target) <= tolerance, f"output {index}"
    torch.autograd.backward(outputs, [c.to(y.dtype) for c, y in zip(cotangents, outputs, strict=True)])
    torch.autograd.backward(expected, cotangents)
    for name in inputs:
        assert torch.isfinite(low[name].grad).all(), name
        assert relative_error(low[name].grad, high[name].grad) <= tolerance, f"gradient of {name}"
