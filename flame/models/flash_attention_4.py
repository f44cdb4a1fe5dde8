"""FlashAttention-4 over packed documents (arXiv:2603.05451): the `flash_attn.cute` package, for Hopper and newer GPUs.

Its forward and backward passes are operators of torch's here, so that activation checkpointing can keep what attention
gives, and compiled graphs never look inside. torch's own way to the package (`activate_flash_attention_impl("FA4")`,
torch 2.11) fits no release after 4.0.0b16 and has no windows backward.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flame.launch.ahead import wait_until_compiled
from flame.launch.caches import FLASH_ATTENTION_4, FLASH_ATTENTION_4_SWITCH, flash_attention_4_cache
from flame.launch.works import ATTENTION_BACKWARD, ATTENTION_FORWARD
from flame.models.attention_kernels import Documents, Window, pad_heads

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0  # for what this process can compile in less


def flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window
) -> Tensor:
    """A packed form of attention, see `flame.models.attention_kernels`, for heads that `takes_heads`."""
    return _forward(*_arguments(q, k, v, documents, scale, window))[0][..., : v.shape[-1]]


def compile_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window
) -> Tensor:
    """Have the package compile and keep what `flash_attention_4` runs forward, in a process that runs nothing.

    The tensors are without memory, and a mode for such (torch's FakeTensorMode) is on, by which the package knows.
    """
    return _run_forward(*_arguments(q, k, v, documents, scale, window))[0]


def compile_backward(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window
) -> Tensor:
    """`compile_forward` for what `flash_attention_4` runs backward."""
    arguments = _arguments(q, k, v, documents, scale, window)
    o, logsumexp = _forward(*arguments)  # of tensors without memory what they look like
    _run_backward(torch.empty_like(o), *arguments[:3], o, logsumexp, *arguments[3:])
    return o


def keeps_kernels() -> bool:
    """Whether the package keeps what it compiles for other processes."""
    _set_up_cache()
    return os.environ.get(FLASH_ATTENTION_4_SWITCH) == "1"


def takes_heads(q: Tensor, v: Tensor) -> bool:
    """Whether the package has kernels for heads as wide as these on this GPU."""
    widths = tuple(x.shape[-1] + -x.shape[-1] % 8 for x in (q, v))
    if max(widths) <= 128:
        return True
    if _generation(q.device) == 9:
        return max(widths) <= 256
    return widths in ((192, 128), (256, 256))


def _generation(device: torch.device) -> int:
    """The GPU's compute capability (major); the package's own variable stands for one that is not to be seen."""
    if kind := os.environ.get("FLASH_ATTENTION_ARCH"):
        return int(re.search(r"\d+", kind)[0]) // 10
    return torch.cuda.get_device_capability(device)[0]


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window
) -> tuple[Any, ...]:
    """Of `_forward`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (pad_heads(x, -x.shape[-1] % 8) for x in (q, k, v))  # the kernels take multiples of 8
    bounds = (documents.bounds_q.int(), documents.bounds_k.int())
    return q, k, v, *bounds, documents.longest_q, documents.longest_k, scale, window.left, window.right


def _run_forward(
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
    o, logsumexp, *_ = _package(ATTENTION_FORWARD)._flash_attn_fwd(q, k, v, return_lse=True, **options)
    return o, logsumexp


_forward = torch.library.custom_op("flame::flash_attention_4", _run_forward, mutates_args=())


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    return q.new_empty(num_tokens, num_heads, v.shape[-1]), q.new_empty(num_heads, num_tokens, dtype=torch.float32)


def _run_backward(
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
    q_gradient, k_gradient, v_gradient = _package(ATTENTION_BACKWARD)._flash_attn_bwd(
        q, k, v, o, o_gradient, logsumexp, **options
    )
    return q_gradient, k_gradient, v_gradient


_backward = torch.library.custom_op("flame::flash_attention_4_backward", _run_backward, mutates_args=())


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
def _package(work: str) -> ModuleType:
    """The package, once the process that compiles it beside this start (`flame.launch.works`) has done its work."""
    _set_up_cache()
    package = importlib.import_module("flash_attn.cute.interface")
    start = time.monotonic()
    if told := wait_until_compiled(work, os.environ, LONGEST_WAIT_S):
        logger.info("%s; waited for %.1f s", told, time.monotonic() - start)
    return package


def _set_up_cache() -> None:
    """Tell the package, which is yet to be imported, to keep what it compiles; each kernel takes it some seconds."""
    if FLASH_ATTENTION_4 not in os.environ:  # it would keep them in /tmp, or not at all
        folder = flash_attention_4_cache(os.environ)
        with suppress(OSError):  # where nothing can be written it keeps nothing
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[FLASH_ATTENTION_4] = str(folder)
    if FLASH_ATTENTION_4 in os.environ:
        os.environ.setdefault(FLASH_ATTENTION_4_SWITCH, "1")
