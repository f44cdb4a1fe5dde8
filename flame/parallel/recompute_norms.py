"""What norms give is computed again in the backward pass instead of being kept.

A norm keeps its input for its own backward, and the linear layers that follow keep its output: the same numbers,
scaled. The output that their backward sees here is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def find_norms(block: nn.Module) -> list[nn.Module]:
    """Modules whose class name ends in Norm or NormGated."""
    return [module for module in block.modules() if type(module).__name__.endswith(("Norm", "NormGated"))]


class NormOutputs:
    """The outputs of a block's norms, while the block runs.

    Norms that also return the sum of input and residual, as the second of most blocks does, are left out: their output
    comes from a sum in more bits than are kept of it.

    Args:
        block: hooks are hung on its norms.
    """

    def __init__(self, block: nn.Module):
        # By the tensor's id, with the tensor, so that no other gets it; None while the block does not run.
        self._known: dict[int, tuple[Tensor, int, NormOutput]] | None = None
        for norm in find_norms(block):
            norm.register_forward_hook(self._remember, with_kwargs=True)

    def begin(self) -> None:
        """To be called when the block begins to run."""
        self._known = {}

    def end(self) -> None:
        """To be called when it is through: the tensors are then autograd's, which frees them layer by layer."""
        for _, _, output in self._known.values():
            output.inputs = ()
        self._known = None

    def find(self, x: Tensor) -> NormOutput | None:
        """How to compute x again, if it is a norm's output that nobody has written to."""
        _, version, output = self._known.get(id(x), (None, None, None))
        return output if version == x._version else None

    def _remember(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if self._known is not None and torch.is_grad_enabled() and isinstance(output, Tensor):
            self._known[id(output)] = output, output._version, NormOutput(norm.forward, args, kwargs)


class NormOutput:
    """A norm's output that can be computed again from tensors that the caller keeps.

    Args:
        compute: the norm's forward; args and kwargs: what it was called with.

    Attributes:
        inputs: the tensors among the arguments, until the block is through.
    """

    def __init__(self, compute: Callable, args: tuple, kwargs: dict[str, Any]):
        leaves, self._structure = tree_flatten((args, kwargs))
        self._compute = compute
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.inputs: Sequence[Tensor] = [leaves[place] for place in self._places]
        self._output: Tensor | None = None

    def again(self, inputs: Sequence[Tensor]) -> Tensor:
        """The output, from the ``inputs``; computed once until ``forget``."""
        if self._output is None:
            leaves = list(self._others)
            for place, x in zip(self._places, inputs, strict=True):
                leaves[place] = x
            args, kwargs = tree_unflatten(leaves, self._structure)
            self._output = self._compute(*args, **kwargs)
        return self._output

    def forget(self) -> None:
        """Drop the output."""
        self._output = None
