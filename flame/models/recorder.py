"""Record the tensor operations that a constructor runs, and run any part of them again later, elsewhere.

A model class decides in its constructor (and in hooks called from there) how each parameter starts. Under
:class:`Recorder` the constructor runs without memory for its weights and without drawing them, while every operation
is written to a :class:`Tape`. A tape can then be replayed for one storage at a time, on any device.

Small tensors whose values follow from constants alone (rotary frequencies, decay ramps filled in element by element)
are computed at once and kept as values: constructors loop over them, and reading such a value back is allowed.

Private interfaces used here (torch 2.11 to 2.13):

- ``torch._subclasses.fake_tensor``: tensors without memory that still report a real device. Plain meta tensors do not
  serve, since model classes test for ``device.type == "meta"`` and then skip their initialisation.
- ``torch.utils._python_dispatch.TorchDispatchMode``: the documented extension point, in spite of the module's name.
- ``torch.utils._pytree``: flattens nested arguments; there is no public counterpart. ``flame.models.init`` uses it too.
- ``OpOverload._schema``: which arguments an operation writes to. There is no public accessor.
- ``torch.nn.init._no_grad_trunc_normal_``: draws again what falls outside the bounds (since torch 2.13), so it looks at
  random values; it is replaced during a recording by one operation that does all of this.
"""

from __future__ import annotations

import functools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

# In-place operations after which nothing of the written tensor's earlier content is left.
_OVERWRITING = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "flame::trunc_normal_"}
)

# Operations whose result's shape or Python value follows from the values of a tensor.
_VALUE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

# Tensors up to this many elements (256 KiB of float32) have memory during the recording.
_MAX_REAL_NUMEL = 2**16

_PLAIN_TRUNC_NORMAL = torch.nn.init._no_grad_trunc_normal_


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

    def random_among(self, indices: list[int]) -> list[int]:
        """Those of the events at ``indices`` that draw random numbers."""
        return [index for index in indices if _is_random(self.events[index].func)]

    def replay(
        self, indices: list[int], device: torch.device, before_random: Callable[[int], None] | None = None
    ) -> Environment:
        """Run the events at ``indices`` on ``device``; ``before_random(index)`` is called ahead of each random one."""
        environment = Environment(device)
        with torch.no_grad():
            for index in indices:
                event = self.events[index]
                if _is_random(event.func) and before_random is not None:
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
    """Writes the operations of its body to ``tape``; use through :func:`recording`.

    A tensor is *recorded* when its storage was made or written by an event of the tape. Others, which are real, are
    known by value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Holding the storage objects keeps their ids unique while the recording lasts.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def name(self, tensor: torch.Tensor) -> TensorRef | Constant:
        """The tape's name for a tensor, or a copy of its value when the tape does not hold it."""
        return self._ref(tensor) if self._is_recorded(tensor) else Constant(tensor.detach().clone())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        if not any(isinstance(value, (list, tuple, dict)) for value in values):  # as most are; flattening takes longer
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            if tensors and self._is_foldable(func, args, kwargs, tensors):
                return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._is_foldable(func, args, kwargs, tensors):
            return func(*args, **kwargs)
        written = _written_tensors(func, args, kwargs)
        for tensor in written:
            if not self._is_recorded(tensor):
                self._adopt(tensor)
        arguments = [self.name(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read_scalar(arguments[0])
        if _VALUE_TAGS & set(func.tags):
            raise RecordError(f"the constructor takes {func} of a tensor that it has not computed yet")
        result = self._execute(func, args, kwargs, tensors, written)
        self._record(func, arguments, spec, written, result)
        return result

    def _ref(self, tensor: torch.Tensor) -> TensorRef:
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            self._storages[id(storage)] = (len(self._storages), storage)
        number = self._storages[id(storage)][0]
        geometry = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        return TensorRef(number, tensor.dtype, *geometry, storage.nbytes())

    def _is_recorded(self, tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._storages

    def _is_foldable(self, func, args, kwargs, tensors: list[torch.Tensor]) -> bool:
        """Whether the operation can be carried out now, on values, instead of being recorded."""
        if _has_no_value(func):
            return False
        if tensors:
            return not any(isinstance(t, FakeTensor) or self._is_recorded(t) for t in tensors)
        return self._makes_little(func, args, kwargs)

    def _makes_little(self, func, args, kwargs) -> bool:
        """Whether a factory function's result is small enough to be a real tensor."""
        with self._fake_mode:
            outputs = tree_flatten(func(*args, **kwargs))[0]
        return all(o.numel() <= _MAX_REAL_NUMEL for o in outputs if isinstance(o, torch.Tensor))

    def _adopt(self, tensor: torch.Tensor) -> None:
        """Begin to record a tensor known by value, since an event is about to write to it."""
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        arguments, spec = tree_flatten(((Constant(whole.clone()),), {}))
        ref = self._ref(whole)
        creates = frozenset([ref.storage])
        clone = torch.ops.aten.clone.default
        self.tape.append(Event(clone, arguments, spec, [ref], frozenset(), frozenset(), creates, None))

    def _read_scalar(self, ref: TensorRef) -> Any:
        """Answer ``tensor.item()`` inside a constructor by replaying what led to the tensor, on the CPU."""
        indices = self.tape.slice(ref.storage)
        if self.tape.random_among(indices):
            raise RecordError("the constructor reads the value of a random tensor")
        return self.tape.replay(indices, torch.device("cpu")).tensor(ref).item()

    def _execute(self, func, args, kwargs, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        """Carry the operation out as far as shapes need it."""
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors) and (
            tensors or self._makes_little(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            if len(written) != 1 or len(func._schema.returns) != 1:
                raise RecordError(f"{func} writes to several tensors, some of them known by value")
            return written[0]  # its value is on the tape from now on; the real one is no longer looked at
        with self._fake_mode:
            return func(*args, **kwargs)

    def _record(self, func, arguments, spec, written: list[torch.Tensor], result) -> None:
        outputs = tree_flatten(result)[0]
        created = [o for o in outputs if isinstance(o, torch.Tensor) and not self._is_recorded(o)]
        creates = frozenset(self._ref(output).storage for output in created)
        if not creates and not written:
            return  # a view
        reads = frozenset(a.storage for a in arguments if isinstance(a, TensorRef))
        writes = frozenset(self._ref(tensor).storage for tensor in written)
        overwrites = self._overwritten(func, arguments, written)
        if overwrites is not None:
            reads -= {overwrites}
        named_outputs = [self._ref(o) if isinstance(o, torch.Tensor) else o for o in outputs]
        self.tape.append(Event(func, arguments, spec, named_outputs, reads, writes, creates, overwrites))

    def _overwritten(self, func, arguments, written: list[torch.Tensor]) -> int | None:
        """The storage of which nothing is left after the operation, if there is one."""
        if len(written) != 1 or func._schema.name.removeprefix("aten::") not in _OVERWRITING:
            return None
        target = self._ref(written[0])
        sources = [a.storage for a in arguments[1:] if isinstance(a, TensorRef)]
        return target.storage if target.covers_storage and target.storage not in sources else None


@functools.cache
def _has_no_value(func) -> bool:
    """Whether the result of an operation is random or arbitrary."""
    return _is_random(func) or func._schema.name.removeprefix("aten::").startswith(("empty", "new_empty"))


def _is_random(func) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _written_tensors(func, args, kwargs) -> list[torch.Tensor]:
    """The tensor arguments that ``func`` writes to, by its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return written


@torch.library.custom_op("flame::trunc_normal_", mutates_args=("tensor",), tags=(torch.Tag.nondeterministic_seeded,))
def _trunc_normal_(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
    _PLAIN_TRUNC_NORMAL(tensor, mean, std, a, b)


@_trunc_normal_.register_fake
def _(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
    return None


def _recordable_trunc_normal_(tensor, mean, std, a, b, generator=None):
    if generator is not None:
        raise RecordError("trunc_normal_ with a generator of its own")
    with torch.no_grad():
        _trunc_normal_(tensor, mean, std, a, b)
    return tensor


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record everything built in the body.

    The generators of Python, NumPy and torch are put in a fixed state for the body and restored after it, so that a
    constructor which draws from the first two builds the same model on every rank.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        torch.nn.init._no_grad_trunc_normal_ = _recordable_trunc_normal_
        with torch.random.fork_rng([]), Recorder() as recorder:
            yield recorder
    finally:
        torch.nn.init._no_grad_trunc_normal_ = _PLAIN_TRUNC_NORMAL
        random.setstate(python_state)
        np.random.set_state(numpy_state)
