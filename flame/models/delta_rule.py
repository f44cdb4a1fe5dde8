"""The gated delta rule for training on Hopper GPUs: FLA's `chunk_gated_delta_rule` with kernels of flame's own.

What follows on w and u takes FLA 7.0 ms for a layer of gated_deltanet_1B forward and backward (65,536 tokens), these
3.7 ms. FLA's forward writes the states of all chunks, 1.6 GB, and reads them for the outputs; here the pass over the
states computes the outputs. The backward computes the states again, as FLA's does. FLA goes on to normalise keys, to
add up gates, to compute w and u and the gradients of q and k within chunks. These kernels take bfloat16 heads of 128 or
256 key channels and a multiple of 128 value channels; others, and pieces of a row (context parallelism), go to FLA's.

FLA calls them with contiguous tensors: its autograd function sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flame.host_copy import host_copy
from flame.models.backend import find_operator
from flame.models.chunks import BT, Chunks, is_on_hopper
from flame.models.delta_rule_kernels import (
    delta_gradient_kernel,
    delta_prepare_kernel,
    delta_state_gradient_kernel,
    delta_state_kernel,
)

KEY_DIMS = (128, 256)
# The fastest on an H200: channels of the values that a program holds, its warps, and the blocks loaded ahead.
STATES = {"BV": 64, "num_warps": 4, "STAGES": 3}
OUTPUTS = {"BV": 128, "num_warps": 8, "STAGES": 2}  # and gradients of states
GRADIENTS = {"BK": 64, "BV": 64, "num_warps": 4, "STAGES": 3}
PREPARE = {"BK": 128, "num_warps": 4}
WIDE = 256  # channels of keys of which no third matrix can be loaded ahead

RULE = "fla.ops.gated_delta_rule.chunk"


def make_chunk_gated_delta_rule_fwd(original: Callable) -> Callable:
    """FLA's `chunk_gated_delta_rule_fwd`, which goes on where the kernels do not take the inputs."""

    def chunk_gated_delta_rule_fwd(
        *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple:
        """See `flame.models.delta_rule_kernels`.

        Args:
            q, k: [B, T, H, K]; v: [B, T, H, V]; g, beta: [B, T, H].
            options: FLA's further arguments, by name.

        Returns:
            The log2 decays added up within chunks, o [B, T, H, V], the inverse M [B, T, H, BT], the final states or
            None, the initial ones, and the gates' input where FLA computes the decays from it, else None.
        """
        if not takes(q, k, v, options):
            return original(q=q, k=k, v=v, g=g, beta=beta, **options)
        packed = {name: options[name] for name in ("cu_seqlens", "chunk_indices")}
        prepare = {"chunk_size": BT, "scale": find_operator("fla.ops.utils.constant", "RCP_LN2"), **packed}
        g_input = g if options.get("use_gate_in_kernel") else None
        if g_input is None:
            g = find_operator(RULE, "chunk_local_cumsum")(g, **prepare)
        else:
            parameters = {name: options[name] for name in ("A_log", "dt_bias")}
            g = find_operator(RULE, "gdn_gate_chunk_cumsum")(g=g, **parameters, **prepare)
        compute = find_operator(RULE, "chunk_gated_delta_rule_fwd_intra")
        w, u, M = compute(k=k, v=v, g=g, beta=beta, chunk_size=BT, **packed)
        chunks, initial_state = Chunks.of(q, options["cu_seqlens"]), options["initial_state"]
        state_v_first, scale = options.get("state_v_first", False), options["scale"]
        o = torch.empty_like(v)
        final_state = _new_states(q, v, chunks, state_v_first) if options["output_final_state"] else None
        with torch.cuda.device_of(q):
            prepared = _prepare(q, k, g, 1.0, scale, chunks)
            _run_states(prepared, w, u, chunks, state_v_first, initial_state, final_state, o=o, scale=scale)
        return g, o, M, final_state, initial_state, g_input

    return chunk_gated_delta_rule_fwd


def make_chunk_gated_delta_rule_bwd(original: Callable) -> Callable:
    """FLA's `chunk_gated_delta_rule_bwd`, which goes on where the kernels do not take the inputs."""

    def chunk_gated_delta_rule_bwd(
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A: Tensor,
        do: Tensor,
        dht: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, beta, g, the initial states, A_log and dt_bias.

        Args:
            q, k, v, beta: as the forward's; g: the decays that it gave; A: M.
            do: [B, T, H, V]; dht: of the final states.
            options: FLA's further arguments, by name.

        Returns:
            Of each its shape; None for the initial states, A_log and dt_bias where there are none.
        """
        if not takes(q, k, v, options):
            return original(q=q, k=k, v=v, g=g, beta=beta, A=A, do=do, dht=dht, **options)
        packed = {name: options[name] for name in ("cu_seqlens", "chunk_indices")}
        chunks, initial_state = Chunks.of(q, options["cu_seqlens"]), options["initial_state"]
        state_v_first, scale = options.get("state_v_first", False), options["scale"]
        do, dht = do.contiguous(), None if dht is None else dht.contiguous()
        w, u = find_operator(RULE, "recompute_w_u_fwd")(k=k, v=v, beta=beta, A=A, g=g, **packed)
        h, dh = (q.new_empty(_states_shape(q, v, chunks.num_chunks, state_v_first)) for _ in range(2))
        n, dn = torch.empty_like(u), torch.empty_like(do)
        dinitial = None if initial_state is None else _new_states(q, v, chunks, state_v_first)
        with torch.cuda.device_of(q):
            prepared = _prepare(q, k, g, scale, scale, chunks)
            _run_states(prepared, w, u, chunks, state_v_first, initial_state, None, h=h, n=n)
            _run_state_gradients(prepared, w, do, chunks, state_v_first, dht, dinitial, dh=dh, dn=dn)
        states = {"h": h.unflatten(0, (len(q), -1)), "dh": dh.unflatten(0, (len(q), -1))}
        dq, dk, dw, dg = find_operator(RULE, "chunk_bwd_dqkwg")(
            q=q, k=k, v=n, w=w, g=g, dv=dn, do=do, scale=scale, state_v_first=state_v_first, chunk_size=BT,
            **states, **packed,
        )  # fmt: skip
        dv, db = torch.empty_like(v), torch.empty_like(beta)
        with torch.cuda.device_of(q):
            _run_gradients(k, v, beta, g, A, chunks, dw=dw, du=dn, dk=dk, dv=dv, db=db, dg=dg)
        dg = find_operator(RULE, "chunk_local_cumsum")(dg, chunk_size=BT, reverse=True, **packed)
        dA_log, ddt_bias = None, None
        if options.get("use_gate_in_kernel"):
            parameters = {name: options[name] for name in ("A_log", "dt_bias")}
            compute = find_operator(RULE, "gdn_gate_bwd")
            dg, dA_log, ddt_bias = compute(g=options["g_input"], dyg=dg, **parameters)
        return dq, dk, dv, db, dg, dinitial, dA_log, ddt_bias

    return chunk_gated_delta_rule_bwd


def takes(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether the kernels do: bfloat16 heads of known widths in whole rows, on the kind of GPU they are for."""
    if options.get("cp_context") is not None or options.get("chunk_size", BT) != BT:
        return False
    is_bfloat16 = all(x.dtype == torch.bfloat16 for x in (q, k, v))
    is_known = q.shape[-1] in KEY_DIMS and v.shape[-1] % OUTPUTS["BV"] == 0 and q.shape[:-1] == v.shape[:-1]
    return is_bfloat16 and is_known and is_on_hopper(q) and _covers(options.get("cu_seqlens"), q)


def _covers(cu_seqlens: Tensor | None, q: Tensor) -> bool:
    """Whether the documents are known to be all of the row: what lies after the last one is loaded with its end."""
    if cu_seqlens is None:
        return True
    known = host_copy(cu_seqlens)
    values = cu_seqlens if known is None else known.values
    return values.is_cpu and len(q) == 1 and int(values[-1]) == q.shape[1]


def _states_shape(q: Tensor, v: Tensor, count: int, state_v_first: bool) -> tuple[int, ...]:
    """[count, H, K, V], or [count, H, V, K]."""
    num_heads, key_dim = q.shape[2:]
    return count, num_heads, *((v.shape[3], key_dim) if state_v_first else (key_dim, v.shape[3]))


def _new_states(q: Tensor, v: Tensor, chunks: Chunks, state_v_first: bool) -> Tensor:
    """One of each document, float32."""
    return q.new_empty(_states_shape(q, v, chunks.num_documents, state_v_first), dtype=torch.float32)


def _prepare(
    q: Tensor, k: Tensor, g: Tensor, q_scale: float, scale: float, chunks: Chunks
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q 2^G q_scale, k' [B, T, H, K], A [B, T, H, BT] and 2^G_last [chunks, H]; the backward computes them again."""
    num_heads, key_dim = q.shape[2:]
    q_decayed, k_decayed, A = torch.empty_like(q), torch.empty_like(k), q.new_empty(*q.shape[:3], BT)
    decay = g.new_empty(chunks.num_chunks, num_heads, dtype=torch.float32)
    delta_prepare_kernel[(chunks.num_chunks * num_heads,)](
        q, k, g, q_decayed, k_decayed, A, decay, chunks.cu_seqlens, chunks.indices, q_scale, scale, q.shape[1],
        H=num_heads, K=key_dim, BT=BT, **PREPARE,
    )  # fmt: skip
    return q_decayed, k_decayed, A, decay


def _run_states(
    prepared: tuple[Tensor, ...],
    w: Tensor,
    u: Tensor,
    chunks: Chunks,
    state_v_first: bool,
    h_first: Tensor | None,
    h_last: Tensor | None,
    *,
    h: Tensor | None = None,
    n: Tensor | None = None,
    o: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Fill h and n, or o, and in both cases the last states where they are wanted."""
    q_decayed, k_decayed, A, decay = prepared
    num_heads, key_dim, value_dim = *w.shape[2:], u.shape[3]
    options = STATES if o is None else OUTPUTS
    keys, values = (BT, key_dim // 2), (BT, options["BV"])
    delta_state_kernel[(chunks.num_documents * num_heads * (value_dim // options["BV"]),)](
        _matrix(k_decayed, keys), _matrix(w, keys), _matrix(u, values), decay,
        None if h is None else _states(h, state_v_first, options["BV"]), n,
        *((None, None) if o is None else (_matrix(q_decayed, keys), _matrix(A, (BT, BT)))), o,
        None if h_first is None else h_first.contiguous(), h_last,
        chunks.cu_seqlens, chunks.offsets, chunks.order, scale, w.shape[1],
        H=num_heads, K=key_dim, V=value_dim, BT=BT, STATE_V_FIRST=state_v_first, WAIT_FOR_Q=key_dim == WIDE, **options,
    )  # fmt: skip


def _run_state_gradients(
    prepared: tuple[Tensor, ...],
    w: Tensor,
    do: Tensor,
    chunks: Chunks,
    state_v_first: bool,
    dh_last: Tensor | None,
    dh_first: Tensor | None,
    *,
    dh: Tensor,
    dn: Tensor,
) -> None:
    """Fill dh and dn, and the gradients of the first states where they are wanted."""
    q_decayed, k_decayed, A, decay = prepared
    num_heads, key_dim, value_dim = *w.shape[2:], do.shape[3]
    tile = OUTPUTS["BV"]
    keys = (BT, key_dim // 2)
    delta_state_gradient_kernel[(chunks.num_documents * num_heads * (value_dim // tile),)](
        _matrix(q_decayed, keys), _matrix(k_decayed, keys), _matrix(w, keys), decay, _matrix(do, (BT, tile)),
        _matrix(A, (BT, BT)), _states(dh, state_v_first, tile), dn, dh_last, dh_first,
        chunks.cu_seqlens, chunks.offsets, chunks.order, w.shape[1],
        H=num_heads, K=key_dim, V=value_dim, BT=BT, STATE_V_FIRST=state_v_first, WAIT_FOR_Q=key_dim == WIDE, **OUTPUTS,
    )  # fmt: skip


def _run_gradients(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    M: Tensor,
    chunks: Chunks,
    *,
    dw: Tensor,
    du: Tensor,
    dk: Tensor,
    dv: Tensor,
    db: Tensor,
    dg: Tensor,
) -> None:
    """Fill dv and db, and add to dk and dg, what w and u hand back."""
    num_heads, key_dim = k.shape[2:]
    delta_gradient_kernel[(chunks.num_chunks * num_heads,)](
        k, v, beta, g, M, dw, du, dk, dv, db, dg, chunks.cu_seqlens, chunks.indices, k.shape[1],
        H=num_heads, K=key_dim, V=v.shape[3], BT=BT, **GRADIENTS,
    )  # fmt: skip


def _matrix(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """[B, T, H, D] as a matrix of B T rows."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[2] * x.shape[3]), list(block))


def _states(h: Tensor, state_v_first: bool, tile: int) -> TensorDescriptor:
    """[chunks, H, K, V] or [..., V, K] in blocks of half the keys' channels and ``tile`` of the values'."""
    block = [tile, h.shape[-1] // 2] if state_v_first else [h.shape[-2] // 2, tile]
    return TensorDescriptor.from_tensor(h.view(-1, h.shape[-1]), block)
