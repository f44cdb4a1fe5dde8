"""Linear attention with decays: per key channel (GLA, HGRN2), per head (retention), per slot (GSA)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from operator_cases.case import CU_SEQLENS, HEAD_DIM, NUM_HEADS, NUM_TOKENS, Draw, Operator, full_precision

NUM_SLOTS = 16


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    return [
        *gated_linear_attentions(draw, cu_seqlens),
        *decays_of_heads(draw, cu_seqlens),
        *gated_slot_attentions(draw, cu_seqlens),
    ]


def gated_linear_attentions(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    packed = dict(cu_seqlens=cu_seqlens, output_final_state=True)

    def chunked(fn, x):
        return fn(x["q"], x["k"], x["v"], x["g"], initial_state=full_precision(x["state"]), **packed)

    def recurrent(fn, x):
        return fn(x["q"], x["k"], x["v"], gk=x["g"], initial_state=x["state"], **packed)

    def value_decays(fn, x):
        return fn(x["q"], x["k"], x["v"], gv=x["g"], initial_state=x["state"], **packed)

    inputs = draw.qkv() | {"g": F.logsigmoid(draw.heads()) / 16, "state": draw.states()}
    strong = inputs | {"g": F.logsigmoid(draw.heads()) * 8}  # a chunk's log decay is near -400
    home = "fla.ops.gla"
    return [
        Operator("chunk_gla", home, "gla", inputs, chunked),
        Operator("chunk_gla", home, "gla", strong, chunked, label=", strong decay"),
        Operator("fused_recurrent_gla", home, "gla", inputs, recurrent),
        Operator("fused_recurrent_gla", home, "gla", inputs, value_decays, label=", decays of values"),
    ]


def decays_of_heads(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    packed = dict(cu_seqlens=cu_seqlens, output_final_state=True)

    def plain(fn, x):
        return fn(x["q"], x["k"], x["v"], initial_state=full_precision(x["state"]), **packed)

    def gated(fn, x):
        return fn(x["q"], x["k"], x["v"], g=x["g"], initial_state=full_precision(x["state"]), **packed)

    inputs = draw.qkv() | {"state": draw.states()}
    decay = {"g": F.logsigmoid(draw(1, NUM_TOKENS, NUM_HEADS))}
    return [
        Operator("chunk_simple_gla", "fla.ops.simple_gla", "simple_gla", inputs | decay, gated),
        Operator("chunk_retention", "fla.ops.retention", "retention", inputs, plain),
        Operator("fused_recurrent_retention", "fla.ops.retention", "retention", inputs, plain),
    ]


def gated_slot_attentions(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    def attend(fn, x):
        state = (full_precision(x["keys"]), full_precision(x["values"]))
        rows = [x[name] for name in "qkvsg"]
        o, (keys, values) = fn(*rows, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens)
        return o, keys, values

    num_documents = len(CU_SEQLENS) - 1
    gate = F.logsigmoid(draw(1, NUM_TOKENS, NUM_HEADS, NUM_SLOTS)) / 8
    inputs = draw.qkv() | {
        "s": 1 - gate.exp(),
        "g": gate,
        "keys": draw(num_documents, NUM_HEADS, HEAD_DIM, NUM_SLOTS),
        "values": draw(num_documents, NUM_HEADS, NUM_SLOTS, HEAD_DIM),
    }
    return [Operator(name, "fla.ops.gsa", "gsa", inputs, attend) for name in ("chunk_gsa", "fused_recurrent_gsa")]
