"""Softmax attention for FLA's layers and transformers' models: which code computes it.

`Attention` has replacements for `flash_attn_func` and `flash_attn_varlen_func`, each by one of several backends:

- varlen: torch's variable-length FlashAttention-2 (CUDA, half precision); no host synchronisation.
- fa3: the same function of torch's, with FlashAttention-3 put in place of its kernels.
- fa4: the `flash_attn.cute` package, FlashAttention-4.
- flash: the `flash_attn` package.
- flex: FlexAttention with a document mask, compiled.
- sdpa: `scaled_dot_product_attention` per group of documents of similar length; exact document isolation on any device.
  On CUDA it reads the document bounds back to the host.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flame.config import ATTENTION_BACKENDS
from flame.errors import UserError
from flame.models.attention_kernels import (
    Documents,
    Window,
    dense_sdpa,
    fits_flash,
    grouped_sdpa,
    varlen_attention,
)
from flame.models.flash_attention_4 import flash_attention_4, takes_heads
from flame.models.flex_attention import FlexAttention

# The module that each needs, torch's name of the implementation, and the compute capabilities (major) that run it.
_FLASH_MODULES = {
    "flash": ("flash_attn.flash_attn_interface", None, ()),
    "fa3": ("flash_attn_interface", "FA3", (9,)),
    "fa4": ("flash_attn.cute.interface", None, (9, 10)),
}
# What plans reckon with: they launch no kernel, and a machine that plans need not have what the job's GPUs have. Others
# also keep their inputs, the output, and a number for each query and head.
PLANNED_BACKEND = "varlen"


def resolve_attention_backend(name: str, device_type: str) -> str:
    """The backend that `model.attention_backend` stands for on a device type ("cpu", "cuda").

    Raises:
        UserError: an unknown name, or one that cannot run there; says which can.
    """
    if name not in ATTENTION_BACKENDS:
        raise UserError(f"model.attention_backend = {name!r}; allowed: {', '.join(ATTENTION_BACKENDS)}")
    if name == "auto":
        return default_attention_backend(device_type)
    reason = why_unavailable(name, device_type)
    if reason is not None:
        raise UserError(
            f"model.attention_backend = {name!r} {reason}; available here: "
            f"{', '.join(available_attention_backends(device_type))}"
        )
    return name


def default_attention_backend(device_type: str) -> str:
    """What "auto" is before anything is measured, and where nothing is."""
    if device_type != "cuda":
        return "sdpa"
    return "varlen" if why_unavailable("flash", device_type) else "flash"


def available_attention_backends(device_type: str) -> list[str]:
    """The backends that can run on a device type here."""
    names = (name for name in ATTENTION_BACKENDS if name != "auto")
    return [name for name in names if why_unavailable(name, device_type) is None]


def why_unavailable(name: str, device_type: str) -> str | None:
    """Why a backend cannot run on a device type here, in words that follow its name; None when it can."""
    if name == "sdpa":
        return None
    if device_type != "cuda":
        return f"needs a CUDA device, this is {device_type}"
    if name in _FLASH_MODULES:
        module, implementation, capabilities = _FLASH_MODULES[name]
        if not _has_module(module):
            return f"needs the module {module}, which is not installed"
        if implementation and implementation not in _flash_implementations():
            return f"needs a release of torch that can call {implementation}"
        if capabilities and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in capabilities:
            return f"needs a GPU of compute capability {' or '.join(f'{major}.x' for major in capabilities)}"
    return None


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a package around it
        return False


def _flash_implementations() -> list[str]:
    # Without a way back from them they cannot be compared with others.
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        return []
    return torch.nn.attention.list_flash_attention_impls()


def takes_unequal_lengths(backend: str) -> bool:
    """Whether queries may be fewer than keys, as they are over the pieces of a sequence."""
    return backend != "flex"


class Attention:
    """Attention with the signatures of the flash_attn package, by a backend that may change later.

    Args:
        backend: a resolved one.
        context_len: longest document, in tokens, of a row that packs several; FLA's layers only know the row's length.

    Attributes:
        backend: in use.
        dense: stands for flash_attn_func.
        varlen: stands for flash_attn_varlen_func.
    """

    def __init__(self, backend: str, context_len: int | None = None):
        # Plain functions, whose module and kind `flame.models.compiled` knows them by.
        self.dense, self.varlen = _dense_function(self), _varlen_function(self, context_len)
        self.use(backend)

    def use(self, backend: str) -> None:
        """Compute by another backend from here on. FlashAttention's implementation is the process's, not this one's."""
        _use_flash_implementation(_FLASH_MODULES.get(backend, (None, None))[1])
        self.backend = backend
        self.run_packed, self.run_dense = _kernels(backend)

    def takes(self, q: Tensor, v: Tensor) -> bool:
        """Whether the backend has kernels for heads and data types like these."""
        return self.backend == "flex" or (fits_flash(q, v) and (self.backend != "fa4" or takes_heads(q, v)))


def make_attention(backend: str, context_len: int | None = None) -> tuple[Callable, Callable]:
    """(dense, varlen) functions of an `Attention`."""
    attention = Attention(backend, context_len)
    return attention.dense, attention.varlen


def _dense_function(attention: Attention) -> Callable:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Attention of q [B, Tq, H, D] over k, v [B, Tk, Hkv, D]; Tq queries are the last of Tk positions."""
        # Decoding, sampling and validation gain nothing by special kernels, some of which compile for each length.
        is_training = torch.is_grad_enabled() and q.shape[1] == k.shape[1]
        fits = is_training and fits_flash(q, v) and attention.takes(q, v)
        run = attention.run_dense if fits else dense_sdpa
        return run(q, k, v, softmax_scale, Window.of(causal, window_size))

    return flash_attn_func


def _varlen_function(attention: Attention, context_len: int | None) -> Callable:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Attention within documents of q [Tq, H, D] over k, v [Tk, Hkv, D]."""
        window = Window.of(causal, window_size)
        num_documents = len(cu_seqlens_q) - 1
        longest_q = _longest(max_seqlen_q, len(q), num_documents, context_len)
        longest_k = _longest(max_seqlen_k, len(k), num_documents, context_len)
        documents = Documents(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
        fits = documents.have_all_queries or takes_unequal_lengths(attention.backend)
        fits = fits and attention.takes(q, v)
        return (attention.run_packed if fits else grouped_sdpa)(q, k, v, documents, softmax_scale, window)

    return flash_attn_varlen_func


def _longest(max_seqlen: int, num_tokens: int, num_documents: int, context_len: int | None) -> int:
    if num_documents == 1:
        return num_tokens
    # FLA passes the whole row's length (or max_position_embeddings) for packed rows: an upper bound only.
    if max_seqlen >= num_tokens and context_len is not None:
        return min(num_tokens, context_len)
    return min(max_seqlen, num_tokens)


def _kernels(backend: str) -> tuple[Callable, Callable]:
    """The packed and the dense form of a backend."""
    if backend == "flash":
        return _flash_packed, _flash_dense
    if backend == "flex":
        flex = FlexAttention()
        return flex, DenseRows(flex)
    if backend == "fa4":
        return flash_attention_4, DenseRows(flash_attention_4)
    return (grouped_sdpa if backend == "sdpa" else varlen_attention), dense_sdpa


class DenseRows:
    """Rows of a batch as documents of a packed one."""

    def __init__(self, packed: Callable):
        self._packed = packed
        self._bounds: dict[tuple[Any, ...], Tensor] = {}  # the tensor itself tells a mask from another

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: Window) -> Tensor:
        num_rows, length = q.shape[:2]
        key = (num_rows, length, q.device)
        if key not in self._bounds:
            self._bounds[key] = torch.arange(num_rows + 1, device=q.device, dtype=torch.int32) * length
        bounds = self._bounds[key]
        documents = Documents(bounds, bounds, length, length)
        o = self._packed(*(x.flatten(0, 1) for x in (q, k, v)), documents, scale, window)
        return o.unflatten(0, (num_rows, length))


def _flash_packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: Window) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    bounds = (documents.bounds_q.int(), documents.bounds_k.int())
    longest = (documents.longest_q, documents.longest_k)
    return flash_attn_varlen_func(q, k, v, *bounds, *longest, **_flash_options(scale, window))


def _flash_dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: Window) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, **_flash_options(scale, window))


def _flash_options(scale: float | None, window: Window) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "causal": window.right == 0,
        "window_size": (window.left, window.right),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _use_flash_implementation(name: str | None) -> None:
    """Have torch call "FA3" or (None) its own FlashAttention-2, in `varlen_attn` and elsewhere."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if name == current:
        return
    if name is None:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        torch.nn.attention.activate_flash_attention_impl(name)
