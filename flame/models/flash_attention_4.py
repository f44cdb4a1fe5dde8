"""FlashAttention-4 over packed documents (arXiv:2603.05451): the `flash_attn.cute` package, for Hopper and newer GPUs.

Its forward and backward passes are operators of torch's here, so that activation checkpointing can keep what attention
gives, and compiled graphs never look inside. torch's own way to the package (`activate_flash_attention_impl("FA4")`,
torch 2.11) fits no release after 4.0.0b16 and has no windows backward.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flame.launch.caches import FLASH_ATTENTION_4, FOLDERS
from flame.models.attention_kernels import Documents, Window, pad_heads
from flame.paths import user_cache_folder


def flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window
) -> Tensor:
    """A packed form of attention, see `flame.models.attention_kernels`, for heads that `takes_heads`."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = (pad_heads(x, -x.shape[-1] % 8) for x in (q, k, v))  # the kernels take multiples of 8
    bounds = (documents.bounds_q.int(), documents.bounds_k.int())
    longest = (documents.longest_q, documents.longest_k)
    return _forward(q, k, v, *bounds, *longest, scale, window.left, window.right)[0][..., :value_dim]


def takes_heads(q: Tensor, v: Tensor) -> bool:
    """Whether the package has kernels for heads as wide as these on this GPU."""
    widths = tuple(x.shape[-1] + -x.shape[-1] % 8 for x in (q, v))
    if max(widths) <= 128:
        return True
    if torch.cuda.get_device_capability(q.device)[0] == 9:
        return max(widths) <= 256
    return widths in ((192, 128), (256, 256))


@torch.library.custom_op("flame::flash_attention_4", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """Outputs [Tq, H, D] and, float32 [H, Tq], the logarithms of the sums of exponentials."""
    options = _options(bounds_q, bounds_k, longest_q, longest_k, scale, left, right)
    o, logsumexp, *_ = _package()._flash_attn_fwd(q, k, v, return_lse=True, **options)
    return o, logsumexp


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    return q.new_empty(num_tokens, num_heads, v.shape[-1]), q.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("flame::flash_attention_4_backward", mutates_args=())
def _backward(
    o_gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    options = _options(bounds_q, bounds_k, longest_q, longest_k, scale, left, right)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    q_gradient, k_gradient, v_gradient = _package()._flash_attn_bwd(q, k, v, o, o_gradient, logsumexp, **options)
    return q_gradient, k_gradient, v_gradient


@_backward.register_fake
def _(_, q: Tensor, k: Tensor, v: Tensor, *__) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds_q, bounds_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, bounds_q, bounds_k)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, o_gradient: Tensor, _) -> tuple[Tensor | None, ...]:
    gradients = _backward(o_gradient.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, *(None,) * 7)


_forward.register_autograd(_differentiate, setup_context=_keep)


def _options(
    bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int, scale: float, left: int, right: int
) -> dict[str, Any]:
    """What both passes are told."""
    return {
        "cu_seqlens_q": bounds_q,
        "cu_seqlens_k": bounds_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": scale,
        "causal": (left, right) == (-1, 0),
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 else None,
    }


@cache
def _package() -> ModuleType:
    """The package, told to keep what it compiles; each kernel takes it some seconds."""
    if FLASH_ATTENTION_4 not in os.environ:  # it would keep them in /tmp, or not at all
        folder = user_cache_folder() / FOLDERS[FLASH_ATTENTION_4]
        with suppress(OSError):  # where nothing can be written it keeps nothing
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[FLASH_ATTENTION_4] = str(folder)
    if FLASH_ATTENTION_4 in os.environ:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return importlib.import_module("flash_attn.cute.interface")
