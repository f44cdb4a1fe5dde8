"""The gated delta rule's own kernels: numbers by Triton's interpreter, what is left to FLA, and FLA's on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from flame.host_copy import send_and_remember  # noqa: E402
from flame.models import delta_rule  # noqa: E402
from flame.models.chunk_backward import chunk_bwd_dqkwg  # noqa: E402
from flame.models.chunk_bounds import make_chunk_indices, make_chunk_offsets  # noqa: E402
from flame.models.delta_rule import (  # noqa: E402
    BT,
    GRADIENTS,
    OUTPUTS,
    PREPARE,
    STATES,
    WIDE,
    make_chunk_gated_delta_rule_bwd,
    make_chunk_gated_delta_rule_fwd,
)
from flame.models.delta_rule_kernels import (  # noqa: E402
    delta_gradient_kernel,
    delta_prepare_kernel,
    delta_state_gradient_kernel,
    delta_state_kernel,
)
from flame.models.reference.delta_rule import chunk_gated_delta_rule as reference  # noqa: E402

LOG2 = 0.6931471805599453


def chunks(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[tuple[int, slice]]:
    """Row and tokens of each chunk of [B, T, ...]."""
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    return [
        (row, slice(first, min(first + BT, end)))
        for row in range(len(x))
        for start, end in pairwise(bounds)
        for first in range(start, end, BT)
    ]


def add_up(
    g: torch.Tensor, chunk_size: int, scale: float = 1.0, reverse: bool = False, cu_seqlens=None, chunk_indices=None
) -> torch.Tensor:
    """FLA's `chunk_local_cumsum`."""
    out = g * scale
    for row, tokens in chunks(g, cu_seqlens):
        part = out[row, tokens]
        out[row, tokens] = part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)
    return out


def invert(k, v, g, beta, chunk_size, cu_seqlens, chunk_indices) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FLA's `chunk_gated_delta_rule_fwd_intra`: w, u and M."""
    M = k.new_zeros(*k.shape[:3], BT)
    for row, tokens in chunks(k, cu_seqlens):
        keys, G, b = k[row, tokens].transpose(0, 1), g[row, tokens].T, beta[row, tokens].T  # [H, C, K], [H, C]
        lower = (b[..., None] * (keys @ keys.mT) * (G[..., None] - G[..., None, :]).exp2()).tril(-1)
        length = keys.shape[1]
        M[row, tokens, :, :length] = torch.linalg.inv(torch.eye(length) + lower).transpose(0, 1)
    return *recompute(k, v, beta, M, g, cu_seqlens, chunk_indices), M


def recompute(k, v, beta, A, g, cu_seqlens, chunk_indices) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's `recompute_w_u_fwd`."""
    w, u = torch.zeros_like(k), torch.zeros_like(v)
    for row, tokens in chunks(k, cu_seqlens):
        M = A[row, tokens].transpose(0, 1)[..., : tokens.stop - tokens.start]
        b = beta[row, tokens, :, None]
        w[row, tokens] = (M @ (k[row, tokens] * b * g[row, tokens, :, None].exp2()).transpose(0, 1)).transpose(0, 1)
        u[row, tokens] = (M @ (v[row, tokens] * b).transpose(0, 1)).transpose(0, 1)
    return w, u


OPERATORS = {
    "RCP_LN2": 1 / LOG2,
    "chunk_local_cumsum": add_up,
    "chunk_gated_delta_rule_fwd_intra": invert,
    "recompute_w_u_fwd": recompute,
    "chunk_bwd_dqkwg": chunk_bwd_dqkwg,
    "prepare_chunk_indices": make_chunk_indices(None),
    "prepare_chunk_offsets": make_chunk_offsets(None),
}

CASES = [
    # bounds, rows, (K, V), are there states, the values' channels first
    ([0, 5, 69, 150], 1, (128, 256), False, False),
    ([0, 64, 134], 1, (256, 128), True, False),
    (None, 2, (128, 128), True, True),
]


def check_interpreted() -> None:
    """Run where Triton interprets its kernels: against the recurrence in float64."""
    delta_rule.takes = lambda *_: True
    from flame.models import chunks as home

    delta_rule.find_operator = home.find_operator = lambda module, name: OPERATORS[name]
    for bounds, num_rows, (key_dim, value_dim), has_states, state_v_first in CASES:
        torch.manual_seed(0)
        length = bounds[-1] if bounds else 70
        cu_seqlens = bounds and send_and_remember(torch.tensor(bounds, dtype=torch.int32), torch.device("cpu"))
        indices = bounds and OPERATORS["prepare_chunk_indices"](cu_seqlens, BT)
        q, k = (F.normalize(torch.randn(num_rows, length, 2, key_dim), dim=-1) for _ in range(2))
        v, do = (torch.randn(num_rows, length, 2, value_dim) for _ in range(2))
        g, beta = F.logsigmoid(torch.randn(num_rows, length, 2)), torch.rand(num_rows, length, 2)
        shape = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
        states = len(bounds) - 1 if bounds else num_rows, 2, *shape
        initial, dfinal = (torch.randn(states) if has_states else None for _ in range(2))

        exact = [x.double().requires_grad_() for x in (q, k, v, g, beta, initial) if x is not None]
        options = {"scale": 0.3, "output_final_state": has_states, "state_v_first": state_v_first}
        right_o, right_final = reference(
            *exact[:5], initial_state=exact[5] if has_states else None, cu_seqlens=cu_seqlens, **options
        )
        loss = (right_o * do).sum() + ((right_final * dfinal).sum() if has_states else 0.0)
        right = [right_o, *([right_final] if has_states else []), *torch.autograd.grad(loss, exact)]

        packed = {"cu_seqlens": cu_seqlens, "chunk_indices": indices, "initial_state": initial} | options
        G, o, M, final, _, g_input = make_chunk_gated_delta_rule_fwd(None)(q=q, k=k, v=v, g=g, beta=beta, **packed)
        assert g_input is None
        packed.pop("output_final_state")
        gradients = make_chunk_gated_delta_rule_bwd(None)(
            q=q, k=k, v=v, g=G, beta=beta, A=M, do=do, dht=dfinal, **packed
        )
        dq, dk, dv, db, dg, dinitial, *others = gradients
        assert others == [None, None]
        found = [o, *([final] if has_states else []), dq, dk, dv, dg, db, *([dinitial] if has_states else [])]
        names = ["o", *(["final"] if has_states else []), "dq", "dk", "dv", "dg", "db", "dinitial"]
        for name, a, b in zip(names, found, right, strict=False):
            error = float((a - b).norm() / b.norm())
            assert error < 1e-5, (bounds, name, error)


def test_interpreted_they_give_the_recurrence_and_its_gradients():
    code = "from tests.models.test_delta_rule_kernels import check_interpreted; check_interpreted()"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)


def inputs(length: int = 8, heads: int = 2, widths: tuple[int, int] = (128, 256), **options) -> dict[str, torch.Tensor]:
    key_dim, value_dim = widths
    given = {name: torch.randn(1, length, heads, key_dim, **options) for name in ("q", "k")}
    given["v"] = torch.randn(1, length, heads, value_dim, **options)
    return given | {name: torch.rand(1, length, heads, **options) for name in ("g", "beta")}


@pytest.mark.parametrize(
    "change",
    [
        {"cu_seqlens": torch.empty(2, dtype=torch.int32, device="meta")},  # the host does not know them
        {"cu_seqlens": torch.tensor([0, 7], dtype=torch.int32)},  # not all of the row
        {"cp_context": "pieces of a row"},
        {"chunk_size": 32},
        {"v": torch.empty(1, 8, 2, 192, dtype=torch.bfloat16, device="meta")},
        {"v": torch.empty(1, 8, 4, 256, dtype=torch.bfloat16, device="meta")},
        {"q": torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")},
        {"k": torch.empty(1, 8, 2, 128, dtype=torch.float16, device="meta")},
    ],
)
def test_what_the_kernels_do_not_take_is_left_to_fla(change):
    given = inputs(device="meta", dtype=torch.bfloat16)
    options = {"cu_seqlens": None, "chunk_size": BT}
    assert delta_rule.takes(given["q"], given["k"], given["v"], options)
    calls = []
    given |= options | change
    make_chunk_gated_delta_rule_fwd(lambda **named: calls.append(named))(**given)
    given |= dict.fromkeys(("A", "do", "dht"))
    make_chunk_gated_delta_rule_bwd(lambda **named: calls.append(named))(**given)
    assert calls[0].items() <= given.items()
    assert calls[1].items() == given.items()


def matrix(columns: int, rows_of_block: int, columns_of_block: int) -> TensorDescriptor:
    x = torch.empty(256, columns, dtype=torch.bfloat16)
    return TensorDescriptor.from_tensor(x, [rows_of_block, columns_of_block])


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 256), (256, 512)])
def test_they_fit_a_hopper_gpu(hopper, key_dim, value_dim, state_v_first):
    """A program has 227 KiB of shared memory."""
    heads, half = 6, key_dim // 2
    x, floats = torch.empty(16, dtype=torch.bfloat16), torch.empty(16)
    bounds, offsets = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.int64)
    launch = {"grid": (1,), "warmup": True, "H": heads, "K": key_dim, "BT": BT}
    scan = {"V": value_dim, "STATE_V_FIRST": state_v_first, "WAIT_FOR_Q": key_dim == WIDE} | launch
    keys, scores = matrix(heads * key_dim, BT, half), matrix(heads * BT, BT, BT)

    def values(options: dict) -> TensorDescriptor:
        return matrix(heads * value_dim, BT, options["BV"])

    def states(options: dict) -> TensorDescriptor:
        return matrix(key_dim, options["BV"], half) if state_v_first else matrix(value_dim, half, options["BV"])

    packed = bounds, offsets, bounds
    compiled = [
        delta_prepare_kernel.run(x, x, floats, x, x, x, floats, bounds, bounds, 0.1, 0.1, 65_536, **PREPARE, **launch),
        delta_state_kernel.run(
            *(keys, keys, values(STATES), floats, states(STATES), x, None, None, None, floats, None),
            *(*packed, 0.1, 65_536),
            **STATES,
            **scan,
        ),
        delta_state_kernel.run(
            *(keys, keys, values(OUTPUTS), floats, None, None, keys, scores, x, floats, floats),
            *(*packed, 0.1, 65_536),
            **OUTPUTS,
            **scan,
        ),
        delta_state_gradient_kernel.run(
            *(keys, keys, keys, floats, values(OUTPUTS), scores, states(OUTPUTS), x, floats, floats, *packed, 65_536),
            **OUTPUTS,
            **scan,
        ),
        delta_gradient_kernel.run(
            *(x, x, floats, floats, x, x, x, x, x, floats, floats, bounds, bounds, 65_536),
            V=value_dim,
            **GRADIENTS,
            **launch,
        ),
    ]
    assert max(each.metadata.shared for each in compiled) <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("use_gate_in_kernel", [False, True])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("widths", [(128, 256), (256, 512), (256, 128)])
def test_on_a_gpu_they_are_near_the_recurrence(widths, state_v_first, use_gate_in_kernel):
    """1e-2: what is written, scores and all results are bfloat16. docs/numerics.md has FLA's own distances."""
    from flame.models.backend import find_operator, setup_backend, uninstall

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels for Hopper GPUs")
    setup_backend("triton", "cuda")
    torch.manual_seed(0)
    bounds = send_and_remember(torch.tensor([0, 700, 701, 1500], dtype=torch.int32), torch.device("cuda"))
    given = {name: x.bfloat16() for name, x in inputs(1500, 2, widths, device="cuda").items()}
    given["q"], given["k"] = (F.normalize(given[name].float(), dim=-1).bfloat16() for name in ("q", "k"))
    given["g"] = given["g"] if use_gate_in_kernel else F.logsigmoid(given["g"]).float()
    shape = widths[::-1] if state_v_first else widths
    given["initial_state"] = torch.randn(3, 2, *shape, device="cuda")
    gate = {"A_log": torch.zeros(2, device="cuda"), "dt_bias": torch.ones(2, device="cuda")}
    given |= gate if use_gate_in_kernel else {}
    do = torch.randn(1, 1500, 2, widths[1], device="cuda")

    def run(function, dtype=None):
        leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in given.items()}
        options = {"output_final_state": True, "state_v_first": state_v_first, "cu_seqlens": bounds}
        o, final = function(**leaves, use_gate_in_kernel=use_gate_in_kernel, **options)
        return [o, final, *torch.autograd.grad((o * do).sum() + final.sum(), leaves.values())]

    launched = []
    for kernel in (delta_state_kernel, delta_state_gradient_kernel, delta_gradient_kernel):
        kernel.add_pre_run_hook(lambda *args, **options: launched.append(1))
    try:
        found = run(find_operator("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"))
    finally:
        uninstall()
        for kernel in (delta_state_kernel, delta_state_gradient_kernel, delta_gradient_kernel):
            kernel.pre_run_hooks.clear()
    assert len(launched) == 4  # the states' once for the outputs, once for the backward
    for own, right in zip(found, run(reference, torch.float64), strict=True):
        assert (own - right).norm() < 1e-2 * right.norm()
