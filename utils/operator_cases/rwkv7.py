"""RWKV-7: the generalised delta rule, token shift and the element-wise operators around them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from operator_cases.case import CU_SEQLENS, HEAD_DIM, HIDDEN, NUM_HEADS, Draw, Operator

LOWEST_DECAY = -0.6065306597126334  # -exp(-1/2), the strongest log decay that the model can give


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    return [*_recurrences(draw, cu_seqlens), *_element_wise(draw, cu_seqlens)]


def _recurrences(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    packed = dict(cu_seqlens=cu_seqlens, output_final_state=True, scale=1.0)

    def rule(fn, x, **options):
        removal = F.normalize(x["kk"], dim=-1)
        qkv = (x["r"], x["k"], x["v"], -removal, removal * x["a"].sigmoid(), LOWEST_DECAY * x["w"].sigmoid())
        return fn(*qkv, initial_state=x["state"], **packed, **options)

    def chunked(fn, x):
        return rule(fn, x, safe_gate=True, lower_bound=LOWEST_DECAY, chunk_size=64)

    def of_rwkv7(fn, x):
        removal, decay = F.normalize(x["kk"], dim=-1), LOWEST_DECAY * x["w"].sigmoid()
        return fn(x["r"], decay, x["k"], x["v"], removal, x["a"].sigmoid(), initial_state=x["state"], **packed)

    inputs = {name: draw.heads() for name in ("r", "k", "v", "kk", "a", "w")} | {"state": draw.states()}
    home, reference = "fla.ops.generalized_delta_rule", "generalized_delta_rule"
    return [
        Operator("chunk_dplr_delta_rule", home, reference, inputs, chunked),
        Operator("fused_recurrent_dplr_delta_rule", home, reference, inputs, rule, backward=False),
        Operator("fused_mul_recurrent_rwkv7", "fla.ops.rwkv7", reference, inputs, of_rwkv7, backward=False),
    ]


def _element_wise(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    def shift(fn, x):
        return fn(x["x"], cu_seqlens, x["cache"], output_cache=True)

    def mix(fn, x):
        return fn(x["x"], x["delta"], *(x[f"x{name}"] for name in "rwkvag"))

    mixes = {f"x{name}": draw(1, 1, HIDDEN).sigmoid() for name in "rwkvag"}
    gated = {"o": draw.rows(), "r": draw.heads(), "k": draw.heads(), "r_k": draw(NUM_HEADS, HEAD_DIM)}
    gated |= {"v": draw.heads(), "g": draw.rows()}
    return [
        Operator(
            "token_shift",
            "fla.modules.token_shift",
            "token_shift",
            {"x": draw.rows(), "cache": draw(len(CU_SEQLENS) - 1, HIDDEN)},
            shift,
        ),
        Operator(
            "fused_addcmul_rwkv7",
            "fla.ops.rwkv7.fused_addcmul",
            "rwkv7",
            {"x": draw.rows(), "delta": draw.rows()} | mixes,
            mix,
        ),
        Operator(
            "fused_k_rwkv7",
            "fla.ops.rwkv7.fused_k_update",
            "rwkv7",
            {"k": draw.rows(), "a": draw.rows().sigmoid(), "ka": draw(HIDDEN)},
            lambda fn, x: fn(x["k"], x["a"], x["ka"]),
        ),
        Operator(
            "gate_output_correction",
            "fla.ops.rwkv7.gate_output_correction",
            "rwkv7",
            gated,
            lambda fn, x: fn(*(x[name] for name in ("o", "r", "k", "r_k", "v", "g"))),
        ),
    ]
