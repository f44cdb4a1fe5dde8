"""Cross entropy of logits, and of hidden states through the output matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from operator_cases.case import HIDDEN, NUM_TOKENS, VOCAB, Draw, Operator


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    target = torch.randint(VOCAB, (NUM_TOKENS,), generator=draw.generator)
    target = target.masked_fill(torch.arange(NUM_TOKENS) % 7 == 0, -100).to(cu_seqlens.device)

    def of_logits(fn, x):
        return fn(x["logits"], target, lse_square_scale=1e-3)[0].sum()

    def of_states(fn, x):
        return fn(x["x"], target, x["weight"], reduction="sum")

    states = {"x": draw(NUM_TOKENS, HIDDEN), "weight": draw(VOCAB, HIDDEN) / HIDDEN**0.5}
    plain, linear = "fla.modules.fused_cross_entropy", "fla.modules.fused_linear_cross_entropy"
    return [
        Operator("cross_entropy_loss", plain, "cross_entropy", {"logits": draw(NUM_TOKENS, VOCAB)}, of_logits),
        Operator("fused_linear_cross_entropy_loss", linear, "cross_entropy", states, of_states),
    ]
