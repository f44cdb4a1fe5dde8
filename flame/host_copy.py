"""Small tensors on a device whose values the host knows too, so that it need not wait for the device to read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, device

_NAME = "_flame_host_copy"  # of a tensor's attribute; goes with the tensor


class HostCopy:
    """The values of a tensor in the host's memory, and what was derived from them.

    Attributes:
        values: on the CPU.
    """

    def __init__(self, values: Tensor):
        self.values = values
        self._derived: dict[Any, Any] = {}

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives, called the first time that the key is asked for and kept as long as the tensor."""
        if key not in self._derived:
            self._derived[key] = compute()
        return self._derived[key]


def send(values: Tensor, target: device) -> Tensor:
    """A tensor on the CPU copied to ``target`` without waiting, from page-locked memory if that is a GPU."""
    if target.type == "cuda" and not values.is_pinned():
        values = values.pin_memory()
    return values.to(target, non_blocking=True)


def send_and_remember(values: Tensor, target: device) -> Tensor:
    """As ``send``; ``host_copy`` of the result then knows the values. Neither tensor may be changed in place."""
    copy = send(values, target)
    setattr(copy, _NAME, HostCopy(values))
    return copy


def host_copy(tensor: Tensor) -> HostCopy | None:
    """The values of a tensor that ``send_and_remember`` made; None for other ones."""
    return getattr(tensor, _NAME, None)
