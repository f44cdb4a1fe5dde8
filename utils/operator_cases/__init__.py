"""Cases of utils/compare_backends.py, one module a group of operators.

A module of the group has `cases(draw, cu_seqlens) -> list[Operator]` and stands in `GROUPS`; a family's models are
compared through its configs/debug/<family>.json alone.
"""

from __future__ import annotations

import torch

from operator_cases import cross_entropy, delta_rule, layers, linear_attention, rwkv7, state_space, stickbreaking
from operator_cases.case import CU_SEQLENS, Draw, Operator

GROUPS = (delta_rule, linear_attention, rwkv7, state_space, stickbreaking, layers, cross_entropy)


def operators(device: torch.device) -> list[Operator]:
    """Every case, on packed documents of 1 to 347 tokens; each group draws its inputs alone."""
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device)
    return [operator for group in GROUPS for operator in group.cases(Draw(), cu_seqlens)]
