"""The dtype that a model computes in."""

from __future__ import annotations

import torch

from flame.parallel.precision import compute_dtype, has_fast_bfloat16


def test_bfloat16_is_fast_on_a_cpu_only_with_matrix_instructions(monkeypatch):
    for answer in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda answer=answer: {"amx_bf16": answer})
        assert has_fast_bfloat16(torch.device("cpu")) is answer


def test_what_is_named_is_taken_and_auto_goes_by_the_device():
    meta = torch.device("meta")
    assert [compute_dtype(each, meta) for each in ("float32", "bfloat16", "auto")] == [
        "float32",
        "bfloat16",
        "bfloat16",
    ]
