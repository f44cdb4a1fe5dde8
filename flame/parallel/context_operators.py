"""Which of FLA's operators context parallelism wraps, and the models that are made of those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from flame.errors import UserError
from flame.models.backend import runs_reference, wrap_operator
from flame.models.supported import softmax_kinds
from flame.parallel import context_attention, context_border, context_states
from flame.parallel.context import ContextParallel
from flame.parallel.degrees import CONTEXT_DEGREE, TENSOR_DEGREE, Degrees

ROTATE = "experimental.context_parallel_rotate_method"

# Model types whose mixers are made of the operators below, and nothing else that looks at other tokens.
FAMILIES = (
    *("transformer", "gla", "gated_deltanet", "delta_net", "hgrn2", "retnet", "gsa", "kda", "rwkv7"),
    *("mamba", "mamba2", "samba", "gated_deltaproduct", "stickbreaking_attn"),
)
MODES = {family: ("chunk", "fused_recurrent") for family in ("gla", "hgrn2", "gsa")}  # of attn_mode, if not chunk only
# Model types whose mixers are softmax attention or like it; of others, the layers that ``attn`` in the config lists.
ATTENTION = ("transformer", "stickbreaking_attn")

OnPieces = Callable[[ContextParallel, Callable], Callable]
_ATTENTION: dict[str, OnPieces] = {
    "allgather": context_attention.attention_over_gathered,
    "alltoall": context_attention.attention_over_heads,
}
_OPERATORS: dict[tuple[str, str], OnPieces] = {
    ("fla.modules.rotary", "RotaryEmbedding.forward"): context_attention.rotary,
    ("fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn"): context_attention.stickbreaking_over_heads,
    ("fla.modules.causal_conv1d", "causal_conv1d"): context_border.convolution,
    ("fla.modules.token_shift", "token_shift"): context_border.shift,
    ("fla.ops.gla", "chunk_gla"): context_states.decaying,
    ("fla.ops.gla", "fused_recurrent_gla"): context_states.decaying,
    ("fla.ops.simple_gla", "chunk_simple_gla"): context_states.decaying,
    ("fla.ops.retention", "chunk_retention"): context_states.retention,
    ("fla.ops.retention", "fused_recurrent_retention"): context_states.retention,  # of short rows without gradients
    ("fla.ops.gsa", "chunk_gsa"): context_states.gated_slots,
    ("fla.ops.gsa", "fused_recurrent_gsa"): context_states.gated_slots,
    ("fla.layers.mamba", "selective_scan"): context_states.selective_scan,  # flame's own, in FLA's layer
    ("fla.layers.mamba2", "ssd"): context_states.state_space_dual,  # likewise
    ("fla.ops.delta_rule", "chunk_delta_rule"): context_states.delta_rule,
}
# These exchange states by themselves where Triton runs them.
_CHAINED = (
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("fla.ops.kda", "chunk_kda"),
    ("fla.ops.generalized_delta_rule", "chunk_dplr_delta_rule"),
)
# Those that the reference backend does not have.
_TRITON_ONLY = (("fla.ops.gated_delta_product", "chunk_gated_delta_product"),)


def install_context_parallel(context: ContextParallel, rotate_method: str) -> None:
    """Wrap FLA's operators, as ``setup_backend`` left them, so that they work on pieces."""
    chained = context_states.delta_rule if runs_reference() else context_states.chained
    others = dict.fromkeys(_CHAINED, chained) | dict.fromkeys(_TRITON_ONLY, context_states.chained)
    attention = {("fla.layers.attn", "flash_attn_varlen_func"): _ATTENTION[rotate_method]}
    for (module_name, name), on_pieces in (_OPERATORS | others | attention).items():
        wrap_operator(module_name, name, functools.partial(_within_rows, context, on_pieces))


def _within_rows(context: ContextParallel, on_pieces: OnPieces, original: Callable) -> Callable:
    """``original`` while no row is in hand, as when a model is sampled from after training."""
    operator = on_pieces(context, original)

    @functools.wraps(original)
    def choose(*args: Any, **options: Any) -> Any:
        return (original if context.row is None else operator)(*args, **options)

    return choose


def check_model(config: PretrainedConfig, degrees: Degrees, rotate_method: str) -> None:
    """Refuse a model whose mixers do not know of pieces.

    Raises:
        UserError: names the families that do, the mode of theirs that does, or the heads that do not divide.
    """
    degree, family = degrees.context, config.model_type
    if family not in FAMILIES:
        is_fla = type(config).__module__.startswith("fla.")
        reason = "its operators have not been tried on pieces" if is_fla else "its mixers are not FLA's"
        raise UserError(
            f"{CONTEXT_DEGREE} = {degree}: {family} cannot be split along the sequence ({reason}); "
            f"{', '.join(FAMILIES)} can"
        )
    mode = getattr(config, "attn_mode", None) or "chunk"
    if mode not in MODES.get(family, ("chunk",)):
        raise UserError(
            f"{CONTEXT_DEGREE} = {degree}: {family} with attn_mode {mode} cannot be split along the sequence; set "
            "attn_mode to chunk in the model's config"
        )
    if family == "gated_deltaproduct" and not config.use_forget_gate:
        raise UserError(
            f"{CONTEXT_DEGREE} = {degree}: FLA's gated_deltaproduct cannot be split along the sequence without gates; "
            "set use_forget_gate to true in the model's config"
        )
    if family == "stickbreaking_attn" and rotate_method != "alltoall":
        raise UserError(
            f"{ROTATE} = {rotate_method}: FLA's stick-breaking attention takes as many keys as queries; use alltoall"
        )
    if rotate_method == "alltoall":
        for attention in [config.to_dict()] if family in ATTENTION else softmax_kinds(config):
            _check_heads(attention, degrees)


def convolution_width(config: PretrainedConfig) -> int:
    """Tokens that a model's short convolutions look at, 0 without any."""
    if not getattr(config, "use_short_conv", True):
        return 0
    return max(getattr(config, name, 0) or 0 for name in ("conv_size", "conv_kernel"))


def _check_heads(attention: dict[str, Any], degrees: Degrees) -> None:
    for key in ("num_heads", "num_kv_heads"):
        heads = attention.get(key) or attention["num_heads"]
        if heads % (degrees.context * degrees.tensor):
            raise UserError(
                f"{ROTATE} = alltoall: {CONTEXT_DEGREE} = {degrees.context} (times {TENSOR_DEGREE}) does not "
                f"divide {key} = {heads}; use allgather"
            )
