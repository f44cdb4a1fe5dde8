"""Cases of stick-breaking attention, and what must hold for its kernels; as a program it checks them interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flame.models.reference.stickbreaking import stickbreaking_attention

# name: options of `inputs`, document bounds, block size. Sharp logits use the stick up within a few keys.
CASES: dict[str, tuple[dict[str, Any], list[int] | None, int]] = {
    "one_document": ({"seq_len": 70, "head_dim": 24}, [0, 70], 16),
    "packed": ({"seq_len": 50, "head_dim": 16}, [0, 7, 8, 33, 50], 16),
    "bounds_on_blocks": ({"seq_len": 64, "head_dim": 16}, [0, 16, 17, 48, 64], 16),
    "rows": ({"num_rows": 2, "seq_len": 37, "head_dim": 8}, None, 16),
    "sharp": ({"seq_len": 64, "head_dim": 16, "size": 40.0}, [0, 20, 64], 16),
    "stick_used_up": ({"seq_len": 160, "head_dim": 16, "size": 4.0}, None, 16),
    "hardly_touched": ({"seq_len": 96, "head_dim": 16, "shift": -3.0}, [0, 96], 32),
}


# Too large to interpret.
GPU_CASES = CASES | {
    "training_shape": ({"seq_len": 2000, "head_dim": 64}, [0, 10, 700, 2000], 64),
    "wide_heads": ({"seq_len": 300, "head_dim": 128, "num_rows": 2}, None, 64),
}


def inputs(
    seq_len: int,
    head_dim: int,
    num_rows: int = 1,
    size: float = 1.0,
    shift: float = 0.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """q, k, v and the gradients of o and of the rest; ``shift`` moves all logits by about four times as much."""
    generator = torch.Generator().manual_seed(seq_len)
    shape = (num_rows, seq_len, 2, head_dim)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    q, k = q * size**0.5, k * size**0.5
    q[..., 0], k[..., 0] = (4.0, shift * head_dim**0.5) if shift else (q[..., 0], k[..., 0])
    drest = torch.randn(shape[:3], generator=generator)
    named = {"q": q, "k": k, "v": v, "do": do}
    return {name: x.to(device, dtype) for name, x in named.items()} | {"drest": drest.to(device)}


def run(attention: Callable, case: dict[str, Tensor], *arguments: Any, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    q, k, v = (case[name].detach().clone().requires_grad_() for name in "qkv")
    o, rest = attention(q, k, v, *arguments, **options)
    torch.autograd.backward([o, rest], [case["do"].to(o.dtype), case["drest"].to(rest.dtype)])
    return {"o": o.detach(), "rest": rest.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def check_case(name: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Compare the kernels with the reference in float64 on the same inputs, in relative norm."""
    from custom_models.sba.kernels import stick_breaking_kernel

    options, bounds, block = GPU_CASES[name]
    case = inputs(**options, device=device, dtype=dtype)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    found = run(stick_breaking_kernel, case, cu_seqlens, block=block)
    exact = run(stickbreaking_attention, {key: x.double() for key, x in case.items()}, cu_seqlens)
    for key, value in exact.items():
        error = ((found[key].double() - value).norm() / value.norm().clamp(min=1e-30)).item()
        assert error <= tolerance, f"{name}: {key} is off by {error:.1e}"


def check_isolation(device: str, block: int) -> None:
    """Other contents of one document leave the outputs and gradients of the others as they are, bit by bit."""
    from custom_models.sba.kernels import stick_breaking_kernel

    case = inputs(seq_len=100, head_dim=16, device=device)
    cu_seqlens = torch.tensor([0, 30, 55, 100], dtype=torch.int32, device=device)
    changed = {name: x.clone() for name, x in case.items()}
    for x in changed.values():
        x[:, 30:55] *= -7
    one, other = (run(stick_breaking_kernel, each, cu_seqlens, block=block) for each in (case, changed))
    for name, value in one.items():
        assert torch.equal(value[:, :30], other[name][:, :30]), name
        assert torch.equal(value[:, 55:], other[name][:, 55:]), name
        assert not torch.equal(value[:, 30:55], other[name][:, 30:55]), name


if __name__ == "__main__":
    for case_name in CASES:
        check_case(case_name, "cpu", torch.float32, tolerance=2e-6)
        print(case_name)
    check_isolation("cpu", block=16)
    print("isolation")
