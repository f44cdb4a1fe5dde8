"""The training forward: token ids and shifted labels in, the sum of the losses out, for any causal LM.

`attach_training_forward(model)` puts it in place of `model.forward`, so that `model(...)` runs it inside the hooks that
FSDP hangs on the root module (parameters gathered, output projection included), and names no parameter anew.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from flame.errors import UserError
from flame.models.backend import find_operator
from flame.models.native_attention import (
    has_native_attention,
    native_packing_arguments,
    use_native_attention,
    without_mask,
)
from flame.models.native_recurrence import use_packed_recurrence

IGNORE_INDEX = -100
# FLA's weight of the l2warp penalty on each token's largest logit, relative to the mean loss.
L2WARP_PENALTY = 1e-4


@dataclass(frozen=True)
class HeadOptions:
    """What a model does to its logits before the cross entropy.

    Attributes:
        logit_scale: factor of the logits.
        logit_softcapping: c in c tanh(logits / c), after the factor; None for no cap.
        l2warp_penalty: times a row's largest logit is added to the gradient of that logit; 0 for nothing.
    """

    logit_scale: float = 1.0
    logit_softcapping: float | None = None
    l2warp_penalty: float = 0.0


HeadLoss = Callable[[Tensor, nn.Linear, Tensor, HeadOptions], Tensor]
"""(last hidden states [B, T, D], output projection, labels [B, T], options) -> sum of the token losses."""


def attach_training_forward(model: nn.Module, loss: HeadLoss | None = None) -> nn.Module:
    """Make `model(input_ids, labels=..., cu_seqlens=...)` return the sum of the token losses (float32 scalar).

    input_ids and labels are int64 [B, T]; labels are already shifted, -100 is no target. cu_seqlens is int32 [N + 1],
    the document bounds of a packed row (B = 1), or None. Calls without labels reach the model's own forward.
    `loss` takes the place of `head_loss(model)`, for layouts that split hidden states or vocabulary.

    Raises:
        UserError: a model whose loss this would not reproduce (see `check_loss_support`).
    """
    check_loss_support(model)
    if not is_of_fla(model):
        use_native_attention(model)
        use_packed_recurrence(model)
    own_forward, loss = model.forward, loss or head_loss(model)

    def forward(self: nn.Module, input_ids: Tensor, labels: Tensor | None = None, **kwargs) -> Tensor:
        if labels is None:
            return own_forward(input_ids, **kwargs)
        return training_loss(self, input_ids, labels, **kwargs, loss=loss)

    model.forward = types.MethodType(forward, model)
    return model


def training_loss(
    model: nn.Module, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, *, loss: HeadLoss
) -> Tensor:
    """Sum of the losses over valid targets, auxiliary terms included; see `attach_training_forward`."""
    packing = packing_arguments(model, input_ids, cu_seqlens)
    with without_mask(has_native_attention(model) and cu_seqlens is not None):
        hidden_states = model.get_decoder()(input_ids=input_ids, use_cache=False, return_dict=False, **packing)[0]
    return loss(hidden_states, model.get_output_embeddings(), labels, head_options(model))


def head_loss(model: nn.Module) -> HeadLoss:
    """The loss of whole hidden states through a whole output projection."""
    fuses = (getattr(model.config, name, False) for name in ("fuse_cross_entropy", "fuse_linear_cross_entropy"))
    return _loss_of_all_logits if is_of_fla(model) and not any(fuses) else _loss_by_blocks


def head_options(model: nn.Module) -> HeadOptions:
    """What the model does to its logits."""
    config = model.config
    if is_of_fla(model):
        return HeadOptions(l2warp_penalty=L2WARP_PENALTY if getattr(config, "use_l2warp", False) else 0.0)
    return HeadOptions(_logit_scale(config), getattr(config, "final_logit_softcapping", None))


def check_loss_support(model: nn.Module) -> None:
    """Refuse a model whose training loss is more than the cross entropy of its output projection.

    Raises:
        UserError: an encoder-decoder, a router loss, an output scaling that is not known here, no output projection.
    """
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; flame trains decoder-only causal language models")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    # A head that is called "decoder" is what get_decoder finds first.
    if decoder in (None, model, model.get_output_embeddings()):
        raise UserError(f"{name} has no decoder apart from its head (get_decoder); flame cannot compute its loss")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise UserError(
            f"{name} has no linear output projection (get_output_embeddings); flame cannot compute its loss"
        )
    if is_of_fla(model) and config.model_type == "mom" and config.aux_loss_scale:
        raise UserError(
            "mom adds a load-balancing loss, which flame does not have; set aux_loss_scale to 0 in its config"
        )
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise UserError(
            f"{name} adds a router loss, which flame does not have; set output_router_logits to false in its config"
        )
    for key in _UNKNOWN_SCALINGS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise UserError(f"{name} scales its logits by {key} = {getattr(config, key)}, which flame does not have")


_UNKNOWN_SCALINGS = ("lm_head_multiplier", "output_multiplier_scale", "mup_width_multiplier", "dim_model_base")


def is_of_fla(module: nn.Module) -> bool:
    """Whether a module's class, whatever wraps it, comes from flash-linear-attention; its models take cu_seqlens."""
    return any(cls.__module__.startswith("fla.") for cls in type(module).__mro__)


def takes_cu_seqlens(model: nn.Module) -> bool:
    """Whether the decoder has an argument cu_seqlens of its own, as FLA's models and custom ones have.

    One that would only disappear in ``**kwargs`` does not count.
    """
    return is_of_fla(model) or "cu_seqlens" in inspect.signature(model.get_decoder().forward).parameters


def packing_arguments(model: nn.Module, input_ids: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """What tells a model's decoder where the documents of a row are: cu_seqlens, positions, or nothing."""
    if cu_seqlens is None:
        return {}
    if takes_cu_seqlens(model):
        return {"cu_seqlens": cu_seqlens}
    return native_packing_arguments(model, cu_seqlens, input_ids.shape[1])


def _logit_scale(config) -> float:
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)


def _loss_by_blocks(hidden_states: Tensor, head: nn.Linear, labels: Tensor, options: HeadOptions) -> Tensor:
    """The logits are never all in memory; by the operator that the backend has put in place."""
    operator = find_operator("fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss")
    return operator(
        hidden_states.flatten(0, 1),
        labels.flatten(),
        head.weight,
        head.bias,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        logit_scale=options.logit_scale,
        logit_softcapping=options.logit_softcapping,
        use_l2warp=options.l2warp_penalty > 0,
        l2_penalty_factor=_of_a_sum(options.l2warp_penalty, labels),
    )


def _loss_of_all_logits(hidden_states: Tensor, head: nn.Linear, labels: Tensor, options: HeadOptions) -> Tensor:
    """What FLA does where a config turns its fused losses off."""
    from fla.modules.l2warp import l2_warp

    logits = head(hidden_states)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    penalty = _of_a_sum(options.l2warp_penalty, labels)
    return l2_warp(loss, logits, penalty) if penalty else loss


def _of_a_sum(penalty: float, labels: Tensor) -> float:
    """A penalty for FLA, which divides it by the number of tokens."""
    return penalty * labels.numel()
