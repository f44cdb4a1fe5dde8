"""FLA's operators over pieces of a row: each asks the ranks before it for what its own piece lacks.

A recurrence runs twice over the last document of a piece: once from an empty state, which together with what the piece
does to a state that enters it (its transition) gives the state that leaves it, whatever enters; all ranks then know
every state that leaves and find the one that enters theirs. The second run starts from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from flame.errors import UserError
from flame.models.backend import wrap_operator
from flame.parallel.collectives import anchor, exchange, gather_stacked
from flame.parallel.context import ContextParallel
from flame.parallel.degrees import Degrees

# Model types whose mixers are made of the operators below.
FAMILIES = ("transformer", "gla", "gated_deltanet", "delta_net")
MODES = {"gla": ("chunk", "fused_recurrent")}  # of attn_mode, where more than chunk is made of them
DEGREE = "experimental.context_parallel_degree"


def install_context_parallel(context: ContextParallel, rotate_method: str) -> None:
    """Wrap FLA's operators, as ``setup_backend`` left them, so that they work on pieces."""

    def wrap(module_name: str, name: str, on_pieces: Callable[[ContextParallel, Callable], Callable]) -> None:
        wrap_operator(module_name, name, partial(_within_rows, context, on_pieces))

    attention = {"allgather": _attention_over_gathered, "alltoall": _attention_over_heads}[rotate_method]
    wrap("fla.layers.attn", "flash_attn_varlen_func", attention)
    wrap("fla.modules.rotary", "RotaryEmbedding.forward", _rotary)
    wrap("fla.modules.causal_conv1d", "causal_conv1d", _convolution)
    for name in ("chunk_gla", "fused_recurrent_gla"):
        wrap("fla.ops.gla", name, _decaying_recurrence)
    wrap("fla.ops.delta_rule", "chunk_delta_rule", _delta_rule)
    wrap("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _delta_rule)


def _within_rows(context: ContextParallel, on_pieces: Callable, original: Callable) -> Callable:
    """``original`` while no row is in hand, as when a model is sampled from after training."""
    operator = on_pieces(context, original)

    @functools.wraps(original)
    def choose(*args: Any, **options: Any) -> Any:
        return (original if context.piece is None else operator)(*args, **options)

    return choose


def check_model(config: PretrainedConfig, degrees: Degrees, rotate_method: str) -> None:
    """Refuse a model whose mixers do not know of pieces.

    Raises:
        UserError: names the families that do, the mode of theirs that does, or the heads that do not divide.
    """
    degree, family = degrees.context, config.model_type
    if family not in FAMILIES:
        raise UserError(
            f"{DEGREE} = {degree}: {family} cannot be split along the sequence yet; {', '.join(FAMILIES)} can"
        )
    mode = getattr(config, "attn_mode", "chunk")
    if mode not in MODES.get(family, ("chunk",)):
        raise UserError(
            f"{DEGREE} = {degree}: {family} with attn_mode {mode} cannot be split along the sequence; set attn_mode to "
            "chunk in the model's config"
        )
    attention = config.to_dict() if family == "transformer" else getattr(config, "attn", None)
    if attention and rotate_method == "alltoall":
        for key in ("num_heads", "num_kv_heads"):
            heads = attention.get(key) or attention["num_heads"]
            if heads % (degree * degrees.tensor):
                raise UserError(
                    f"experimental.context_parallel_rotate_method = alltoall: {DEGREE} = {degree} (times "
                    f"training.tensor_parallel_degree) does not divide {key} = {heads}; use allgather"
                )


def _convolution(context: ContextParallel, original: Callable) -> Callable:
    def causal_conv1d(x: Tensor, weight: Tensor, *args: Any, cu_seqlens: Tensor | None = None, **options: Any):
        piece, width = context.piece, weight.shape[-1]
        tails = gather_stacked(x[0, -width:], context.group)  # [ranks, W, D]
        reach = min(piece.before, width)
        mask = torch.arange(width, device=x.device) >= width - reach
        previous = torch.where(mask[:, None], tails[max(piece.rank - 1, 0)], 0.0)  # [W, D]
        others = previous.new_zeros(len(piece.cu_seqlens) - 2, *previous.t().shape)
        options["initial_state"] = torch.cat([previous.t()[None], others])  # [N, D, W]
        return original(x, weight, *args, cu_seqlens=cu_seqlens, **options)

    return causal_conv1d


def _rotary(context: ContextParallel, original: Callable) -> Callable:
    def forward(module: Any, q: Tensor, k: Tensor, seqlen_offset: int = 0, *args: Any, **options: Any):
        piece = context.piece
        offsets = torch.zeros(len(piece.cu_seqlens) - 1, dtype=torch.int32, device=q.device)
        offsets[0] += piece.before
        options["max_seqlen"] = max(options.get("max_seqlen") or 0, context.size * piece.length)
        return original(module, q, k, offsets, *args, **options)

    return forward


def _attention_over_gathered(context: ContextParallel, original: Callable) -> Callable:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Tensor:
        piece = context.piece
        own = slice(piece.start - piece.before, piece.start + piece.length)
        k, v = (gather_stacked(each, context.group).flatten(0, 1)[own] for each in (k, v))
        cu_seqlens_k = cu_seqlens_q + piece.before
        cu_seqlens_k[0] = 0
        return original(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k + piece.before, **options)

    return flash_attn_varlen_func


def _attention_over_heads(context: ContextParallel, original: Callable) -> Callable:
    """Exchange a piece of all heads for all pieces of some heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""

    def to_heads(x: Tensor) -> Tensor:  # [L, H, D] -> [ranks L, H/ranks, D]
        return exchange(x.unflatten(1, (context.size, -1)).movedim(1, 0), context.group).flatten(0, 1)

    def to_pieces(x: Tensor) -> Tensor:  # [ranks L, H/ranks, D] -> [L, H, D]
        return exchange(x.unflatten(0, (context.size, -1)), context.group).movedim(0, 1).flatten(1, 2)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Tensor:
        bounds = context.row_bounds
        longest = max_seqlen_q * context.size
        q, k, v = map(to_heads, (q, k, v))
        return to_pieces(original(q, k, v, bounds, bounds, longest, longest, **options))

    return flash_attn_varlen_func


def _decaying_recurrence(context: ContextParallel, original: Callable) -> Callable:
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T."""

    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, cu_seqlens: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        name = "gk" if "gk" in options else "g"
        decay = options.pop("gk", g)
        _check_no_state(options)
        options = {key: value for key, value in options.items() if key not in _REPLACED}

        def run(start: int, **more: Any):
            tokens = {"q": q[:, start:], "k": k[:, start:], "v": v[:, start:], name: decay[:, start:]}
            return original(**tokens, **options, **more)

        start = context.piece.last_document
        _, state = run(start, output_final_state=True)
        transition = decay[:, start:].float().sum(1).exp()[..., None]  # [1, H, K, 1]
        if options.get("state_v_first"):
            transition = transition.mT
        entering = _entering_state(context, state, transition, lambda through, before: through * before)
        return run(0, initial_state=entering, cu_seqlens=cu_seqlens)[0], None

    return recurrence


def _delta_rule(context: ContextParallel, original: Callable) -> Callable:
    """S_t = exp(g_t) (I − β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T."""

    def recurrence(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, None]:
        _check_no_state(options)
        per_token = {key: options.pop(key) for key in ("g", "beta") if options.get(key) is not None}
        options = {key: value for key, value in options.items() if key not in _REPLACED}

        def run(start: int, v: Tensor, **more: Any):
            tokens = {key: value[:, start:] for key, value in ({"q": q, "k": k, "v": v} | per_token).items()}
            return original(**tokens, **options, **more)

        start = context.piece.last_document
        _, state = run(start, v, output_final_state=True)
        num_heads, width = v.shape[2], k.shape[3]
        eye = torch.eye(width, device=k.device, dtype=state.dtype).expand(1, num_heads, width, width)
        nothing = v.new_zeros(*v.shape[:3], width)
        _, transition = run(start, nothing, initial_state=eye.contiguous(), output_final_state=True)  # [1, H, K, K]
        through = (lambda own, before: before @ own) if options.get("state_v_first") else torch.matmul
        entering = _entering_state(context, state, transition, through)
        return run(0, v, initial_state=entering, cu_seqlens=cu_seqlens)[0], None

    return recurrence


_REPLACED = ("initial_state", "output_final_state", "cu_seqlens_cpu", "chunk_indices", "cp_context")


def _check_no_state(options: dict[str, Any]) -> None:
    assert options.get("initial_state") is None and not options.get("output_final_state"), "training keeps no state"


def _entering_state(
    context: ContextParallel, state: Tensor, transition: Tensor, through: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """States before each document of this rank's piece, [N, H, ...]: that of the first may come from other ranks.

    Args:
        state: [1, H, ...] left by the piece's last document from an empty state.
        transition: what that document does to a state, for ``through(transition, state)``.
    """
    piece = context.piece
    states, transitions = gather_stacked(state, context.group), gather_stacked(transition, context.group)
    entering = torch.zeros_like(state)
    if piece.before:
        for rank in range(piece.rank):
            passed = through(transitions[rank], entering) if piece.carries[rank] else 0.0
            entering = passed + states[rank]
    entering = anchor(entering, states, transitions)
    others = entering.new_zeros(len(piece.cu_seqlens) - 2, *entering.shape[1:])
    return torch.cat([entering, others])
