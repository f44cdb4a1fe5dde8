"""The backward of short convolutions by the kernel that FLA keeps for one process.

FLA's Triton kernel reads gradient and output once for each of the four weights of a channel, after another kernel has
computed that output again: 0.67 ms for one of gated_deltanet_340M's convolutions on an H200. Its Gluon kernel
(`FLA_CONV_GLUON`) keeps a window of both in registers and needs neither, but FLA refuses it wherever torch.distributed
is initialised. Nothing in it depends on that: each rank convolves tensors of its own. Pieces of a row (context
parallelism) have states (`flame/parallel/context_border.py`), and stay with the other.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WIDTHS = (2, 3, 4)
CHUNK = 64  # tokens, of the chunks that the bounds of packed documents are given as
ACTIVATIONS = (None, "silu", "swish")


def make_causal_conv1d_bwd(original: Callable) -> Callable:
    """FLA's `causal_conv1d_bwd`, which goes on where there are states, layouts or widths that the kernel lacks."""
    kernel = find_kernel()
    if kernel is None:
        return original

    def causal_conv1d_bwd(
        x: Tensor,
        dy: Tensor,
        dht: Tensor | None,
        weight: Tensor | None = None,
        *,
        initial_state: Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: Tensor | None = None,
        chunk_size: int = CHUNK,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight, bias, residual and initial state.

        Args:
            x, dy: [B, T, D]; weight: [D, W].
            dht, initial_state: [N, D, W].
            others: FLA's further arguments, by name, such as bias [D] and residual [B, T, D].
        """
        has_states = dht is not None or initial_state is not None
        is_known = activation in ACTIVATIONS and chunk_size == CHUNK and not (cu_seqlens is not None and len(x) != 1)
        compute = kernel if takes(x, dy, weight) and is_known and not has_states else original
        return compute(
            x,
            dy,
            dht,
            weight=weight,
            initial_state=initial_state,
            activation=activation,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            **others,
        )

    return causal_conv1d_bwd


def find_kernel() -> Callable | None:
    """FLA's; None on GPUs other than those it was tried on, where FLA or Triton is without it, and where the user has
    switched it off. Plans made without a GPU are for such a one."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return None
    if os.environ.get("FLA_CONV_GLUON") == "0":
        return None
    try:
        return importlib.import_module("fla.modules.causal_conv1d.backends.gluon").causal_conv1d_bwd_gluon
    except (ImportError, AttributeError):
        return None


def takes(x: Tensor, dy: Tensor, weight: Tensor | None) -> bool:
    """Whether the kernel does: tensors of these shapes, types and layouts."""
    is_known = x.ndim == 3 and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    if not is_known or weight is None or weight.shape[0] != x.shape[-1] or weight.shape[1] not in WIDTHS:
        return False
    return x.stride(-1) == 1 and dy.shape == x.shape and not x.is_cpu
