"""Gated slot attention (arXiv:2409.07146): two passes of gated linear attention with a softmax over slots between.

Per head, M slots hold keys and values that forget with log decays g_t [M] and are written with strengths s_t [M]:

    K_t = K_{t-1} diag(exp(g_t)) + k_t s_t^T  [K, M],    V_t = diag(exp(g_t)) V_{t-1} + s_t v_t^T  [M, V]
    o_t = V_t^T softmax(scale * K_t^T q_t)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flame.errors import UserError
from flame.models.reference.gla import fused_recurrent_gla
from flame.models.reference.packing import compute_dtype

States = tuple[Tensor, Tensor]


def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, States | tuple[None, None]]:
    """Gated slot attention over packed documents.

    Args:
        q: [B, T, HQ, K]; k: [B, T, H, K]; v: [B, T, H, V]; HQ a multiple of H: query head i reads head i // (HQ // H).
        s: [B, T, H, M] writing strengths; g: [B, T, H, M] log decays of slots.
        scale: factor of the slots' scores, K**-0.5 by default.
        initial_state: keys [N, H, K, M] and values [N, H, M, V] of the slots.
        cu_seqlens: [N + 1] document bounds of one packed row; without it each row is a document.
        checkpoint_level, cu_seqlens_cpu, chunk_size: of FLA's kernels, not needed here.

    Returns:
        o [B, T, HQ, V] in q's dtype, and the final slots (float32, laid out like `initial_state`) or two None.
    """
    if g is None:
        raise UserError("the reference backend has gated slot attention with forget gates (g) only")
    if q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads is not a multiple of {k.shape[2]} key heads")
    out_dtype, num_groups = q.dtype, q.shape[2] // k.shape[2]
    # Both passes in one dtype: the scores between them are as precise as the states.
    q, k, v, s, g = (x.to(compute_dtype(q, k, v, s, g)) for x in (q, k, v, s, g))
    k, v, s, g = (x.repeat_interleave(num_groups, dim=2) for x in (k, v, s, g))
    keys, values = initial_state or (None, None)
    if num_groups > 1 and keys is not None:
        keys, values = (x.repeat_interleave(num_groups, dim=1) for x in (keys, values))
    options = dict(output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    scores, keys = fused_recurrent_gla(q, k, s, gv=g, scale=scale, initial_state=keys, **options)
    o, values = fused_recurrent_gla(scores.softmax(-1), s, v, gk=g, scale=1.0, initial_state=values, **options)
    if output_final_state:  # heads of a group hold the same slots
        keys, values = keys[:, ::num_groups], values[:, ::num_groups]
    return o.to(out_dtype), (keys, values)


def fused_recurrent_gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, reverse: bool = False, **options: Any
) -> tuple[Tensor, States | tuple[None, None]]:
    """`chunk_gsa` behind the signature of FLA's recurrent kernel."""
    if reverse:
        raise UserError("the reference backend has gated slot attention forward in time only")
    return chunk_gsa(q, k, v, s, g, **options)
