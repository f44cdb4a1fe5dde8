"""Which models context parallelism takes, by their config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flame.errors import UserError
from flame.parallel.context_operators import _within_rows, check_model
from flame.parallel.degrees import Degrees


class Config(SimpleNamespace):
    def to_dict(self) -> dict:
        return vars(self)


def check(model_type: str, method: str = "allgather", tensor: int = 1, **options) -> None:
    check_model(Config(model_type=model_type, **options), Degrees(context=2, tensor=tensor), method)


def test_models_that_can_pass():
    check("transformer", num_heads=3)
    check("transformer", "alltoall", num_heads=4, num_kv_heads=2)
    check("gla", attn_mode="fused_recurrent")
    check("gated_deltanet", "alltoall", attn_mode="chunk", num_heads=3)
    check("delta_net", "alltoall", attn_mode="chunk", attn={"num_heads": 4, "num_kv_heads": None})
    check("stickbreaking_attn", "alltoall", num_heads=4, num_kv_heads=None)
    check("gated_deltaproduct", attn_mode="chunk", use_forget_gate=True)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("rwkv6",), {}, "rwkv6 cannot be split along the sequence .*; transformer, gla"),
        (("stickbreaking_attn",), {"num_heads": 4}, "as many keys as queries; use alltoall"),
        (("stickbreaking_attn", "alltoall"), {"num_heads": 3}, "does not divide num_heads = 3"),
        (("gated_deltaproduct",), {"use_forget_gate": False}, "set use_forget_gate to true"),
        (("gla",), {"attn_mode": "fused_chunk"}, "gla with attn_mode fused_chunk .* set attn_mode to chunk"),
        (("delta_net",), {"attn_mode": "fused_recurrent"}, "attn_mode fused_recurrent"),
        (("transformer", "alltoall"), {"num_heads": 4, "num_kv_heads": 1}, "does not divide num_kv_heads = 1; use all"),
        (("transformer", "alltoall", 2), {"num_heads": 6, "num_kv_heads": None}, "does not divide num_heads = 6"),
        (("gla", "alltoall"), {"attn": {"num_heads": 3}}, "does not divide num_heads = 3"),
        (("gla", "alltoall"), {"attn": [{"num_heads": 4}, {"num_heads": 3}]}, "does not divide num_heads = 3"),
    ],
)
def test_models_that_cannot_are_named(arguments, options, message):
    with pytest.raises(UserError, match=f"context_parallel.*{message}"):
        check(*arguments, **options)


def test_operators_are_the_original_ones_while_no_row_is_in_hand():
    context = SimpleNamespace(row=None)
    operator = _within_rows(context, lambda _context, original: lambda x: -original(x), lambda x: x + 1)
    assert operator(1) == 2
    context.row = "a row"
    assert operator(1) == -2
