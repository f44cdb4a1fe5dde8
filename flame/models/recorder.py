"""Record the tensor operations that a constructor runs, and run any part of them again later, elsewhere.

A model class decides in its constructor (and in hooks called from there) how each parameter starts. Under
:class:`Recorder` the constructor runs without memory and without arithmetic, while every operation is written to a
:class:`Tape`. A tape can then be replayed for one storage at a time, on any device.

Private interfaces used here, and nowhere else in flame (torch 2.11 to 2.13):

- ``torch._subclasses.fake_tensor.FakeTensorMode``: tensors without memory that still report a real device. Plain meta
  tensors do not serve, since model classes test for ``device.type == "meta"`` and then skip their initialisation.
- ``torch.utils._python_dispatch``: ``TorchDispatchMode`` is the documented extension point, in spite of the module's
  name; ``_disable_current_modes`` runs real operations from inside it.
- ``OpOverload._schema``: which arguments an operation writes to. There is no public accessor.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

# In-place operations after which nothing of the written tensor's earlier content is left.
_OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "log_normal_", "exponential_"})


class RecordError(RuntimeError):
    """The construction cannot be expressed as a tape; the message says which operation stands in the way."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the recorded run: a window on storage number ``storage``."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int

    @property
    def covers_storage(self) -> bool:
        """Whether writing every element of this window writes every byte of the storage."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected * self.dtype.itemsize == self.storage_bytes


@dataclass(frozen=True)
class Constant:
    """A tensor that existed outside the recording, such as the argument of ``torch.tensor([...])``."""

    value: torch.Tensor


@dataclass(frozen=True)
class Event:
    """One operation that makes or writes storages. Views are not events: a ``TensorRef`` holds its own geometry."""

    func: Any
    arguments: list[Any]  # flattened args and kwargs, tensors replaced by TensorRef or Constant
    spec: Any
    outputs: list[Any]
    reads: frozenset[int]
    writes: frozenset[int]
    creates: frozenset[int]
    overwrites: int | None  # the storage that is overwritten as a whole

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags


@dataclass
class Tape:
    """The operations of one recorded run, in order."""

    events: list[Event] = field(default_factory=list)
    _touching: dict[int, list[int]] = field(default_factory=dict)  # storage -> events that make or write it

    def append(self, event: Event) -> None:
        for storage in event.writes | event.creates:
            self._touching.setdefault(storage, []).append(len(self.events))
        self.events.append(event)

    def slice(self, storage: int) -> list[int]:
        """Indices of the events that decide the final content of ``storage``, in order.

        Walks backwards from the last event. Of a storage that is overwritten as a whole nothing earlier is needed but
        its allocation, so the default initialisation of ``nn.Linear``, say, is left out when the model class draws
        the weight again.
        """
        chosen: set[int] = set()
        explained: set[tuple[int, int]] = set()
        pending = [(storage, len(self.events))]  # contents still to be explained, as they were before an event
        while pending:
            wanted, before = pending.pop()
            touching = self._touching.get(wanted, [])
            for position in range(bisect_left(touching, before) - 1, -1, -1):
                if (wanted, position) in explained:
                    break
                explained.add((wanted, position))
                index = touching[position]
                pending += self._include(index, chosen)
                if wanted in self.events[index].creates or self.events[index].overwrites == wanted:
                    break
        return sorted(chosen)

    def _include(self, index: int, chosen: set[int]) -> list[tuple[int, int]]:
        """Add an event and the allocation of what it writes to ``chosen``; return the contents that it needs."""
        if index in chosen:
            return []
        chosen.add(index)
        event = self.events[index]
        needed = [(storage, index) for storage in event.reads]
        for storage in event.writes:
            needed += self._include(self._touching[storage][0], chosen)
        return needed

    def replay(
        self, indices: list[int], device: torch.device, before_random: Callable[[int], None] | None = None
    ) -> Environment:
        """Run the events at ``indices`` on ``device``; ``before_random(index)`` is called ahead of each random one."""
        environment = Environment(device)
        with torch.no_grad():
            for index in indices:
                event = self.events[index]
                if event.is_random and before_random is not None:
                    before_random(index)
                environment.run(event)
        return environment


class Environment:
    """The storages of a replay, by their number on the tape."""

    def __init__(self, device: torch.device):
        self.device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """The tensor that ``ref`` names, as a view of the replayed storage."""
        empty = torch.empty(0, dtype=ref.dtype, device=self.device)
        return empty.set_(self._storages[ref.storage], ref.offset, ref.shape, ref.stride)

    def run(self, event: Event) -> None:
        args, kwargs = tree_unflatten([self._resolve(argument) for argument in event.arguments], event.spec)
        results = tree_flatten(event.func(*args, **kwargs))[0]
        for result, ref in zip(results, event.outputs, strict=True):
            if isinstance(ref, TensorRef) and ref.storage in event.creates:
                if result.stride() != ref.stride or result.dtype != ref.dtype:
                    raise RecordError(f"{event.func} made {result.dtype} {result.stride()} in the replay, not {ref}")
                self._storages[ref.storage] = result.untyped_storage()

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, TensorRef):
            return self.tensor(argument)
        if isinstance(argument, Constant):
            return argument.value.to(self.device, copy=True)
        if isinstance(argument, torch.device) and argument.type != "meta":
            return self.device
        return argument


class Recorder(TorchDispatchMode):
    """Writes each operation to ``tape``; use through :func:`recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        # Holding the storage objects keeps their ids unique while the recording lasts.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """The tape's name for a tensor of the recorded run."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            self._storages[id(storage)] = (len(self._storages), storage)
        number = self._storages[id(storage)][0]
        return TensorRef(
            number,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.storage_offset(),
            storage.nbytes(),
        )

    def known(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was made inside the recording."""
        return id(tensor.untyped_storage()) in self._storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        arguments = [self._name_argument(leaf) for leaf in leaves]
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as fault:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise RecordError(f"{func} depends on the values of a tensor") from fault
            return self._read_scalar(arguments[0])
        self._record(func, args, kwargs, arguments, spec, result)
        return result

    def _name_argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return self.ref(leaf) if self.known(leaf) else Constant(leaf)

    def _read_scalar(self, ref: TensorRef) -> Any:
        """Answer ``tensor.item()`` inside a constructor by replaying what led to the tensor, on the CPU."""
        indices = self.tape.slice(ref.storage)
        if any(self.tape.events[index].is_random for index in indices):
            raise RecordError("the constructor reads a random tensor's value")
        with _disable_current_modes():
            return self.tape.replay(indices, torch.device("cpu")).tensor(ref).item()

    def _record(self, func, args, kwargs, arguments, spec, result) -> None:
        outputs = tree_flatten(result)[0]
        creates = frozenset(
            self.ref(output).storage
            for output in outputs
            if isinstance(output, torch.Tensor) and not self.known(output)
        )
        written = [self._name_argument(tensor) for tensor in _written_tensors(func, args, kwargs)]
        if any(isinstance(ref, Constant) for ref in written):
            raise RecordError(f"{func} writes to a tensor that was made outside the constructor")
        if not creates and not written:
            return
        reads = frozenset(a.storage for a in arguments if isinstance(a, TensorRef))
        overwrites = None
        name = func._schema.name.removeprefix("aten::")
        if len(written) == 1 and name in _OVERWRITING and written[0].covers_storage:
            sources = [a.storage for a in arguments[1:] if isinstance(a, TensorRef)]
            if written[0].storage not in sources:
                overwrites = written[0].storage
                reads -= {overwrites}
        named_outputs = [self.ref(o) if isinstance(o, torch.Tensor) else o for o in outputs]
        writes = frozenset(ref.storage for ref in written)
        self.tape.append(Event(func, arguments, spec, named_outputs, reads, writes, creates, overwrites))


def _written_tensors(func, args, kwargs) -> list[torch.Tensor]:
    """The tensor arguments that ``func`` writes to, by its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return written


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record everything built in the body, as fake tensors on the CPU.

    Python's and NumPy's generators are put in a fixed state for the body and restored after it, so that a
    constructor which draws from them builds the same model on every rank.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
            yield recorder
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
