"""The dtype that a model computes in."""

from __future__ import annotations

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def compute_dtype(choice: str, device: torch.device) -> str:
    """A key of ``DTYPES`` to compute in: ``auto`` is bfloat16 where the device is fast at it, else float32."""
    if choice != "auto":
        return choice
    return "bfloat16" if has_fast_bfloat16(device) else "float32"


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are at least as fast as in float32: GPUs from Ampere on, CPUs with AMX.

    The meta device stands for such a GPU.
    """
    if device.type == "meta":
        return True
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))
