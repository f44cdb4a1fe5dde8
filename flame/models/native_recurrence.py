"""Packed documents in the convolutions and recurrences of hybrid models that are native to transformers.

A hybrid's mixers call functions of their model's own file. transformers gives these documents' bounds, and they keep
documents apart with the packages causal-conv1d and mamba-ssm; without them transformers 5.24 refuses packed rows and
5.17 mixes documents. Here packed calls go to FLA's operators instead (on a CPU: flame's reference operators). Calls
without packed documents stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flame.models.ssd import ssd


def use_packed_recurrence(model: nn.Module) -> None:
    """Put the packed functions beside transformers' own in the files of the model's modules; idempotent."""
    for module_name in {type(module).__module__ for module in model.modules()}:
        if not module_name.startswith("transformers.models."):
            continue
        namespace = vars(sys.modules[module_name])
        for name, (packed, package) in _PACKED.items():
            if name in namespace and not hasattr(namespace[name], "packed") and not _is_installed(package):
                namespace[name] = _either(namespace[name], packed)
        for name, always in _ALWAYS.items():
            if name in namespace:
                namespace[name] = always


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _either(own: Callable, packed: Callable) -> Callable:
    @functools.wraps(own)
    def call(*args: Any, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None and kwargs.get("seq_idx") is not None:
            cu_seqlens = _bounds(kwargs["seq_idx"])
        return own(*args, **kwargs) if cu_seqlens is None else packed(*args, cu_seqlens=cu_seqlens, **kwargs)

    call.packed = packed
    return call


def _bounds(seq_idx: Tensor) -> Tensor:
    """cu_seqlens [N + 1] of seq_idx [1, T], the number of each token's document; waits for the device."""
    starts = (seq_idx[0].diff() != 0).nonzero()[:, 0] + 1
    return F.pad(starts, (1, 1)).index_fill(0, starts.new_tensor([len(starts) + 1]), seq_idx.shape[1]).int()


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor,
    **options: Any,
) -> Tensor:
    """Causal depthwise convolution of [1, D, T] with weight [D, W]."""
    assert options.get("initial_states") is None and not options.get("return_final_states"), "packed rows have no cache"
    causal_conv1d = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    rows = hidden_states.transpose(1, 2).contiguous()
    y, _ = causal_conv1d(rows, weight.contiguous(), bias, activation=activation, cu_seqlens=cu_seqlens)
    return y.transpose(1, 2)


def _state_space_dual(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    cu_seqlens: Tensor,
    **options: Any,
) -> Tensor:
    """Mamba-2's scan (`flame.models.ssd`) behind the signature of mamba-ssm's kernel.

    Args:
        hidden_states: [1, T, H, P]; dt: [1, T, H]; A, D, dt_bias: [H].
        B, C: [1, T, G, N]; head h reads group h // (H // G).
        chunk_size: of mamba-ssm's kernel; FLA's operator has its own.
    """
    assert initial_states is None and not return_final_states, "packed rows have no cache"
    chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    B, C = (x.to(hidden_states.dtype) for x in (B, C))
    return ssd(hidden_states, step, A.float(), B, C, chunk_simple_gla, D, cu_seqlens=cu_seqlens)[0]


def _gated_delta_rule(name: str) -> Callable:
    """FLA's operator of that name, whatever the backend put in its place, behind transformers' signature."""

    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return getattr(importlib.import_module("fla.ops.gated_delta_rule"), name)(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )

    return gated_delta_rule


def _no_shortcut(*args: Any, **options: Any) -> None:
    """The whole mixer in one kernel, which only mamba-ssm has; None sends the mixer through its parts."""


# transformers' function -> the packed one, and the package with which transformers' own does without it.
_PACKED: dict[str, tuple[Callable, str]] = {
    "causal_conv1d_fn": (_convolution, "causal_conv1d"),
    "mamba2_chunk_scan": (_state_space_dual, "mamba_ssm"),
    "mamba2_split_conv1d_scan_combined": (_no_shortcut, "mamba_ssm"),
}
# These are FLA's already, but as they were when transformers was imported, which may be before the backend was chosen.
_ALWAYS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule("chunk_gated_delta_rule"),
    "torch_recurrent_gated_delta_rule": _gated_delta_rule("fused_recurrent_gated_delta_rule"),
}
