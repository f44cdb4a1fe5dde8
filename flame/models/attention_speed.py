"""How fast each attention backend is on a given shape, and which to take.

A backend counts only if its outputs and gradients are those of the one that is in use without measuring.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from flame.errors import UserError
from flame.models.attention import Attention

logger = logging.getLogger(__name__)

WARM_UP, REPEATS = 2, 5
TOLERANCE = 0.02  # relative, in the Euclidean norm: ten times what rounding to bfloat16 costs
MARGIN = 0.03  # gains below this are noise, and not worth another kernel
MORE_KEPT = 0.1  # of what the default keeps for the backward: jobs that fit the GPU by it must go on doing so
# Documents follow each other in these shares of the longest: most tokens are in long ones, as in packed text.
_DOCUMENT_SHARES = (1.0, 0.5, 1.0, 0.25, 1.0, 0.05)
BACKWARD_PRODUCTS = 2.5  # five matrix products, where the forward has two


@dataclass(frozen=True)
class AttentionShape:
    """Causal attention of one layer, as a rank computes it for a micro-batch.

    Attributes:
        num_heads, num_kv_heads, head_dim: of this rank.
        num_rows: sequences side by side; 1 for a packed row.
        num_tokens: of a row.
        document_len: longest document of a packed row, in tokens; None if rows are not packed.
        window: keys that a query sees, itself included; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    num_tokens: int
    document_len: int | None
    window: int | None = None

    def bounds(self) -> list[int]:
        """Document bounds of a packed row; of a dense one, its ends."""
        bounds, number = [0], 0
        while bounds[-1] < self.num_tokens:
            share = 1.0 if self.document_len is None else _DOCUMENT_SHARES[number % len(_DOCUMENT_SHARES)]
            length = max(1, int(share * (self.document_len or self.num_tokens)))
            bounds.append(min(bounds[-1] + length, self.num_tokens))
            number += 1
        return bounds

    def tensor_sizes(self) -> list[tuple[int, ...]]:
        """Of queries, keys, values and outputs: [T, H, D] in packed rows, else [B, T, H, D]."""
        rows = (self.num_tokens,) if self.document_len else (self.num_rows, self.num_tokens)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        return [(*rows, number, self.head_dim) for number in heads]

    def forward_flops(self) -> int:
        """Of the pairs of query and key that see each other, two products each."""
        window = self.window or self.num_tokens
        pairs = 0
        for start, end in itertools.pairwise(self.bounds()):
            length = end - start
            narrow = min(length, window)
            pairs += narrow * (narrow + 1) // 2 + (length - narrow) * window
        return 4 * pairs * self.num_heads * self.head_dim * self.num_rows

    def describe(self) -> str:
        """In words."""
        heads = f"{self.num_heads} heads of {self.head_dim}"
        if self.num_kv_heads != self.num_heads:
            heads += f" ({self.num_kv_heads} of keys)"
        rows = f"{self.num_rows} x {self.num_tokens:,}" if self.num_rows > 1 else f"{self.num_tokens:,}"
        documents = f" in documents of up to {self.document_len:,}" if self.document_len else ""
        window = f", window {self.window}" if self.window else ""
        return f"{rows} tokens{documents}, {heads}{window}"


@dataclass(frozen=True)
class Timing:
    """Medians of one layer: milliseconds, and bytes beside inputs and their gradients (None on a CPU), at most and
    from forward to backward."""

    forward_ms: float
    backward_ms: float
    memory_bytes: int | None = None
    kept_bytes: int | None = None

    @property
    def total_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Choice:
    """A backend, the milliseconds of all layers' attention by each that was measured, and why others were not."""

    backend: str
    milliseconds: dict[str, float]
    left_out: dict[str, str]

    def describe(self) -> str:
        """The choice with its figures, fastest first."""
        if self.backend not in self.milliseconds:
            return f"{self.backend} (not to be measured here: {self.left_out.get(self.backend)})"
        ranked = sorted(self.milliseconds.items(), key=lambda item: item[1])
        return f"{self.backend} ({', '.join(f'{name} {value:.1f} ms' for name, value in ranked)})"


class Measured:
    """Measures backends on one shape, each against the outputs and gradients of the first.

    Args:
        shape: what to compute.
        device, dtype: of the inputs.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype):
        self.shape, self.device = shape, device
        self._inputs, self._cotangent = _make_inputs(shape, device, dtype)
        self._expected: list[Tensor] | None = None

    def __call__(self, backend: str) -> Timing:
        """Time a backend.

        Raises:
            Exception: whatever the backend raises; ArithmeticError if its results are not those of the first.
        """
        attend = call_of(Attention(backend, self.shape.document_len), self.shape, self.device)
        results = self._run(attend)
        if self._expected is None:
            self._expected = results
        error = max(_distance(actual, expected) for actual, expected in zip(results, self._expected, strict=True))
        if not error <= TOLERANCE:  # nan
            raise ArithmeticError(f"its results are off by {error:.1%}")
        return self._time(attend)

    def _run(self, attend: Callable) -> list[Tensor]:
        o = attend(*self._inputs)
        return [o.detach(), *torch.autograd.grad(o, self._inputs, self._cotangent)]

    def _time(self, attend: Callable) -> Timing:
        on_gpu = self.device.type == "cuda"
        for _ in range(WARM_UP):
            self._run(attend)
        if on_gpu:
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        forward, backward, kept = [], [], None
        for _ in range(REPEATS):
            box: list[Tensor] = []
            forward.append(self._clock(lambda: box.append(attend(*self._inputs))))  # noqa: B023
            if on_gpu:
                kept = torch.cuda.memory_allocated(self.device) - before
            backward.append(self._clock(partial(torch.autograd.grad, box.pop(), self._inputs, self._cotangent)))
        memory = torch.cuda.max_memory_allocated(self.device) - before if on_gpu else None
        return Timing(statistics.median(forward), statistics.median(backward), memory, kept)

    def _clock(self, action: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            action()
            return 1e3 * (time.perf_counter() - start)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def measure_all(
    shape: AttentionShape, backends: list[str], device: torch.device, dtype: torch.dtype
) -> dict[str, Timing | str]:
    """Each backend's timing on a shape, or why it has none; the first is the measure of what is right.

    Raises:
        UserError: a backend has left the GPU unusable.
    """
    try:
        measured = Measured(shape, device, dtype)
    except torch.OutOfMemoryError as error:
        return dict.fromkeys(backends, _reason(error))
    return {backend: _try(measured, backend) for backend in backends}


def pick_fastest(
    layers: Mapping[AttentionShape, int],
    backends: list[str],
    default: str,
    measure: Callable[[AttentionShape, list[str]], Mapping[str, Timing | str]],
) -> Choice:
    """The backend that is fastest over all layers, of those that keep about as much for the backward as the default.

    Args:
        layers: how many there are of each shape.
        backends: candidates besides the default.
        default: taken unless another is faster by more than noise.
        measure: each backend's timing on a shape, or why it has none.
    """
    names = [default, *(name for name in backends if name != default)]
    total, kept, left_out = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0), {}
    for shape, number in layers.items():
        for name, result in measure(shape, [name for name in names if name not in left_out]).items():
            if isinstance(result, str):
                left_out[name] = result
            else:
                total[name] += number * result.total_ms
                kept[name] += number * (result.kept_bytes or 0)
    if default not in left_out:
        left_out |= {
            name: f"keeps {kept[name] / 2**30:.2f} GiB for the backward, {default} {kept[default] / 2**30:.2f}"
            for name in names
            if name not in left_out and kept[name] > (1 + MORE_KEPT) * kept[default]
        }
    milliseconds = {name: value for name, value in total.items() if name not in left_out}
    best = min(milliseconds, key=milliseconds.__getitem__, default=default)
    if default in left_out or milliseconds[best] > (1 - MARGIN) * milliseconds[default]:
        best = default
    return Choice(best, milliseconds, left_out)


def _try(measured: Measured, backend: str) -> Timing | str:
    try:
        return measured(backend)
    except Exception as error:  # a kernel that does not take this shape says so in its own way
        reason = _reason(error)
        logger.debug("attention backend %s is left out: %s", backend, reason)
        _check_device(measured.device, backend, reason)
        return reason


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def _check_device(device: torch.device, backend: str, reason: str) -> None:
    """Raise a UserError if nothing more can be computed, as after an access to memory that is not there."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise UserError(
            f"model.attention_backend = 'auto' tried {backend}, after which the GPU can no longer be used ({reason}); "
            "give one that works here, such as varlen"
        ) from error


def _make_inputs(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    # A generator of its own: the job's draws must not depend on whether something was measured.
    generator = torch.Generator(device).manual_seed(0)
    tensors = [torch.randn(size, device=device, dtype=dtype, generator=generator) for size in shape.tensor_sizes()]
    return [x.requires_grad_() for x in tensors[:3]], tensors[3]


def call_of(attention: Attention, shape: AttentionShape, device: torch.device) -> Callable[..., Tensor]:
    """Attention of queries, keys and values as FLA's layers call it."""
    options = {"causal": True, "window_size": (-1, -1) if shape.window is None else (shape.window - 1, 0)}
    if shape.document_len is None:
        return partial(attention.dense, **options)
    bounds = torch.tensor(shape.bounds(), dtype=torch.int32, device=device)
    longest = shape.num_tokens
    return lambda q, k, v: attention.varlen(q, k, v, bounds, bounds, longest, longest, **options)


def _distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    return ((actual - expected).norm() / expected.norm()).item()


def as_plain(result: Timing | str) -> dict[str, object]:
    """A timing, or why there is none, for JSON."""
    return {"failed": result} if isinstance(result, str) else asdict(result)
