"""A block's first norm adds up the gradient of the block's input inside its backward kernel.

The input is read twice: by the first norm, and by the sum around the mixer. Autograd adds the two gradients with a
kernel of its own, which only moves memory. FLA's norms can do it: with ``prenorm`` they return their input once more,
and take the gradient of that into their own. Here the first norm does so, and the second, which computes the sum in
FLA's blocks with ``fuse_norm``, reads that instead. Outputs are the same bit for bit; the input's gradient is rounded
once less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

NAMES = ("RMSNorm", "LayerNorm")  # of FLA's norms that take residuals


def add_residual_gradients(blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Replace ``forward`` of blocks and of their norms; call before activation checkpointing.

    Args:
        blocks: (name, module); those without two of FLA's norms are left as they are.
    """
    for _, block in blocks:
        norms = [child for child in block.children() if _takes_residual(child)]
        if len(norms) < 2:
            continue
        state = _BlockInput()
        for norm in norms:
            norm.forward = partial(state.norm_forward, norm.forward)
        block.forward = update_wrapper(partial(state.block_forward, block.forward), block.forward)


def _takes_residual(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__module__.startswith("fla.modules.") and cls.__name__ in NAMES and "forward" not in vars(module)


class _BlockInput:
    """The input of a block, while the block runs."""

    def __init__(self):
        self._input: Tensor | None = None  # None while the block does not run
        self._content = 0  # its version as the block began
        self._again: Tensor | None = None  # the input, once a norm has returned it
        self._is_useless = False  # no norm of this block asked for it

    def block_forward(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """The block's forward; its input is the first argument or ``hidden_states``."""
        x = args[0] if args else kwargs.get("hidden_states")
        if self._input is not None or self._is_useless or not _can_share(x):
            return forward(*args, **kwargs)
        self._input, self._content = x, x._version
        try:
            output = forward(*args, **kwargs)
            self._is_useless = self._again is not None
        finally:
            self._input = self._again = None
        return output

    def norm_forward(
        self, forward: Callable, x: Tensor, residual: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """A norm's forward, with FLA's arguments."""
        if self._is_input(x) and self._again is None and residual is None and not args and not kwargs:
            y, self._again = forward(x, prenorm=True)
            return y
        if self._again is not None and self._is_input(residual):
            residual, self._again = self._again, None
        return forward(x, residual, *args, **kwargs)

    def _is_input(self, x: Tensor | None) -> bool:
        return x is not None and x is self._input and x._version == self._content


def _can_share(x: Any) -> bool:
    is_plain = isinstance(x, Tensor) and not isinstance(x, DTensor)
    return is_plain and torch.is_grad_enabled() and x.requires_grad
