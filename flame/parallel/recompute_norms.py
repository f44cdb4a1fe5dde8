"""What norms give is computed again in the backward pass instead of being kept.

A norm keeps its input for its own backward, and the linear layers that follow keep its output: the same numbers,
scaled. The output that their backward sees here is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def find_norms(block: nn.Module) -> list[nn.Module]:
    """Modules whose class is called so."""
    return [module for module in block.modules() if type(module).__name__.endswith(("Norm", "NormGated"))]


class NormOutputs:
    """The outputs of a block's norms, while the block runs.

    Norms that also return the sum of input and residual, as the second of most blocks does, are left out: their output
    comes from a sum in more bits than are kept of it.

    Args:
        block: hooks are hung on its norms.
    """

    def __init__(self, block: nn.Module):
        self._known: dict[int, tuple[Tensor, NormOutput]] = {}  # by the id of the tensor, which stays alive beside it
        for norm in find_norms(block):
            norm.register_forward_hook(self._remember, with_kwargs=True)

    def find(self, x: Tensor) -> NormOutput | None:
        """How to compute x again, if it is a norm's output that nobody has written to."""
        _, output = self._known.get(id(x), (None, None))
        return output if output is not None and output.version == x._version else None

    def forget(self) -> None:
        """To be called when the block is through."""
        self._known = {}

    def _remember(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled() and isinstance(output, Tensor):
            compute = partial(norm.forward, *args, **kwargs)
            self._known[id(output)] = output, NormOutput(compute, output._version)


class NormOutput:
    """A norm's output that can be computed again, and the layers that will ask for it.

    Args:
        compute: the norm's forward with the arguments that it had.
        version: of the output's content.
    """

    def __init__(self, compute: partial, version: int):
        self.version = version
        self._compute = compute
        inputs = [x for x in tree_leaves((compute.args, compute.keywords)) if isinstance(x, Tensor)]
        self._inputs = [(x, x._version) for x in inputs]
        self._num_promises = self._num_waiting = 0
        self._output: Tensor | None = None

    def promise(self) -> Callable[[], Tensor]:
        """What to keep in the place of the output: a function that gives it."""
        self._num_promises += 1
        self._num_waiting += 1
        return self._again

    def _again(self) -> Tensor:
        """The output, computed once for all that wait for it.

        Raises:
            RuntimeError: an input of the norm was written to.
        """
        if self._output is None:
            for x, version in self._inputs:
                if x._version != version:
                    raise RuntimeError(
                        f"a norm's input {list(x.shape)} that the backward needs has been modified by an inplace "
                        f"operation: it is at version {x._version}, expected version {version}"
                    )
            self._output = self._compute()
        output, self._num_waiting = self._output, self._num_waiting - 1
        if self._num_waiting == 0:
            self._output, self._num_waiting = None, self._num_promises
        return output
