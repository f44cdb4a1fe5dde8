"""State space mixers: flame's own selective scan kernel; Mamba-2's scan through FLA's kernel, and its gated norm."""

from __future__ import annotations

import torch
from torch import Tensor

from flame.models.ssd import ssd
from operator_cases.case import CU_SEQLENS, HIDDEN, NUM_HEADS, Draw, Operator, full_precision

STATE_SIZE = 16


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    return [*selective_scans(draw, cu_seqlens), *dualities(draw, cu_seqlens), *gated_norms(draw)]


def selective_scans(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    def scan(fn, x):
        tensors = x | {"A": -x["A_log"].exp()}
        del tensors["A_log"]
        return fn(**tensors, output_final_state=True, cu_seqlens=cu_seqlens)

    inputs = {name: draw.rows() for name in ("x", "dt", "z")}
    inputs |= {name: draw(1, len(inputs["x"][0]), STATE_SIZE) for name in "BC"}
    inputs["A_log"] = torch.arange(1.0, STATE_SIZE + 1, dtype=torch.float64).log().repeat(HIDDEN, 1)
    inputs |= {"D": draw(HIDDEN), "dt_bias": draw(HIDDEN) - 4}
    inputs["initial_state"] = draw(len(CU_SEQLENS) - 1, HIDDEN, STATE_SIZE)
    strong = inputs | {"dt_bias": draw(HIDDEN) + 4}  # a chunk's log decay is near -4000
    home = "flame.models.selective_scan"
    return [
        Operator("selective_scan", home, "selective_scan", inputs, scan),
        Operator("selective_scan", home, "selective_scan", strong, scan, label=", strong decay"),
    ]


def dualities(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    def scan(fn, x):
        state = full_precision(x["state"])
        dt = x["dt"].to(state.dtype).sigmoid()
        options = dict(initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens)
        return ssd(x["x"], dt, -x["A_log"].to(state.dtype).exp(), x["B"], x["C"], fn, **options)

    num_heads, num_groups = 2 * NUM_HEADS, 2
    inputs = {"x": draw.heads(num_heads), "B": draw.heads(num_groups), "C": draw.heads(num_groups)}
    inputs |= {"dt": draw(1, len(inputs["x"][0]), num_heads) - 4, "state": draw.states(num_heads)}
    inputs["A_log"] = torch.linspace(1, 16, num_heads, dtype=torch.float64).log()
    return [
        Operator("chunk_simple_gla", "fla.ops.simple_gla", "simple_gla", inputs, scan, label=", state space duality")
    ]


def gated_norms(draw: Draw) -> list[Operator]:
    def norm(fn, x):
        return fn(x["x"], x["weight"], None, z=x["z"], eps=1e-5, group_size=HIDDEN // 2, norm_before_gate=False)

    inputs = {"x": draw.rows(), "z": draw.rows(), "weight": 1 + 0.1 * draw(HIDDEN)}
    return [Operator("rmsnorm_fn", "fla.modules.norm.layernorm_gated", "gated_group_norm", inputs, norm)]
