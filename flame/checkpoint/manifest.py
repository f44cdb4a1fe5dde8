"""The manifest of a checkpoint folder: which files belong to it, how long they are, what their checksums are."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

import flame
from flame.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
SHARD_SUFFIX = ".distcp"

# Below this size checksums cost a few seconds (2 GB/s per core), so they are the default.
CHECKSUM_LIMIT = 10_000_000_000


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its size in bytes and, when taken, its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint folder holds.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        contents: parts in it, of "model", "optimizer" and "train_state".
        dtype: export dtype of a weights-only checkpoint, None for the dtypes of training.
        files: entries by file name, without folders.
    """

    step: int
    world_size: int
    contents: tuple[str, ...]
    files: dict[str, FileEntry]
    dtype: str | None = None
    format: int = FORMAT
    flame: str = field(default_factory=lambda: flame.__version__)
    torch: str = field(default_factory=lambda: str(torch.__version__))

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


class BrokenCheckpoint(UserError):
    """A checkpoint folder that is not complete; the message is the reason, without the folder's name."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into a folder and make it durable."""
    body = asdict(manifest)
    write_json(folder / MANIFEST, body | {"checksum": _digest(body)})


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises:
        BrokenCheckpoint: it is missing, unreadable, altered, of a later format, or names files outside the folder.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise BrokenCheckpoint(f"no {MANIFEST}")
    try:
        body = json.loads(path.read_bytes())
        checksum = body.pop("checksum")
        files = {check_file_name(name): FileEntry(**entry) for name, entry in body["files"].items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BrokenCheckpoint(f"{MANIFEST} is damaged ({type(error).__name__}: {error})") from error
    if checksum != _digest(body):
        raise BrokenCheckpoint(f"{MANIFEST} is damaged (its checksum differs)")
    if body["format"] > FORMAT:
        raise BrokenCheckpoint(f"format {body['format']} was written by a later flame ({body['flame']})")
    known = {name: body[name] for name in Manifest.__dataclass_fields__ if name in body}
    return Manifest(**known | {"files": files, "contents": tuple(body["contents"])})


def check_file_name(name: str) -> str:
    """Return a plain file name, or refuse one that leads out of its folder.

    Raises:
        BrokenCheckpoint: the name is empty, a path, or one of ``.`` and ``..``.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BrokenCheckpoint(f"file name {name!r} leads out of the checkpoint folder")
    return name


def check_complete(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there with its size (a few system calls per file).

    Raises:
        BrokenCheckpoint: files are missing ("N of M shard files found"), have another size, or are links elsewhere.
    """
    missing = [name for name in manifest.files if not (folder / name).is_file()]
    if missing:
        raise BrokenCheckpoint(describe_missing(missing, manifest.files))
    for name, entry in manifest.files.items():
        path = folder / name
        if path.is_symlink():
            raise BrokenCheckpoint(f"{name} is a link, which may lead out of the checkpoint folder")
        if (size := path.stat().st_size) != entry.bytes:
            raise BrokenCheckpoint(f"{name} has {size:,} bytes instead of {entry.bytes:,}")


def describe_missing(missing: list[str], files: Iterable[str]) -> str:
    """Say how many shard files of a checkpoint there are and which files are not."""
    shards = [name for name in files if name.endswith(SHARD_SUFFIX)]
    found = len(shards) - sum(name.endswith(SHARD_SUFFIX) for name in missing)
    names = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
    return f"{found} of {len(shards)} shard files found; missing: {names}"


def check_contents(folder: Path, files: dict[str, FileEntry]) -> None:
    """Compare the checksums of files with the manifest's; files without a checksum pass.

    Raises:
        BrokenCheckpoint: a file's content differs.
    """
    for name, entry in files.items():
        if entry.sha256 is not None and sha256(folder / name) != entry.sha256:
            raise BrokenCheckpoint(f"{name} is damaged (its checksum differs)")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries (new files, renames) are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Hold a checkpoint against removal by another process while it is read."""
    with (folder / MANIFEST).open("rb") as file:
        _lock(file, fcntl.LOCK_SH)
        yield


def is_being_read(folder: Path) -> bool:
    """Whether a process, this one included, is inside ``reading(folder)``."""
    with (folder / MANIFEST).open("rb") as file:
        try:
            _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock(file: BinaryIO, operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        # Some network file systems have no locks; there a reader is not protected, and nothing else is lost.
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF):
            raise
