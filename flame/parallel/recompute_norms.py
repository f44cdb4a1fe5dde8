"""What norms give is computed again in the backward pass instead of being kept.

A norm keeps its input for its own backward, and the products that follow keep its output: the same numbers, scaled. In
a block only the first is kept here. The output that the backward sees is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves


def forget_norm_outputs(block: nn.Module) -> int:
    """Replace ``block.forward`` by one that keeps no output of the block's norms: modules whose class is called so.

    Norms that also return the sum of input and residual, as the second of most blocks does, keep their output: it comes
    from a sum in more bits than are kept of it.

    Returns:
        The number of norms in the block.
    """
    norms = [module for module in block.modules() if type(module).__name__.endswith(("Norm", "NormGated"))]
    if norms:
        block.forward = partial(_forgetting, block.forward, norms)
    return len(norms)


def _forgetting(forward: Callable, norms: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
    # Outputs live here until the block is through: no tensor made later can have the storage of one.
    known: dict[int, tuple[torch.UntypedStorage, _Output]] = {}

    def remember(norm: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_contiguous():
            storage = output.untyped_storage()
            known[id(storage)] = storage, _Output(partial(norm.forward, *args, **kwargs), output)

    def pack(tensor: Tensor) -> _Kept | _Promise:
        _, output = known.get(id(tensor.untyped_storage()), (None, None))
        return output.promise(tensor) if output is not None and output.is_all_of(tensor) else _Kept([tensor])

    handles = [norm.register_forward_hook(remember, with_kwargs=True) for norm in norms]
    try:
        with saved_tensors_hooks(pack, _unpack):
            return forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        known.clear()  # what the hooks keep of this call must not keep the outputs


def _unpack(kept: _Kept | _Promise) -> Tensor:
    return kept.get()


class _Kept:
    """Tensors as they are, which nobody may write to: with hooks, torch leaves that check to them."""

    def __init__(self, tensors: Iterable[Tensor]):
        # Without what made them, which holds what is kept: else nothing of a forward without a backward would be freed.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [tensor._version for tensor in self._tensors]

    def get(self) -> Tensor:
        """The first.

        Raises:
            RuntimeError: one was written to.
        """
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} that the backward needs has been modified by an inplace operation: "
                    f"it is at version {tensor._version}, expected version {version}"
                )
        return self._tensors[0]


class _Output:
    """A norm's output that can be computed again, and the operations that have asked for it.

    Args:
        compute: the norm's forward with the arguments that it had.
        output: what it gave.
    """

    def __init__(self, compute: partial, output: Tensor):
        self._compute, self._like = compute, (output.numel(), output.dtype, output.storage_offset(), output._version)
        self._inputs = _Kept(x for x in tree_leaves((compute.args, compute.keywords)) if isinstance(x, Tensor))
        self._num_promises = self._num_waiting = 0
        self._output: Tensor | None = None

    def is_all_of(self, tensor: Tensor) -> bool:
        """Whether a tensor of its storage is the output, perhaps in another shape, and nobody has written to it."""
        like = tensor.numel(), tensor.dtype, tensor.storage_offset(), tensor._version
        return like == self._like and tensor.is_contiguous()

    def promise(self, tensor: Tensor) -> _Promise:
        """What to keep in the place of the tensor."""
        self._num_promises += 1
        self._num_waiting += 1
        return _Promise(self, tensor.shape)

    def again(self) -> Tensor:
        """The output, computed once for all that wait for it.

        Raises:
            RuntimeError: an input of the norm was written to.
        """
        if self._output is None:
            self._inputs.get()
            with torch.no_grad():
                self._output = self._compute()
        output, self._num_waiting = self._output, self._num_waiting - 1
        if self._num_waiting == 0:
            self._output, self._num_waiting = None, self._num_promises
        return output


class _Promise:
    """Stands for an output, in the shape that an operation saw."""

    def __init__(self, output: _Output, shape: torch.Size):
        self._output, self._shape = output, shape

    def get(self) -> Tensor:
        """The output. Raises as `_Output.again`."""
        return self._output.again().view(self._shape)
