"""Linear attention with decays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from operator_cases.case import Draw, Operator


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    return [*gated_linear_attentions(draw, cu_seqlens)]


def gated_linear_attentions(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    packed = dict(cu_seqlens=cu_seqlens, output_final_state=True)

    def chunked(fn, x):
        state = x["state"] if x["state"].dtype == torch.float64 else x["state"].float()  # FLA takes float32 only
        return fn(x["q"], x["k"], x["v"], x["g"], initial_state=state, **packed)

    def recurrent(fn, x):
        return fn(x["q"], x["k"], x["v"], gk=x["g"], initial_state=x["state"], **packed)

    inputs = draw.qkv() | {"g": F.logsigmoid(draw.heads()) / 16, "state": draw.states()}
    strong = inputs | {"g": F.logsigmoid(draw.heads()) * 8}  # a chunk's log decay is near -400
    home = "fla.ops.gla"
    return [
        Operator("chunk_gla", home, "gla", inputs, chunked),
        Operator("chunk_gla", home, "gla", strong, chunked, label=", strong decay"),
        Operator("fused_recurrent_gla", home, "gla", inputs, recurrent),
    ]
