"""What a case of the comparison is, and the random packed inputs that cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CU_SEQLENS = [0, 1, 100, 101, 165, 512]
NUM_TOKENS, NUM_HEADS, HEAD_DIM, HIDDEN, VOCAB = CU_SEQLENS[-1], 4, 32, 128, 1000


@dataclass(frozen=True)
class Operator:
    """One operator with both implementations and what to feed it.

    Attributes:
        home: FLA module (or flame's, for its own kernels) that exports `name`; the reference module is `reference`.
        inputs: tensors by name, drawn in float64; floating ones get gradients.
        call: (function, tensors) -> outputs; outputs that need no gradient are compared too.
        float32: whether FLA's kernel takes float32.
        backward: whether FLA's kernel has a backward pass.
        label: what sets this case apart from another of the same operator.
    """

    name: str
    home: str
    reference: str
    inputs: dict[str, Tensor]
    call: Callable[[Callable, dict[str, Tensor]], Tensor | tuple[Tensor, ...]]
    float32: bool = True
    backward: bool = True
    label: str = ""


class Draw:
    """Random float64 inputs of packed documents, the same for every run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def heads(self, num_heads: int = NUM_HEADS) -> Tensor:
        return self(1, NUM_TOKENS, num_heads, HEAD_DIM)

    def rows(self) -> Tensor:
        return self(1, NUM_TOKENS, HIDDEN)

    def qkv(self) -> dict[str, Tensor]:
        return {"q": self.heads(), "k": F.normalize(self.heads(), dim=-1), "v": self.heads()}

    def states(self, num_heads: int = NUM_HEADS) -> Tensor:
        return self(len(CU_SEQLENS) - 1, num_heads, HEAD_DIM, HEAD_DIM)


def full_precision(state: Tensor) -> Tensor:
    """A start state for kernels that take float32 only; float64 stays, for the reference."""
    return state if state.dtype == torch.float64 else state.float()
