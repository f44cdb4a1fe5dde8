"""Stick-breaking attention."""

from __future__ import annotations

from torch import Tensor

from operator_cases.case import NUM_HEADS, Draw, Operator


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    home, inputs = "fla.ops.stickbreaking_attn", {"q": draw.heads(2 * NUM_HEADS), "k": draw.heads(), "v": draw.heads()}

    def strict(fn, x):
        return fn(x["q"], x["k"], x["v"], cu_seqlens=cu_seqlens)

    def with_current(fn, x):
        return fn(x["q"], x["k"], x["v"], attend_current=True, cu_seqlens=cu_seqlens)

    name, reference = "parallel_stickbreaking_attn", "stickbreaking"
    return [
        Operator(name, home, reference, inputs, strict),
        Operator(name, home, reference, inputs, with_current, label=", current token too"),
    ]
