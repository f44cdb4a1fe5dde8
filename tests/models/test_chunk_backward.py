from __future__ import annotations

import math

import pytest
import torch

from flame.models.chunk_backward import chunk_bwd_dqkwg

CHUNK = 4
BOUNDS = [0, 1, 6, 14]
CHUNKS = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]


def chunk_bounds(packed):
    if not packed:  # two rows of 7 tokens
        return [(row * 7 + start, row * 7 + min(start + CHUNK, 7)) for row in range(2) for start in (0, 4)]
    return [(BOUNDS[n] + c * CHUNK, min(BOUNDS[n] + (c + 1) * CHUNK, BOUNDS[n + 1])) for n, c in CHUNKS]


def forward(q, k, v, g, h, scale, bounds):
    """Outputs and end states of all chunks, by the module's formulas; g is the log2 decay cumulated in the chunk."""
    groups = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))
    outputs, ends = [], []
    for state, (start, end) in zip(h, bounds, strict=True):
        q_c, k_c, v_c, g_c = (x[start:end].transpose(0, 1) for x in (q, k, v, g))  # [HV, C, ...]
        decay = (g_c[:, :, None] - g_c[:, None, :]).exp2().tril()
        own = (q_c @ k_c.mT * decay) @ v_c
        outputs.append((scale * (g_c.exp2()[..., None] * (q_c @ state) + own)).transpose(0, 1))
        to_end = (g_c[:, -1:] - g_c).exp2()[..., None]
        ends.append(g_c[:, -1, None, None].exp2() * state + (k_c * to_end).mT @ v_c)
    return torch.cat(outputs), torch.stack(ends)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("num_v_heads", [2, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_gradients_are_those_of_the_forward(packed, num_v_heads, state_v_first):
    torch.manual_seed(0)
    bounds, scale = chunk_bounds(packed), 0.3

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    q, k, v = draw(14, 2, 3), draw(14, 2, 3), draw(14, num_v_heads, 5)
    g = torch.cat([-torch.rand(end - start, num_v_heads).double().cumsum(0) for start, end in bounds])
    h, dh = draw(len(bounds), num_v_heads, 3, 5), draw(len(bounds), num_v_heads, 3, 5)
    do, dv = draw(14, num_v_heads, 5), draw(14, num_v_heads, 5)
    for x in (q, k, g):
        x.requires_grad_()
    torch.autograd.backward(forward(q, k, v, g, h, scale, bounds), [do, dh])

    rows = (lambda x: x[None]) if packed else (lambda x: x.view(2, 7, *x.shape[1:]))
    states = (lambda x: x[None]) if packed else (lambda x: x.view(2, 2, *x.shape[1:]))
    options = {}
    if packed:
        options = {"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32), "chunk_indices": torch.tensor(CHUNKS)}
    h_in, dh_in = (x.mT.contiguous() if state_v_first else x for x in (h, dh))
    dq, dk, dw, dg = chunk_bwd_dqkwg(
        *(rows(x.detach()) for x in (q, k, v, do)),
        states(h_in),
        states(dh_in),
        w=rows(draw(14, num_v_heads, 3)),
        g=rows(g.detach()),
        dv=rows(dv),
        scale=scale,
        state_v_first=state_v_first,
        chunk_size=CHUNK,
        **options,
    )
    torch.testing.assert_close(dq.flatten(0, 1), q.grad)
    torch.testing.assert_close(dk.flatten(0, 1), k.grad)
    torch.testing.assert_close(dg.flatten(0, 1), g.grad / math.log(2))
    start_state = torch.cat(
        [state.expand(end - start, -1, -1, -1) for state, (start, end) in zip(h, bounds, strict=True)]
    )
    torch.testing.assert_close(dw.flatten(0, 1), -torch.einsum("thv,thkv->thk", dv, start_state))
