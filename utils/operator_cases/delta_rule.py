"""The delta rule and its gated forms: a decay per head, or per key channel (KDA)."""

from __future__ import annotations

import torch
from torch import Tensor

from operator_cases.case import HEAD_DIM, NUM_HEADS, NUM_TOKENS, Draw, Operator, full_precision


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    return [*delta_rules(draw, cu_seqlens), *kimi_delta_attentions(draw, cu_seqlens)]


def delta_rules(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    packed = dict(cu_seqlens=cu_seqlens, output_final_state=True)

    def gated(fn, x):
        gate = dict(use_gate_in_kernel=True, A_log=x["A_log"], dt_bias=x["dt_bias"], state_v_first=True)
        beta = dict(beta=x["beta"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
        qkv = dict(q=x["q"], k=x["k"], v=x["v"], use_qk_l2norm_in_kernel=True)
        return fn(**qkv, **beta, g=x["g"], initial_state=x["state"], **gate, **packed)

    def plain(fn, x):
        return fn(x["q"], x["k"], x["v"], x["beta"].sigmoid(), initial_state=x["state"], **packed)

    num_v_heads = 2 * NUM_HEADS
    gated_inputs = draw.qkv() | {
        "v": draw.heads(num_v_heads),
        "g": draw(1, NUM_TOKENS, num_v_heads),
        "beta": draw(1, NUM_TOKENS, num_v_heads),
        "A_log": torch.linspace(-1, 3, num_v_heads, dtype=torch.float64),
        "dt_bias": draw(num_v_heads),
        "state": draw.states(num_v_heads),
    }
    inputs = draw.qkv() | {"beta": draw(1, NUM_TOKENS, NUM_HEADS), "state": draw.states()}
    gated_home, home = "fla.ops.gated_delta_rule", "fla.ops.delta_rule"
    return [
        Operator("chunk_gated_delta_rule", gated_home, "delta_rule", gated_inputs, gated),
        Operator("fused_recurrent_gated_delta_rule", gated_home, "delta_rule", gated_inputs, gated, backward=False),
        Operator("chunk_delta_rule", home, "delta_rule", inputs, plain, float32=False),
        Operator("fused_recurrent_delta_rule", home, "delta_rule", inputs, plain),
    ]


def kimi_delta_attentions(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    def attend(fn, x):
        gate = dict(use_gate_in_kernel=True, A_log=x["A_log"], dt_bias=x["dt_bias"], state_v_first=True)
        beta = dict(beta=x["beta"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
        qkv = dict(q=x["q"], k=x["k"], v=x["v"], use_qk_l2norm_in_kernel=True)
        packed = dict(initial_state=full_precision(x["state"]), output_final_state=True, cu_seqlens=cu_seqlens)
        return fn(**qkv, **beta, g=x["g"], **gate, **packed)

    num_v_heads = 2 * NUM_HEADS
    inputs = draw.qkv() | {
        "v": draw.heads(num_v_heads),
        "g": draw.heads(num_v_heads),
        "beta": draw(1, NUM_TOKENS, num_v_heads),
        "A_log": torch.linspace(-1, 3, num_v_heads, dtype=torch.float64),
        "dt_bias": draw(num_v_heads * HEAD_DIM),
        "state": draw.states(num_v_heads),
    }
    return [
        Operator("chunk_kda", "fla.ops.kda", "kda", inputs, attend),
        Operator("fused_recurrent_kda", "fla.ops.kda", "kda", inputs, attend, backward=False),
    ]
