"""How many bytes tensors on the meta device would take: allocated now, and at most so far."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

BLOCK = 512  # bytes; torch's allocator on GPUs rounds up to a multiple

# Results that exist on a CPU and the meta device only; on a GPU they are empty.
_EMPTY_ON_GPUS = {torch.ops.aten.log_sigmoid_forward.default: 1}


class Allocations(TorchDispatchMode):
    """Counts, while it is active, the storages that operations make on the meta device, until they are freed.

    Tensors on the CPU that meet others on the meta device go there too: of those, such as document bounds, the values
    are needed elsewhere.

    Attributes:
        live: bytes of the storages that exist now.
        peak: the most there have been at a time, since ``restart_peak``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True  # what models ask of their masks: whether nothing is hidden, or packed
        arguments = (args, kwargs or {})
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if len({tensor.device.type for tensor in given}) > 1:
            arguments = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), arguments)
        results = operator(*arguments[0], **arguments[1])
        # Views are no allocations, and what they look at may have been there before, such as parameters.
        known = {id(tensor.untyped_storage()) for tensor in given if tensor.is_meta}
        unreal = _EMPTY_ON_GPUS.get(operator)
        for number, leaf in enumerate(tree_leaves(results)):
            if isinstance(leaf, Tensor) and leaf.is_meta and number != unreal:
                storage = leaf.untyped_storage()
                if id(storage) not in known and id(storage) not in self._sizes:
                    self._add(storage)
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # the wrapper lives as long as the storage, so that ids are unique
        self._sizes[key] = -(-storage.nbytes() // BLOCK) * BLOCK
        weakref.finalize(storage, self._free, key)
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
