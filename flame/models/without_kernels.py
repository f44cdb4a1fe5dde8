"""FLA's layers without their kernels: everything but the launches happens, so that tensors without memory go through.

FLA's operators are Python functions that allocate what a kernel fills, launch it, and hand on what the backward needs.
With the launches left out they run on the meta device, and what they allocate and keep is what they would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.models.reference.cross_entropy import cross_entropy_module_forward
from flame.models.reference.stickbreaking import layer_forward

FLASH_WIDTH = 256  # widest heads of FlashAttention


_observers: list[Callable[[Any, tuple, dict[str, Any]], None]] = []


@contextmanager
def observed_launches(observe: Callable[[Any, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Have ``observe`` called with the kernel, arguments and options of each launch that is left out."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Leave out every Triton launch, and let attention, losses and exchanged states take tensors on the meta device."""
    from fla.layers.stickbreaking_attn import StickBreakingAttention
    from fla.modules import FusedCrossEntropyLoss
    from fla.ops.cp import chunk_bwd, chunk_delta_h, chunk_fwd, chunk_merge
    from triton.runtime.jit import KernelInterface

    replacements = [
        (KernelInterface, "__getitem__", _no_launch),
        (FusedCrossEntropyLoss, "forward", _fused_cross_entropy),
        (StickBreakingAttention, "forward", layer_forward),  # FLA's refuses what is on no GPU
        *_FUSED,
        *((module, "_check_cp_device", _any_device) for module in (chunk_bwd, chunk_delta_h, chunk_fwd, chunk_merge)),
    ]
    originals = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replacements, originals, strict=True):
            setattr(owner, name, original)


def _no_launch(kernel: Any, _grid: Any) -> Callable:
    def left_out(*args: Any, **options: Any) -> None:
        for observe in _observers:
            observe(kernel, args, options)

    return left_out


def _any_device(_device: torch.device) -> None:
    """FLA's context parallelism checks that it is on an NVIDIA GPU of the Ampere generation or later."""


def _fused_cross_entropy(module: Any, logits: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    return cross_entropy_module_forward(module, logits, target, cross_entropy_loss)


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _RmsNorm.apply(x, weight)


class _RmsNorm(torch.autograd.Function):
    """What torch's fused kernel allocates and keeps: the input and the inverse root, float32 [..., 1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    in_half = q.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and in_half and max(q.shape[-1], v.shape[-1]) <= FLASH_WIDTH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = q.new_empty(attn_mask.shape).expand(*q.shape[:-1], k.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


# One operation on a GPU, and many on the meta device, which keep far more for the backward. They are replaced by name:
# a mode of torch's would be off in the backward, and with it in all that is computed again.
_FUSED = (
    (F, "scaled_dot_product_attention", _scaled_dot_product_attention),
    (F, "rms_norm", _rms_norm),
    (torch, "rms_norm", _rms_norm),
)
