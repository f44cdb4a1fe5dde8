"""Packed documents in models that are native to transformers, through its public registry of attention functions.

With position_ids that restart at each document, transformers masks between documents by itself, but with a mask of
[T, T] entries: 4 GiB for a row of 65,536 tokens. Models whose attention goes through the registry (and supports
FlashAttention, so that it says all that its mask would hold) get flame's own packed attention here instead.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from flame.errors import UserError

NAME = "flame"
_packed: ContextVar[bool] = ContextVar("packed", default=False)


def register_native_attention(varlen: Callable) -> None:
    """Enter `varlen` (with flash_attn_varlen_func's signature) under flame's name; without cu_seq_lens_q it is SDPA."""
    # Imported here: these modules are loud, and `flame.models.backend.import_fla` has loaded them quietly by now.
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs):
        cu_seqlens = kwargs.pop("cu_seq_lens_q", None)
        if cu_seqlens is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return _attend_packed(varlen, query, key, value, cu_seqlens, **kwargs), None

    def mask(*args, **kwargs) -> Tensor | None:
        return None if _packed.get() else masking_utils.sdpa_mask(*args, **kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def use_native_attention(model: nn.Module) -> None:
    """Switch a model over if it can take it: SDPA by default, and able to run FlashAttention."""
    from transformers import AttentionInterface

    if NAME not in AttentionInterface().valid_keys():
        return  # setup_backend was not called
    # transformers 5 has a setter for these two but no public way to read them.
    if model.config._attn_implementation == "sdpa" and model._supports_flash_attn:
        model.set_attn_implementation(NAME)


def leave_native_attention(model: nn.Module) -> None:
    """Back to SDPA with a mask of [T, T] entries, for models that do not pass the documents' bounds to attention."""
    model.set_attn_implementation("sdpa")


def has_native_attention(model: nn.Module) -> bool:
    return model.config._attn_implementation == NAME


def native_packing_arguments(model: nn.Module, cu_seqlens: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """What tells a model of transformers about the documents of a row, beside its token ids.

    Attention that is not flame's finds documents by their restarting positions, and masks between them. Models that
    pass on what they do not know get all that transformers' own collator of packed documents adds: flame's attention
    and linear attention read cu_seq_lens_q, convolutions and state-space layers seq_idx.
    """
    arguments = {"position_ids": document_position_ids(cu_seqlens, num_tokens)}
    parameters = inspect.signature(model.get_decoder().forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        arguments["seq_idx"] = document_indices(cu_seqlens, num_tokens).int()
    return arguments


def document_position_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Positions that restart at each document, int64 [1, num_tokens]; computed on cu_seqlens' device."""
    position = torch.arange(num_tokens, device=cu_seqlens.device)
    return position - cu_seqlens.long()[document_indices(cu_seqlens, num_tokens)]


def document_indices(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Number of the document that each token belongs to, int64 [1, num_tokens]; computed on cu_seqlens' device."""
    position = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.long(), position, right=True)[None] - 1


@contextlib.contextmanager
def without_mask(active: bool) -> Iterator[None]:
    """Within, when `active`, models do not build the mask that packed attention has no use for."""
    token = _packed.set(active)
    try:
        yield
    finally:
        _packed.reset(token)


def _attend_packed(
    varlen: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """[1, H, T, D] queries over [1, Hkv, T, D] keys and values to [1, T, H, D]."""
    extras = {
        "attention dropout": dropout,
        "softcap": softcap,
        "attention sinks": s_aux,
        "position bias": position_bias,
    }
    for name, value_given in extras.items():
        if value_given is not None and (name != "attention dropout" or value_given):
            raise UserError(
                f"packed documents do not go together with {name} in this model's attention; "
                "turn one of them off, in the model's config or with training.varlen"
            )
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, H, D]
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    o = varlen(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        len(q),
        len(k),
        softmax_scale=scaling,
        causal=True,
        window_size=window,
    )
    return o[None]
