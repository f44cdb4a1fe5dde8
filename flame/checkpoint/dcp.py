"""Tensors to and from PyTorch's distributed checkpoint format (DCP), without ever running what a file says.

Stock DCP unpickles ``.metadata`` and every non-tensor entry, and a pickle can run any command. Here ``.metadata`` goes
through an unpickler that knows the few classes of the format, tensors through ``torch.load(weights_only=True)``, and
anything else in a checkpoint is refused.

The names with an underscore in ``_ALLOWED`` are those that DCP itself writes into ``.metadata`` (torch 2.11 and 2.13
write the same); they are listed as text and never imported here.
"""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    load,
    save,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from flame.checkpoint.manifest import BrokenCheckpoint, check_file_name, describe_missing

METADATA = ".metadata"

# DCP holds the tensors of a file in memory until the file is written, so a rank's part is cut into files of this size.
FILE_BYTES = 2 << 30

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler for DCP's ``.metadata`` that refuses every class and function outside that format."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath", "PurePosixPath"):
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # Python 3.11 pickles an Enum member as getattr(class, name)
        raise BrokenCheckpoint(f"{METADATA} asks for {module}.{name}, which has no place in a checkpoint; refused")


def _enum_member(enum: Any, name: str) -> Enum:
    if not (isinstance(enum, type) and issubclass(enum, Enum)):
        raise BrokenCheckpoint(f"{METADATA} asks for attribute {name!r} of {enum!r}; refused")
    return enum[name]


def read_metadata(folder: Path) -> Metadata:
    """Read what tensors a DCP folder holds and in which files, and check that the files are inside the folder.

    Raises:
        BrokenCheckpoint: ``.metadata`` is missing, damaged or hostile, or a shard file is missing.
    """
    path = folder / METADATA
    if not path.is_file():
        raise BrokenCheckpoint(f"no {METADATA} file")
    with path.open("rb") as file:
        try:
            metadata = MetadataUnpickler(file).load()
        except BrokenCheckpoint:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise BrokenCheckpoint(f"{METADATA} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise BrokenCheckpoint(f"{METADATA} is damaged (it holds no DCP metadata)")
    _check_storage(folder, metadata)
    return metadata


def _check_storage(folder: Path, metadata: Metadata) -> None:
    """Check that every part of every tensor lies in a file of the folder, within the file's length."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        check_file_name(info.relative_path)
        if getattr(info, "transform_descriptors", None):
            raise BrokenCheckpoint(f"{info.relative_path} is stored through an extension, which is not supported")
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    if missing := sorted(name for name in ends if not (folder / name).is_file()):
        raise BrokenCheckpoint(describe_missing(missing, ends))
    for name, end in ends.items():
        if (size := (folder / name).stat().st_size) < end:
            raise BrokenCheckpoint(f"{name} has {size:,} bytes instead of {end:,}")


def tensor_metadata(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint (size, dtype, chunks) by name; other entries are left out."""
    return {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }


class Reader(FileSystemReader):
    """DCP reader over metadata that was read and checked before."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata


class LoadPlanner(DefaultLoadPlanner):
    """Reads tensors only; a tensor with more rows than the stored one gets its first rows."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        stored = tensor_metadata(self.metadata)
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            items += create_read_items_for_chunk_list(name, stored[name], local_chunks(tensor))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise BrokenCheckpoint(f"{read_item.dest_index.fqn} is no tensor; refused")


def local_chunks(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    """The part (offsets and sizes) of a global tensor that this rank holds; none for a rank outside its mesh."""
    if isinstance(tensor, DTensor):
        # The protocol by which DCP itself asks a DTensor for its parts (torch 2.11 to 2.13).
        inside = tensor.device_mesh.get_coordinate() is not None
        return tensor.__create_chunk_list__() if inside else []
    return [ChunkStorageMetadata(offsets=torch.Size([0] * tensor.ndim), sizes=tensor.size())]


class Writer(FileSystemWriter):
    """DCP writer that cuts a rank's part into files of bounded size and notes no path of this machine."""

    def __init__(self, folder: Path, file_bytes: int):
        super().__init__(folder, per_thread_copy_ahead=0)
        self.file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = plan.storage_data
        results: list[WriteResult] = []
        for number, items in enumerate(_bins(plan.items, self.file_bytes)):
            part = replace(plan, items=items, storage_data=replace(prefix, prefix=f"{prefix.prefix}{number}_"))
            results += super().write_data(part, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def _bins(items: list[WriteItem], limit: int) -> Iterator[list[WriteItem]]:
    """Cut write items into runs of at most ``limit`` bytes (or of one item)."""
    run: list[WriteItem] = []
    used = 0
    for item in items:
        size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if run and used + size > limit:
            yield run
            run, used = [], 0
        run.append(item)
        used += size
    if run:
        yield run


class LazySavePlanner(DefaultSavePlanner):
    """Plans with tensors on the meta device and fetches each one when it is written."""

    def __init__(self, fetch: Callable[[str], torch.Tensor]):
        super().__init__(flatten_state_dict=False)
        self.fetch = fetch

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.fetch(index.fqn)


def write_tensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
    fetch: Callable[[str], torch.Tensor] | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors (plain or DTensor) into a folder as a DCP checkpoint, each file synced. Collective.

    Args:
        folder: an existing, empty folder.
        tensors: by name; every rank gives the same names.
        group: process group of the ranks that write.
        alone: this process writes all, although ``torch.distributed`` may be initialised.
        fetch: gives the tensor of a name when it is written; ``tensors`` may then be on the meta device.
        file_bytes: size at which a rank begins its next file; also the host memory in use.

    Raises:
        RuntimeError: a rank could not write; raised on all ranks, with the rank's own error in the message.
    """
    planner = LazySavePlanner(fetch) if fetch else DefaultSavePlanner(flatten_state_dict=False)
    writer = Writer(folder, file_bytes)
    _call(save, dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=alone)


def read_tensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Metadata | None = None,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    """Load tensors in place, whatever layout they were saved in; each rank reads what it holds. Collective.

    dtypes are converted. A tensor that has more rows than the stored one gets its first rows, the others stay.

    Raises:
        RuntimeError: a rank could not read; raised on all ranks, with the rank's own error in the message.
    """
    reader = Reader(folder, metadata or read_metadata(folder))
    _call(load, dict(tensors), storage_reader=reader, planner=LoadPlanner(), process_group=group, no_dist=alone)


def _call(function: Callable, *args: Any, **kwargs: Any) -> None:
    """Call a DCP function; its BaseException, which ordinary handlers let through, becomes a RuntimeError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is .*disabled|unavailable")
            function(*args, **kwargs)
    except CheckpointException as error:
        reasons = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise RuntimeError("; ".join(reasons[:4])) from error
