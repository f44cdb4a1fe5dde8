"""Operators over pieces of a row that several ranks share, to be compared with the same over the whole row.

Every rank draws the whole row from one seed, runs FLA's operator over it as one process would, and compares its piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flame.data.batch import Batch
from flame.models.backend import find_operator, setup_backend
from flame.parallel.context import ContextParallel
from flame.parallel.context_operators import install_context_parallel


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def share(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def decay(*shape: int) -> Tensor:
    return -0.05 * share(*shape)


def low(*shape: int) -> Tensor:
    return normal(*shape) - 3


def unit(*shape: int) -> Tensor:
    return F.normalize(normal(*shape), dim=-1)


def plainly(operator: Callable, **arguments: Any) -> Any:
    return operator(**arguments)


def attention(operator: Callable, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
    """Softmax attention [1, T, H, D] through an operator without the batch."""
    lengths = (cu_seqlens, cu_seqlens, q.shape[1], q.shape[1])
    return operator(q[0], k[0], v[0], *lengths, causal=True, **options)[None]


def rwkv7(operator: Callable, kk: Tensor, rate: Tensor, **arguments: Any) -> Any:
    """The generalised delta rule with RWKV-7's removal keys and learning rates."""
    return operator(a=-kk, b=kk * rate, **arguments)


def product(operator: Callable, k: Tensor, v: Tensor, beta: Tensor, **arguments: Any) -> Any:
    """The gated delta product, with two keys of each token [1, T, 2, H, ...] laid side by side."""
    k, v, beta = (x.flatten(1, 2) for x in (k, v, beta))
    return operator(k=k, v=v, beta=beta, num_householder=2, **arguments)


@dataclass(frozen=True)
class Operator:
    """One of FLA's, with its inputs: how to draw each, and its shape (per token: what follows [1, T])."""

    module: str
    name: str
    per_token: dict[str, tuple]
    shared: dict[str, tuple] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rotate_method: str = "allgather"
    adapt: Callable = plainly


def make_operators(heads: int, keys: int, values: int, slots: int, width: int, ranks: int) -> dict[str, Operator]:
    """Every operator that works on pieces, by a name of its own; those that ``alltoall`` exchanges last."""
    qkv = {"q": (normal, heads, keys), "k": (unit, heads, keys), "v": (normal, heads, values)}
    beta, gate, gates = (share, heads), (decay, heads), (decay, heads, keys)
    gla, attended = qkv | {"g": gates}, {"q": (normal, 2 * ranks, keys)}
    attended |= {"k": (normal, ranks, keys), "v": (normal, ranks, keys)}
    softmax = partial(Operator, "fla.layers.attn", "flash_attn_varlen_func", attended, adapt=attention)
    rates = {"kk": (unit, heads, keys), "rate": (share, heads, keys), "gk": gates}
    two_keys = {"q": qkv["q"], "k": (unit, 2, heads, keys), "v": (normal, 2, heads, values), "beta": (share, 2, heads)}
    kda_options = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")
    channels, states = (normal, width), (normal, slots)
    return {
        "softmax": softmax(),
        "softmax_window": softmax(options={"window_size": (6, 0)}),
        "softmax_far_window": softmax(options={"window_size": (25, 0)}),
        "softmax_window_of_one": softmax(options={"window_size": (0, 0)}),
        "gla": Operator("fla.ops.gla", "chunk_gla", gla),
        "gla_v_first": Operator("fla.ops.gla", "chunk_gla", gla, options={"state_v_first": True}),
        "recurrent_gla": Operator("fla.ops.gla", "fused_recurrent_gla", qkv | {"gk": gates}),
        "simple_gla": Operator("fla.ops.simple_gla", "chunk_simple_gla", qkv | {"g": gate}),
        "retention": Operator("fla.ops.retention", "chunk_retention", qkv),
        "recurrent_retention": Operator("fla.ops.retention", "fused_recurrent_retention", qkv),
        "gsa": Operator("fla.ops.gsa", "chunk_gsa", qkv | {"s": (share, heads, slots), "g": (decay, heads, slots)}),
        "delta_rule": Operator("fla.ops.delta_rule", "chunk_delta_rule", qkv | {"beta": beta}),
        "gated_delta_rule": Operator(
            "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", qkv | {"g": gate, "beta": beta}
        ),
        "kda": Operator(
            "fla.ops.kda",
            "chunk_kda",
            qkv | {"g": (normal, heads, keys), "beta": (normal, heads)},
            {"A_log": (low, heads), "dt_bias": (normal, heads * keys)},
            dict.fromkeys(kda_options, True),
        ),
        "rwkv7": Operator(
            "fla.ops.generalized_delta_rule",
            "chunk_dplr_delta_rule",
            qkv | rates,
            options={"scale": 1.0, "safe_gate": True, "lower_bound": -0.61, "chunk_size": 64},  # as the layer has them
            adapt=rwkv7,
        ),
        "gated_delta_product": Operator(
            "fla.ops.gated_delta_product", "chunk_gated_delta_product", two_keys | {"g": gate}, adapt=product
        ),
        "mamba": Operator(
            "fla.layers.mamba",
            "selective_scan",
            {"x": channels, "dt": channels, "B": states, "C": states, "z": channels},
            {"A": (decay, width, slots), "D": (normal, width), "dt_bias": (normal, width)},
        ),
        "mamba2": Operator(
            "fla.layers.mamba2",
            "ssd",
            {"x": (normal, heads, values), "dt": (share, heads), "B": (unit, 1, keys), "C": (normal, 1, keys)},
            {"A": (decay, heads), "D": (normal, heads)},
        ),
        "convolution": Operator(
            "fla.modules.causal_conv1d",
            "causal_conv1d",
            {"x": channels},
            {"weight": (normal, width, 4)},
            {"activation": "silu"},
        ),
        "token_shift": Operator("fla.modules.token_shift", "token_shift", {"x": channels}),
        "softmax_over_heads": softmax(rotate_method="alltoall"),
        "stickbreaking": Operator(
            "fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn", attended, rotate_method="alltoall"
        ),
    }


@functools.lru_cache(maxsize=1)  # setting a backend up takes a third of a second
def share_rows(backend: str, device_type: str, rotate_method: str) -> ContextParallel:
    """Wrap the operators and return what tells them of the row in hand."""
    setup_backend(backend, device_type)
    context = ContextParallel(dist.group.WORLD)
    install_context_parallel(context, rotate_method)
    return context


def output_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def distances(
    operator: Operator,
    bounds: list[int],
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    without_targets: int | None = None,
) -> dict[str, float]:
    """How far this rank's piece of the output and of each gradient is from one process's, relative to the whole.

    Args:
        bounds: of the documents of the row.
        dtype: of what there is of every token; what all share is at least in float32.
        without_targets: a rank that has none, and must join what the others compute backward all the same.
    """
    context = share_rows(backend, device.type, operator.rotate_method)
    call: Callable = partial(operator.adapt, find_operator(operator.module, operator.name), **operator.options)
    row, num_tokens = torch.tensor(bounds, dtype=torch.int32), bounds[-1]
    length = num_tokens // context.size
    own = slice(context.rank * length, (context.rank + 1) * length)
    torch.manual_seed(0)

    def draw(shapes: dict[str, tuple], dtype: torch.dtype, *first: int) -> dict[str, Tensor]:
        values = {key: sample(*first, *shape) for key, (sample, *shape) in shapes.items()}
        return {key: value.to(device, dtype).requires_grad_() for key, value in values.items()}

    whole = draw(operator.per_token, dtype, 1, num_tokens)
    shared = draw(operator.shared, torch.promote_types(dtype, torch.float32))
    expected = output_of(call(**whole, **shared, cu_seqlens=row.to(device)))
    weights = normal(*expected.shape).to(device, dtype)
    if without_targets is not None:
        weights[:, without_targets * length : (without_targets + 1) * length] = 0
    (expected * weights).sum().backward()

    ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    piece = context.enter(Batch(ids, ids, row), device)
    parts = {key: x.detach()[:, own].clone().requires_grad_() for key, x in whole.items()}
    copies = {key: x.detach().clone().requires_grad_() for key, x in shared.items()}
    result = output_of(call(**parts, **copies, cu_seqlens=piece.cu_seqlens))
    (result * weights[:, own]).sum().backward()
    context.leave()

    pairs = {"output": (result, expected, own)}
    pairs |= {key: (part.grad, whole[key].grad, own) for key, part in parts.items()}
    for key, copy in copies.items():
        dist.all_reduce(copy.grad)
        pairs[key] = (copy.grad[None], shared[key].grad[None], slice(None))
    # A gradient that is zero, as that of the only score of a softmax, is rounding on both sides.
    return {key: ((a - b[:, where]).norm() / b.norm().clamp(min=1e-3)).item() for key, (a, b, where) in pairs.items()}
