"""Reading the weights of a Hugging Face folder: safetensors, or torch files without running their pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from flame.checkpoint.dcp import local_chunks
from flame.errors import UserError

# In the order of preference that transformers has.
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def is_hf_folder(path: Path) -> bool:
    """Whether a folder holds the weights of a Hugging Face model."""
    return any((path / name).is_file() for name in SINGLE_FILES + INDEX_FILES)


class HFWeights:
    """The tensors of a Hugging Face folder by name, read in slices on demand.

    Attributes:
        folder: the folder.
        sizes: shape of every tensor.
        dtypes: dtype of every tensor.

    Raises:
        UserError: no weights in the folder, a shard file missing, a file that is damaged or not plain tensors, or a
            tensor of an unknown dtype.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of = self._map_names()
        self.sizes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name in self._file_of:
            self.sizes[name], self.dtypes[name] = self._describe(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor or a slice of it, on the CPU; only that part of the file is read."""
        file = self._open(self._file_of[name])
        if isinstance(file, dict):
            return file[name] if index is None else file[name][index]
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    def vocab_size(self) -> int | None:
        """Rows of the embedding that the folder's config.json states."""
        return read_vocab_size(self.folder / "config.json")

    def _map_names(self) -> dict[str, str]:
        for single, index in zip(SINGLE_FILES, INDEX_FILES, strict=True):
            if (self.folder / single).is_file():
                return dict.fromkeys(self._names_in(single), single)
            if (self.folder / index).is_file():
                return self._read_index(index)
        raise UserError(f"{self.folder} holds no weights: none of {', '.join(SINGLE_FILES + INDEX_FILES)}")

    def _read_index(self, index: str) -> dict[str, str]:
        try:
            file_of: dict[str, str] = json.loads((self.folder / index).read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / index} is damaged: {type(error).__name__}: {error}") from error
        files = sorted(set(file_of.values()))
        for name in files:
            if not name or "/" in name or "\\" in name or name in (".", ".."):
                raise UserError(f"{self.folder / index} names the file {name!r}, which leads out of the folder")
        if missing := [name for name in files if not (self.folder / name).is_file()]:
            found = len(files) - len(missing)
            raise UserError(
                f"{self.folder}: {found} of {len(files)} shard files found; missing: {', '.join(missing[:4])}"
            )
        return file_of

    def _names_in(self, file: str) -> list[str]:
        return list(self._open(file).keys())

    def _open(self, name: str) -> Any:
        """A file's handle (safetensors) or its tensors (a torch file), mapped into memory."""
        if name not in self._files:
            self._files.clear()  # what is read of a mapped file stays in this process's memory: one at a time
            path = self.folder / name
            try:
                if name.endswith(".safetensors"):
                    self._files[name] = safe_open(path, framework="pt")
                else:
                    self._files[name] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # each library has its own kinds of damage
                raise UserError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        return self._files[name]

    def _describe(self, name: str) -> tuple[torch.Size, torch.dtype]:
        file = self._open(self._file_of[name])
        if isinstance(file, dict):
            return file[name].size(), file[name].dtype
        if name not in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            raise UserError(f"{self.folder / self._file_of[name]} lacks {name}, which the index places there")
        part = file.get_slice(name)
        if (kind := part.get_dtype()) not in _DTYPES:
            raise UserError(f"{self.folder / self._file_of[name]}: {name} is {kind}; known are {', '.join(_DTYPES)}")
        return torch.Size(part.get_shape()), _DTYPES[kind]


def load_hf_tensors(weights: HFWeights, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Fill tensors (plain or DTensor) in place; each rank reads the slices that it holds.

    Args:
        weights: the source.
        tensors: by name with ``prefix``, each at least as long as the source's (first rows are filled).
        prefix: what the names have before the source's.
    """
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        stored = weights.sizes[name.removeprefix(prefix)]
        for chunk in local_chunks(tensor):
            ends = [min(o + s, n) for o, s, n in zip(chunk.offsets, chunk.sizes, stored, strict=True)]
            if any(end <= offset for offset, end in zip(chunk.offsets, ends, strict=True)):
                continue
            index = tuple(slice(offset, end) for offset, end in zip(chunk.offsets, ends, strict=True))
            into = tuple(slice(0, end - offset) for offset, end in zip(chunk.offsets, ends, strict=True))
            with torch.no_grad():
                local[into].copy_(weights.read(name.removeprefix(prefix), index))


def read_vocab_size(config: Path) -> int | None:
    """``vocab_size`` of a model config file, None when there is no such file or entry."""
    return json.loads(config.read_bytes()).get("vocab_size") if config.is_file() else None
