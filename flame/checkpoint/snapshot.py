"""A copy of a run's tensors in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from flame.errors import UserError

ALIGNMENT = 64  # bytes, a cache line


class HostMemory:
    """One stretch of host memory with a place for each tensor, taken once and used by every snapshot.

    Page-locked memory is what a GPU copies to at the full speed of its bus. It is registered with CUDA rather than
    taken from torch's allocator of such memory, which rounds sizes up to powers of two.

    Args:
        tensors: this rank's tensors by name; their sizes and dtypes count.
        pinned: page-lock the memory; without CUDA it does nothing.

    Raises:
        UserError: the system does not give so much (page-locked) memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], pinned: bool):
        offsets, self.num_bytes = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = self.num_bytes
            self.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        try:
            # Populated now: the first snapshot would otherwise wait for every page.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(-1, max(self.num_bytes, ALIGNMENT), flags=flags)
        except OSError as error:
            raise UserError(f"{self._needs()}: {error}") from error
        self.is_pinned = pinned and torch.cuda.is_available()
        if self.is_pinned:
            self._register()
        self.tensors = {name: self._place(tensor, offsets[name]) for name, tensor in tensors.items()}

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these tensors have the names, sizes and dtypes that the memory was laid out for."""
        return tensors.keys() == self.tensors.keys() and all(
            (tensor.size(), tensor.dtype) == (self.tensors[name].size(), self.tensors[name].dtype)
            for name, tensor in tensors.items()
        )

    def close(self) -> None:
        """Let CUDA go of the memory; the system takes it back with the last tensor in it."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())

    def _place(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """A tensor with a storage of its own in the memory; DCP copies a part of a larger storage before writing it."""
        if not tensor.numel():
            return torch.empty(tensor.size(), dtype=tensor.dtype)
        flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return flat.view(tensor.size())

    def _register(self) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(self._address(), len(self._memory), 0))
        if code:
            raise UserError(
                f"{self._needs()} page-locked (CUDA error {code}); checkpoint.async_mode = async needs none"
            )

    def _address(self) -> int:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def _needs(self) -> str:
        return f"checkpoint.async_mode: this process needs {self.num_bytes / 2**30:.1f} GiB of host memory"


class Snapshot:
    """Copies tensors to host memory; ``copy`` runs in a thread, and until it is done the tensors must stay as they are.

    Args:
        tensors: by checkpoint name, plain or DTensor; each rank copies its parts.
        memory: where to, for the names, sizes and dtypes of this rank's parts.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], memory: HostMemory):
        self.memory = memory
        self._sources = local_parts(tensors)
        self._device = next((t.device for t in self._sources.values() if t.device.type == "cuda"), None)
        # The update that made these values may still be queued.
        self._updated = torch.cuda.current_stream(self._device).record_event() if self._device else None
        self._copied = threading.Event()

    def copy(self) -> None:
        """Copy, and return when the copies are there. On a GPU a stream of its own works beside the computation."""
        try:
            if self._device is None:
                self._copy_all()
                return
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(self._updated)
            with torch.cuda.stream(stream):
                self._copy_all()
            stream.synchronize()
        finally:
            self._sources = {}
            self._copied.set()

    def wait(self) -> None:
        """Wait until the tensors may change."""
        self._copied.wait()

    def fetch(self, name: str) -> torch.Tensor:
        """This rank's part of a tensor, as it was."""
        return self.memory.tensors[name]

    @torch.no_grad()
    def _copy_all(self) -> None:
        for name, tensor in self._sources.items():
            self.memory.tensors[name].copy_(tensor, non_blocking=self.memory.is_pinned)


def local_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank holds of each tensor."""
    return {name: (t.to_local() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}
