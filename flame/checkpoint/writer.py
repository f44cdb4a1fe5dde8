"""Writing one checkpoint: every file aside and synced, the manifest, one rename, and only then the older ones go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flame.checkpoint import folders
from flame.checkpoint.dcp import write_tensors
from flame.checkpoint.manifest import (
    CHECKSUM_LIMIT,
    FileEntry,
    Manifest,
    sha256,
    sync_folder,
    write_json,
    write_manifest,
)
from flame.checkpoint.names import MODEL, OPTIMIZER
from flame.checkpoint.ranks import Ranks
from flame.errors import UserError

logger = logging.getLogger(__name__)

TRAIN_STATE = "train_state.json"


class SaveError(UserError):
    """A checkpoint could not be written, as on a full disk; earlier ones are intact."""


@dataclass(frozen=True)
class Staged:
    """A checkpoint in memory, ready to be written.

    Attributes:
        step: optimizer steps done.
        tensors: by checkpoint name; on the meta device where ``fetch`` gives the values.
        train_state: everything else, as plain JSON data.
        dtype: export dtype of a checkpoint with weights only, None for the dtypes of training.
        fetch: gives a tensor (of a DTensor this rank's part) when it is written.
        went_on_from: the step that the run was resumed from, at its first save; later steps than that are set aside.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    train_state: dict[str, Any]
    dtype: str | None = None
    fetch: Callable[[str], torch.Tensor] | None = None
    went_on_from: int | None = None


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints into a folder that all ranks share.

    Attributes:
        folder: where the ``step-N`` folders lie.
        keep_latest_k: complete checkpoints to keep; 0 keeps all.
        full_checksums: take checksums of large checkpoints too; below 10 GB they are always taken.
        ranks: the ranks that write; a thread needs a process group of its own.
    """

    folder: Path
    keep_latest_k: int
    full_checksums: bool
    ranks: Ranks

    def write(self, staged: Staged) -> Path:
        """Write a checkpoint; on return it is complete, on the disk and visible, and older ones beyond k are gone.

        Collective. Returns the folder ``step-N``.

        Raises:
            SaveError: it could not be written, on whichever rank; raised on all ranks, earlier checkpoints intact.
            UserError: the folder is not shared between the nodes; raised on all ranks.
        """
        try:
            self._publish(self._write(staged), staged.went_on_from)
        except (RuntimeError, OSError, UserError) as error:
            self._discard(staged.step)
            if isinstance(error, UserError):
                raise
            raise SaveError(f"checkpoint of step {staged.step} was not saved in {self.folder}: {error}") from error
        return folders.step_folder(self.folder, staged.step)

    def _write(self, staged: Staged) -> Manifest:
        """Write everything but the manifest into the hidden folder, every file synced."""
        folder = self.ranks.on_main(lambda: folders.start_writing(self.folder, staged.step))
        self.ranks.together(lambda: _check_shared(folder, self.folder))
        write_tensors(folder, staged.tensors, self.ranks.group, fetch=staged.fetch)
        self.ranks.on_main(lambda: write_json(folder / TRAIN_STATE, staged.train_state))
        return Manifest(
            step=staged.step,
            world_size=self.ranks.size,
            contents=_contents(staged),
            files=self._describe_files(folder),
            dtype=staged.dtype,
        )

    def _describe_files(self, folder: Path) -> dict[str, FileEntry]:
        """Sizes and checksums of the files of a folder, each rank a share of them."""
        sizes = self.ranks.on_main(lambda: {path.name: path.stat().st_size for path in sorted(folder.iterdir())})
        wanted = self.full_checksums or sum(sizes.values()) < CHECKSUM_LIMIT
        mine = self.ranks.share(list(sizes)) if wanted else []
        sums: dict[str, str] = {}
        for part in self.ranks.gather(self.ranks.together(lambda: {name: sha256(folder / name) for name in mine})):
            sums |= part
        return {name: FileEntry(size, sums.get(name)) for name, size in sizes.items()}

    def _publish(self, manifest: Manifest, went_on_from: int | None) -> None:
        """Complete the hidden folder, give it its name, and only then remove older checkpoints."""

        def publish() -> None:
            folder = self.folder / f".step-{manifest.step}.tmp"
            write_manifest(folder, manifest)
            sync_folder(folder)
            self._set_aside(went_on_from)
            folders.publish(self.folder, manifest.step)

        self.ranks.on_main(publish)
        if self.ranks.is_main:
            self._purge(manifest.step)

    def _set_aside(self, went_on_from: int | None) -> None:
        """Later steps than the one that the run went on from are of a course that it has left."""
        left = folders.set_aside(self.folder, went_on_from) if went_on_from is not None else []
        if left:
            names = ", ".join(f"step-{step}" for step in left)
            logger.warning("%s: %s set aside as step-N.replaced, since this run went on from step %d",
                           self.folder, names, went_on_from)  # fmt: skip

    def _purge(self, step: int) -> None:
        try:
            folders.purge(self.folder, self.keep_latest_k, protect=[step])
        except OSError as error:  # the new checkpoint stands; an old one that stays is no reason to stop
            logger.warning("could not remove old checkpoints in %s: %s", self.folder, error)

    def _discard(self, step: int) -> None:
        """Give back the space of a save that failed; the folder may be unreadable by now, which is no second fault."""
        if self.ranks.is_main:
            folders.discard(self.folder, step)


def _contents(staged: Staged) -> tuple[str, ...]:
    parts = [p for p, prefix in (("model", MODEL), ("optimizer", OPTIMIZER)) if any_under(staged.tensors, prefix)]
    return (*parts, *(["train_state"] if staged.train_state else []))


def any_under(names: Mapping[str, Any], prefix: str) -> bool:
    """Whether a name begins with ``prefix``."""
    return any(name.startswith(prefix) for name in names)


def _check_shared(folder: Path, root: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"{root} is not shared between the nodes: what rank 0 makes there is not seen here; give a job.dump_folder "
            "that all nodes see"
        )
