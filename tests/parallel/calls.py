"""What is called while code runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))
