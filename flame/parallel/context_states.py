"""Recurrences over pieces of a row: each piece starts from the state that the pieces before it leave.

A recurrence is linear in its state. From an empty state the last document of a piece leaves some state, and what it
does to a state that enters it is a matrix, its transition; with both of every piece each rank finds the state that
enters its own, and runs over its piece from there. So the last document is run twice. FLA's own context parallelism
(``fla.ops.cp``), where an operator has it and Triton runs it, computes states and transitions alone the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.models.backend import find_operator
from flame.models.reference.retention import retention_decay
from flame.parallel.collectives import anchor, gather_stacked
from flame.parallel.context import ContextParallel

_REPLACED = ("initial_state", "output_final_state", "cu_seqlens_cpu", "chunk_indices", "cp_context")


def decaying(context: ContextParallel, original: Callable) -> Callable:
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, with decays g of key channels (gla) or of heads (simple gla)."""

    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, cu_seqlens: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        options = _without_states(options)
        name = "gk" if options.get("gk") is not None else "g"
        decay = options.pop("gk", None) if name == "gk" else g

        def run(start: int, **more: Any) -> tuple[Tensor, Tensor]:
            own = {} if decay is None else {name: decay[:, start:]}
            return original(q=q[:, start:], k=k[:, start:], v=v[:, start:], **own, **options, **more)

        start = context.piece.last_document
        _, state = run(start, output_final_state=True)
        transition = _total_decay(decay, options.get("g_gamma"), start, context.piece.length).to(state.dtype).exp()
        if options.get("state_v_first"):
            transition = transition.mT
        entering = entering_states(context, state, transition, torch.mul)
        return run(0, initial_state=entering, cu_seqlens=cu_seqlens)[0], None

    return recurrence


def _total_decay(decay: Tensor | None, constant: Tensor | None, start: int, end: int) -> Tensor:
    """Log decay from token ``start`` to ``end`` of every head, [1, H, K or 1, 1].

    Args:
        decay: [1, L, H, K] or [1, L, H], of every token.
        constant: [H], of any token.
    """
    total = 0.0 if constant is None else (constant * (end - start))[None, :, None]
    if decay is not None:
        summed = decay[:, start:].sum(1, dtype=torch.promote_types(decay.dtype, torch.float32))
        total = total + (summed if decay.dim() == 4 else summed[..., None])
    return total[..., None]


def retention(context: ContextParallel, original: Callable) -> Callable:
    """Retention as linear attention with a constant decay of every head, whose operator knows of pieces."""

    def chunk_retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        linear_attention = find_operator("fla.ops.simple_gla", "chunk_simple_gla")
        decay = retention_decay(q.shape[2], q.device).to(torch.promote_types(q.dtype, torch.float32))
        return linear_attention(q, k, v, g_gamma=decay, **options)

    return chunk_retention


def gated_slots(context: ContextParallel, original: Callable) -> Callable:
    """K_t = K_{t-1} diag(exp(g_t)) + k_t s_t^T and V_t = diag(exp(g_t)) V_{t-1} + s_t v_t^T of gated slot attention."""

    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, *, cu_seqlens: Tensor, **options: Any
    ) -> tuple[Tensor, tuple[None, None]]:
        options = _without_states(options)
        tokens = {"q": q, "k": k, "v": v, "s": s, "g": g}
        start = context.piece.last_document
        last = {name: x[:, start:] for name, x in tokens.items()}
        _, (keys, values) = original(**last, **options, output_final_state=True)  # [1, H, K, M] and [1, H, M, V]
        transition = _total_decay(g, None, start, context.piece.length).to(keys.dtype).exp()  # [1, H, M, 1]
        slots = torch.cat([keys.mT, values], dim=-1)
        entering = entering_states(context, slots, transition, torch.mul)
        keys, values = entering.split([keys.shape[2], values.shape[3]], dim=-1)
        first = (keys.mT.contiguous(), values.contiguous())
        return original(**tokens, **options, initial_state=first, cu_seqlens=cu_seqlens)[0], (None, None)

    return recurrence


def selective_scan(context: ContextParallel, original: Callable) -> Callable:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t of Mamba, with step sizes softplus(dt + dt_bias)."""

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        *,
        cu_seqlens: Tensor,
        **options: Any,
    ) -> tuple[Tensor, None]:
        _check_no_state(options)
        last = [tensor[:, context.piece.last_document :] for tensor in (x, dt, B, C)]
        last_x, last_dt, last_b, last_c = last
        _, state = original(last_x, last_dt, A, last_b, last_c, dt_bias=dt_bias, output_final_state=True)  # [1, D, N]
        steps = last_dt.to(state.dtype) if dt_bias is None else last_dt.to(state.dtype) + dt_bias.to(state.dtype)
        duration = F.softplus(steps).sum(1)[..., None]  # [1, D, 1]
        rates = A.to(state.dtype)
        entering = entering_states(context, state, duration, lambda own, before: (own * rates).exp() * before)
        return original(x, dt, A, B, C, D, z, dt_bias, initial_state=entering, cu_seqlens=cu_seqlens)[0], None

    return scan


def state_space_dual(context: ContextParallel, original: Callable) -> Callable:
    """S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T of Mamba-2, with decays of heads."""

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *,
        cu_seqlens: Tensor,
        **options: Any,
    ) -> tuple[Tensor, None]:
        _check_no_state(options)
        last_x, last_dt, last_b, last_c = (tensor[:, context.piece.last_document :] for tensor in (x, dt, B, C))
        _, state = original(last_x, last_dt, A, last_b, last_c, output_final_state=True)  # [1, H, N, P]
        transition = (last_dt * A).sum(1)[..., None, None].to(state.dtype).exp()
        entering = entering_states(context, state, transition, torch.mul)
        return original(x, dt, A, B, C, D, initial_state=entering, cu_seqlens=cu_seqlens)[0], None

    return scan


def delta_rule(context: ContextParallel, original: Callable) -> Callable:
    """S_t = T_t S_{t-1} + β_t k_t v_t^T, where T_t depends on keys, gates and β but on neither values nor state.

    The first run has as many columns more as there are key channels, without values and from the identity: what they
    end as is the product of the T_t.
    """

    def recurrence(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, None]:
        options = _without_states(options)
        per_token = {name: options.pop(name) for name in ("g", "gk", "beta", "a", "b") if name in options}
        tokens = {name: x for name, x in ({"q": q, "k": k, "v": v} | per_token).items() if x is not None}
        columns_first = options.get("state_v_first", False)

        last = {name: x[:, context.piece.last_document :] for name, x in tokens.items()}
        width, num_columns = k.shape[3], v.shape[3]
        dtype = torch.promote_types(k.dtype, torch.float32)
        first = torch.cat([k.new_zeros(width, num_columns, dtype=dtype), torch.eye(width, dtype=dtype).to(k.device)], 1)
        first = (first.T if columns_first else first).expand(1, v.shape[2], -1, -1).contiguous()
        last["v"] = F.pad(last["v"], (0, width))
        _, left = original(**last, **options, initial_state=first, output_final_state=True)
        state, transition = left.split([num_columns, width], dim=2 if columns_first else 3)
        through = (lambda own, before: before @ own) if columns_first else torch.matmul
        entering = entering_states(context, state, transition, through)
        return original(**tokens, **options, initial_state=entering, cu_seqlens=cu_seqlens)[0], None

    return recurrence


def chained(context: ContextParallel, original: Callable) -> Callable:
    """An operator of FLA's that exchanges states by itself."""

    def recurrence(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, None]:
        options = _without_states(options)
        return original(q=q, k=k, v=v, **options, cp_context=fla_context(context))[0], None

    return recurrence


def fla_context(context: ContextParallel) -> Any:
    """What FLA's operators are told of the row in hand; FLA keeps it for the same tensors, so for all layers."""
    build = find_operator("fla.ops.cp", "build_cp_context")
    return build(context.row.bounds, context.group, cu_seqlens_cpu=context.row.host_bounds)


def _without_states(options: dict[str, Any]) -> dict[str, Any]:
    """An operator's options but for those about states and bounds, which pieces have their own of."""
    _check_no_state(options)
    return {key: value for key, value in options.items() if key not in _REPLACED}


def _check_no_state(options: dict[str, Any]) -> None:
    assert options.get("initial_state") is None and not options.get("output_final_state"), "training keeps no state"


def entering_states(
    context: ContextParallel, state: Tensor, transition: Tensor, through: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """States before each document of this rank's piece, [N, H, ...]: that of the first may come from other ranks.

    Args:
        state: [1, H, ...] left by the piece's last document from an empty state.
        transition: what that document does to a state, for ``through(transition, state)``.
    """
    piece = context.piece
    both = gather_stacked(torch.cat([state.flatten(), transition.flatten()]), context.group)  # one collective
    states, transitions = (
        each.view(context.size, *own.shape)
        for each, own in zip(both.split([state.numel(), transition.numel()], 1), (state, transition), strict=True)
    )
    entering = torch.zeros_like(state)
    if piece.before:
        for rank in range(piece.rank):
            passed = through(transitions[rank], entering) if piece.carries[rank] else 0.0
            entering = passed + states[rank]
    entering = anchor(entering, both)
    others = entering.new_zeros(len(piece.cu_seqlens) - 2, *entering.shape[1:])
    return torch.cat([entering, others])
