"""Token-by-token float64 recurrences that the chunked operators are tested against, and the comparison itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float64", "float32"])
CU_SEQLENS = (0, 1, 2, 9, 42, 43, 106, 170, 171)  # one-token documents, odd lengths, a whole chunk of 64


def log_decays(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Random log decays: none, mild, strong (a chunk's sum is near -1000), or mixed (differences of large sums)."""
    return {
        "none": lambda: torch.zeros(shape),
        "mild": lambda: -torch.rand(shape) * 0.2,
        "strong": lambda: -torch.rand(shape) * 30,
        "mixed": lambda: -torch.where(torch.rand(shape) < 0.1, 300.0, 0.01),
    }[kind]()


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
    """Gated delta rule of q, k [T, H, K], v [T, H, V], beta [T, H], states [N, H, K, V].

    g: log decays [T, H], or [T, H, K] of key channels.
    """

    def step(s: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        s = s * x["g"].exp()[..., None]
        u = x["beta"][:, None] * (x["v"] - torch.einsum("hkv,hk->hv", s, x["k"]))
        s = s + torch.einsum("hk,hv->hkv", x["k"], u)
        return s, scale * torch.einsum("hkv,hk->hv", s, x["q"])

    g = g[..., None] if g.dim() == 2 else g
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


def gated_slot_attention(q, k, v, s, g, scale, keys, values, bounds) -> tuple[Tensor, Tensor, Tensor]:
    """Gated slot attention of q, k [T, H, K], v [T, H, V], s, g [T, H, M]; outputs [T, H, V] and the final slots.

    keys [N, H, K, M] and values [N, H, M, V] are the slots at the start.
    """

    outputs, final_keys, final_values = [], [], []
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        slot_keys, slot_values = keys[document], values[document]
        for t in range(start, end):
            decay = g[t].exp()
            slot_keys = slot_keys * decay[:, None, :] + k[t][:, :, None] * s[t][:, None, :]
            slot_values = slot_values * decay[:, :, None] + s[t][:, :, None] * v[t][:, None, :]
            scores = scale * torch.einsum("hkm,hk->hm", slot_keys, q[t])
            outputs.append(torch.einsum("hm,hmv->hv", scores.softmax(-1), slot_values))
        final_keys.append(slot_keys)
        final_values.append(slot_values)
    return torch.stack(outputs), torch.stack(final_keys), torch.stack(final_values)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Euclidean norm (absolute when expected is 0)."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = (actual - expected).norm()
    norm = expected.norm()
    return (difference / norm if norm > 0 else difference).item()


def others_than(document: int, bounds: tuple[int, ...] = CU_SEQLENS) -> tuple[Tensor, list[int]]:
    """Mask of the tokens [T] and list of the documents that are not the given one."""
    tokens = torch.ones(bounds[-1], dtype=torch.bool)
    tokens[bounds[document] : bounds[document + 1]] = False
    return tokens, [n for n in range(len(bounds) - 1) if n != document]


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


def decode(
    step: Callable[[dict[str, Tensor], Any], tuple[Tensor, Any]], tokens: dict[str, Tensor], state: Any = None
) -> tuple[Tensor, Any]:
    """Outputs [B, T, ...] and the last state of `step(token, state)` for one token [B, 1, ...] after the other."""
    outputs = []
    for t in range(next(iter(tokens.values())).shape[1]):
        output, state = step({name: x[:, t : t + 1] for name, x in tokens.items()}, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def assert_nan_stays_in_its_document(
    run: Callable[..., tuple[Tensor, ...]],
    inputs: dict[str, Tensor],
    tokens: Iterable[str],
    bounds: tuple[int, ...] = CU_SEQLENS,
    document: int = 3,
) -> None:
    """NaN in one document leaves outputs, final states and gradients of the others equal in every bit.

    Args:
        run: float32 inputs by name -> outputs [T, ...] of a packed row, and final states [N, ...].
        tokens: names of the inputs [T, ...], which get the NaN.
    """
    others, other_documents = others_than(document, bounds)
    others = others.to(next(iter(inputs.values())).device)
    results = []
    for value in (None, torch.nan):
        leaves = {name: x.float().clone() for name, x in inputs.items()}
        for name in tokens if value is not None else ():
            leaves[name][~others] = value
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        outputs, *finals = run(**leaves)
        outputs[others].square().sum().backward()
        gradients = [leaves[name].grad[others] for name in tokens]
        results.append([outputs[others], *(final[other_documents] for final in finals), *gradients])
    assert outputs[~others].isnan().all()
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)
