"""Writing a Hugging Face model folder tensor by tensor, and putting it in place without ever leaving half a model.

The safetensors library serialises a file from tensors that are all in memory. The format itself needs only sizes in
advance (https://huggingface.co/docs/safetensors, "Format"), so a file is written here with one tensor in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from flame.checkpoint.hf_weights import INDEX_FILES, SINGLE_FILES
from flame.checkpoint.manifest import sync_folder
from flame.errors import UserError

SINGLE = SINGLE_FILES[0]
INDEX = INDEX_FILES[0]
SHARD = re.compile(r"model-(?:[\w-]+-)?\d{5}-of-\d{5}\.safetensors")

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is to be written."""

    size: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize


class SafetensorsFile:
    """A safetensors file that takes its tensors one at a time, in the order of ``names``.

    Args:
        path: the file.
        specs: what will be written, by name.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]):
        # Wide elements first, so that every tensor begins at a multiple of its element size.
        self.names = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
        self.specs = specs
        self.path = path
        self._next = 0

    def __enter__(self) -> SafetensorsFile:
        self._file = self.path.open("wb")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in self.names:
            spec = self.specs[name]
            end = offset + spec.num_bytes
            header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.size), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(len(text).to_bytes(8, "little") + text)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor, on the CPU."""
        spec = self.specs[name]
        if name != self.names[self._next] or tensor.size() != spec.size or tensor.dtype != spec.dtype:
            raise ValueError(f"{name} {list(tensor.size())} {tensor.dtype} is not what comes next in {self.path}")
        self._file.write(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
        self._next += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()


def plan_shards(specs: Mapping[str, TensorSpec], max_bytes: int, tag: str = "") -> dict[str, dict[str, TensorSpec]]:
    """Divide tensors over files of at most ``max_bytes`` bytes (or one tensor), in order.

    Returns:
        The tensors of each file, by file name: one ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` …
        with ``tag`` after "model-".
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    used = 0
    for name, spec in specs.items():
        if shards[-1] and used + spec.num_bytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = spec
        used += spec.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{tag}{i:05d}-of-{len(shards):05d}.safetensors": part for i, part in enumerate(shards, start=1)}


def free_tag(folder: Path, specs: Mapping[str, TensorSpec], max_bytes: int) -> str:
    """A tag under which no shard file has the name of one in the folder, so that moving in replaces none.

    A single file needs none: its rename is the whole change.
    """
    tag, number = "", 0
    while any((folder / name).exists() for name in plan_shards(specs, max_bytes, tag) if name != SINGLE):
        number += 1
        tag = f"{number}-"
    return tag


def write_index(folder: Path, shards: Mapping[str, Mapping[str, TensorSpec]]) -> None:
    """Write the index that says which file holds which tensor."""
    weight_map = {name: file for file, part in shards.items() for name in part}
    total = sum(spec.num_bytes for part in shards.values() for spec in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def move_in(aside: Path, target: Path) -> None:
    """Move a finished model folder's files into ``target``, among whatever else lies there.

    The weights change over at one rename, the single file's or the index's: shard files have names that are new to the
    target, and readers prefer ``model.safetensors`` to an index. What an earlier export left is removed afterwards.
    """
    new = {path.name for path in aside.iterdir()}
    switches = [name for name in (INDEX, SINGLE) if name in new]
    others = sorted(new - {*switches, "config.json"})
    # Without its config.json a new folder is no model yet; in an old one it goes with the weights.
    for name in [*others, *switches, "config.json"]:
        (aside / name).replace(target / name)
    if SINGLE not in new:
        (target / SINGLE).unlink(missing_ok=True)
    if INDEX not in new:
        (target / INDEX).unlink(missing_ok=True)
    sync_folder(target)
    for path in target.iterdir():
        if SHARD.fullmatch(path.name) and path.name not in new:
            path.unlink()
    shutil.rmtree(aside)


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``5GB``, ``500MB`` or a plain number; units are powers of 1000.

    Raises:
        UserError: it is no size above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", str(text), flags=re.IGNORECASE)
    size = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size <= 0:
        raise UserError(f"{text!r} is no size; give one such as 5GB or 500MB")
    return size
