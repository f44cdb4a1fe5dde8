"""What stands around a token mixer: convolutions, norms, positions, residuals, activations."""

from __future__ import annotations

import torch
from torch import Tensor

from operator_cases.case import CU_SEQLENS, HEAD_DIM, HIDDEN, NUM_TOKENS, Draw, Operator


def cases(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    return [
        *convolutions(draw, cu_seqlens),
        *norms(draw),
        *position_and_residual(draw, cu_seqlens),
        *activations(draw),
    ]


def convolutions(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    def outputs(fn, x):
        options = dict(activation="silu", backend="triton", cu_seqlens=cu_seqlens)
        return fn(x["x"], x["weight"], x["bias"], initial_state=x["state"], **options)[0]

    def with_state(fn, x):
        options = dict(activation="silu", backend="triton", cu_seqlens=cu_seqlens, output_final_state=True)
        return fn(x["x"], x["weight"], x["bias"], initial_state=x["state"], **options)

    inputs = {"x": draw.rows(), "weight": draw(HIDDEN, 4), "bias": draw(HIDDEN)}
    inputs["state"] = draw(len(CU_SEQLENS) - 1, HIDDEN, 4)
    home = "fla.modules.causal_conv1d"
    return [
        Operator("causal_conv1d", home, "convolution", inputs, outputs),
        Operator("causal_conv1d", home, "convolution", inputs, with_state, label=", with final state"),
    ]


def norms(draw: Draw) -> list[Operator]:
    def residual(fn, x):
        return fn(x["x"], x["weight"], None, residual=x["residual"], prenorm=True)

    def grouped(fn, x):
        return fn(x["x"], x["weight"], None, is_rms_norm=True, num_groups=4)

    def linear(fn, x):
        return fn(x["x"], x["weight"], None, x["linear"], None, is_rms_norm=True)

    inputs = {"x": draw.rows(), "weight": 1 + 0.1 * draw(HIDDEN)}
    plain, gated, l2 = (f"fla.modules.norm.{name}" for name in ("layernorm", "fused_norm_gate", "l2norm"))
    with_bias = inputs | {"bias": draw(HIDDEN)}
    return [
        Operator("rms_norm", plain, "norms", inputs | {"residual": draw.rows()}, residual),
        Operator("layer_norm", plain, "norms", with_bias, lambda fn, x: fn(x["x"], x["weight"], x["bias"])),
        Operator("group_norm", plain, "norms", inputs, grouped),
        Operator("layer_norm_linear", plain, "norms", inputs | {"linear": draw(64, HIDDEN) / HIDDEN**0.5}, linear),
        Operator(
            "rms_norm_gated",
            gated,
            "norms",
            inputs | {"g": draw.rows()},
            lambda fn, x: fn(x["x"], x["g"], x["weight"], None, eps=1e-5),
        ),
        Operator("l2norm", l2, "norms", {"x": draw.heads()}, lambda fn, x: fn(x["x"])),
    ]


def position_and_residual(draw: Draw, cu_seqlens: Tensor) -> list[Operator]:
    def rotary(fn, x):
        frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(NUM_TOKENS), frequencies).double()
        return fn(x["x"], angles.cos().to(x["x"]), angles.sin().to(x["x"]), cu_seqlens=cu_seqlens)

    def attnres(fn, x):
        return fn(x["query"], [x["x"], x["y"]], x["weight"])

    residuals = {"x": draw.rows(), "y": draw.rows(), "weight": 1 + 0.1 * draw(HIDDEN)}
    residuals["query"] = draw(HIDDEN) / HIDDEN**0.5
    return [
        Operator("rotary_embedding", "fla.modules.rotary", "rotary", {"x": draw.heads()}, rotary),
        Operator("fused_attnres", "fla.ops.attnres", "attnres", residuals, attnres),
    ]


def activations(draw: Draw) -> list[Operator]:
    home = "fla.modules.activations"
    inputs = {"x": draw.rows(), "y": draw.rows(), "weight": draw(HIDDEN, HIDDEN) / HIDDEN**0.5}

    def linear(fn, x):
        return fn(x["x"], x["y"], x["weight"], None)

    return [
        Operator("swiglu_linear", home, "activations", inputs, linear),
        Operator("powglu_linear", home, "activations", inputs, linear),
        Operator("logsigmoid", home, "activations", {"x": draw.rows()}, lambda fn, x: fn(x["x"], 16.0)),
    ]
