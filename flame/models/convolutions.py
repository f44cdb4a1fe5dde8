"""Short convolutions by the kernels that FLA keeps for one process.

FLA's Triton kernels read each input once for each of the four weights of a channel, and the backward first computes the
output again by another kernel: together 0.82 ms for one of 65,536 x 1,536 on an H200. Its Gluon kernels
(`FLA_CONV_GLUON`) keep a window of the inputs in registers: 0.35 ms, the backward by the tiles below. FLA refuses them
wherever torch.distributed is initialised. Nothing in them depends on that: each rank convolves tensors of its own.
Pieces of a row (context parallelism) have states (`flame/parallel/context_border.py`), and stay with the others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from flame.models.backend import find_operator

WIDTHS = (2, 3, 4)
BT = 64  # tokens of a chunk, and of the chunks that the bounds of packed documents are given as
ACTIVATIONS = (None, "silu", "swish")
# Channels of a program and tokens of a thread's window, the fastest of eight on an H200: 0.24 ms and with 32 channels,
# as FLA has them, 0.33.
BD, BC = 64, 16
NUM_WARPS = 4


def make_causal_conv1d_fwd(original: Callable) -> Callable:
    """FLA's `causal_conv1d_fwd`, which goes on where there are states, layouts or widths that the kernel lacks."""
    kernels = find_kernels()
    if kernels is None:
        return original

    def causal_conv1d_fwd(
        x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, T, D] and the final states or None.

        Args:
            x, residual: [B, T, D]; weight: [D, W]; bias: [D].
            options: FLA's further arguments, by name.
        """
        has_states = options.get("initial_state") is not None or options.get("output_final_state")
        is_taken = not has_states and takes(x, weight, options)
        compute = kernels.causal_conv1d_fwd_gluon if is_taken else original
        return compute(x=x, weight=weight, bias=bias, residual=residual, **options)

    return causal_conv1d_fwd


def make_causal_conv1d_bwd(original: Callable) -> Callable:
    """FLA's `causal_conv1d_bwd`, which goes on where there are states, layouts or widths that the kernel lacks."""
    kernels = find_kernels()
    if kernels is None:
        return original

    def causal_conv1d_bwd(
        x: Tensor, dy: Tensor, dht: Tensor | None, weight: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight, bias, residual and initial state.

        Args:
            x, dy: [B, T, D]; weight: [D, W]; dht: [N, D, W].
            options: FLA's further arguments, by name, such as bias [D] and residual [B, T, D].
        """
        has_states = dht is not None or options.get("initial_state") is not None
        if has_states or dy.shape != x.shape or not takes(x, weight, options):
            return original(x=x, dy=dy, dht=dht, weight=weight, **options)
        return _backward(kernels, x, dy, weight, **options)

    return causal_conv1d_bwd


def find_kernels() -> ModuleType | None:
    """FLA's; None on GPUs other than those they were tried on, where FLA or Triton is without them, and where the user
    has switched them off. Plans made without a GPU are for such a one."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return None
    if os.environ.get("FLA_CONV_GLUON") == "0":
        return None
    try:
        return importlib.import_module("fla.modules.causal_conv1d.backends.gluon")
    except (ImportError, AttributeError):
        return None


def takes(x: Tensor, weight: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether the kernels do: tensors of these shapes, types and layouts."""
    if options.get("activation") not in ACTIVATIONS or options.get("chunk_size", BT) != BT:
        return False
    if x.ndim != 3 or (options.get("cu_seqlens") is not None and len(x) != 1):
        return False
    is_known = x.dtype in (torch.float16, torch.bfloat16, torch.float32) and x.stride(-1) == 1 and not x.is_cpu
    return is_known and weight is not None and weight.shape[0] == x.shape[-1] and weight.shape[1] in WIDTHS


def _backward(
    kernels: ModuleType,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:
    """FLA's `causal_conv1d_bwd_gluon` with tiles of our own."""
    num_rows, num_tokens, num_channels = x.shape
    if cu_seqlens is not None and chunk_indices is None:
        chunk_indices = find_operator("fla.ops.utils.index", "prepare_chunk_indices")(cu_seqlens, BT)
    num_chunks = triton.cdiv(num_tokens, BT) if cu_seqlens is None else len(chunk_indices)
    parts = num_rows * num_chunks  # each gives a share of the parameters' gradients
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight, dbias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    dweight_parts = weight.new_empty(parts, *weight.shape, dtype=torch.float32)
    dbias_parts = None if bias is None else bias.new_empty(parts, num_channels, dtype=torch.float32)
    shape = {"D": num_channels, "W": weight.shape[1], "BD": BD, "num_warps": NUM_WARPS}
    with torch.cuda.device_of(x):
        kernels.causal_conv1d_bwd_kernel[(triton.cdiv(num_channels, BD), num_chunks, num_rows)](
            x=x, weight=weight, bias=bias, dy=dy, dx=dx, dw_partial=dweight_parts, db_partial=dbias_parts,
            cu_seqlens=cu_seqlens, chunk_indices=chunk_indices, T=num_tokens, SXN=x.stride(0), SXT=x.stride(1),
            SYN=dy.stride(0), SYT=dy.stride(1), SYD=dy.stride(2), BT=BT, BC=BC, ACTIVATION=activation, **shape,
        )  # fmt: skip
        kernels.causal_conv1d_bwd_kernel_dwdb[(triton.cdiv(dweight.numel(), BD),)](
            dw_partial=dweight_parts, db_partial=dbias_parts, dw=dweight, db=dbias, NP=parts, **shape
        )
    return dx, dweight, dbias, None if residual is None else dy, None
