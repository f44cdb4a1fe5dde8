"""The checkpoints of a run: save, list, choose, load, keep the newest."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flame.checkpoint import folders
from flame.checkpoint.dcp import read_metadata, read_tensors, tensor_metadata, write_tensors
from flame.checkpoint.manifest import (
    CHECKSUM_LIMIT,
    BrokenCheckpoint,
    FileEntry,
    Manifest,
    check_contents,
    reading,
    sha256,
    sync_folder,
    write_json,
    write_manifest,
)
from flame.checkpoint.matching import match_names, sizes_of
from flame.checkpoint.names import MODEL, OPTIMIZER
from flame.checkpoint.ranks import Ranks
from flame.errors import UserError

logger = logging.getLogger(__name__)

TRAIN_STATE = "train_state.json"
EXPORT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class SaveError(UserError):
    """A checkpoint could not be written (a full disk, a folder that nodes do not share); earlier ones are intact."""


@dataclass(frozen=True)
class Staged:
    """A checkpoint in memory, ready to be written."""

    step: int
    tensors: dict[str, torch.Tensor]
    train_state: dict[str, Any]
    dtype: str | None


class CheckpointManager:
    """Saves and loads the checkpoints of one run. Every method is collective: all ranks call it alike.

    Args:
        folder: where the ``step-N`` folders lie, shared by all ranks.
        keep_latest_k: complete checkpoints to keep; 0 keeps all.
        verify: "size" checks presence and sizes before loading, "full" checksums too, "auto" takes "full" below 10 GB.
            Checksums are taken at every save below 10 GB, and with "full" at every save.
        group: process group of the ranks; the default group when None. A single process needs none.
    """

    def __init__(
        self,
        folder: str | Path,
        keep_latest_k: int = 0,
        verify: str = "auto",
        group: dist.ProcessGroup | None = None,
    ):
        self.folder = Path(folder)
        self.keep_latest_k = keep_latest_k
        self.verify = verify
        self.ranks = Ranks(group)
        self._cleaned = False
        self._loaded_step: int | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        train_state: Mapping[str, Any],
        weights_only: bool = False,
        export_dtype: str | None = None,
        fetch: Callable[[str], torch.Tensor] | None = None,
    ) -> Path:
        """Save a checkpoint; on return it is complete, on the disk and visible, and older ones beyond k are gone.

        Args:
            step: optimizer steps done.
            tensors: ``model.<fqn>`` and ``optimizer.<fqn>.<slot>``, plain or DTensor, the same names on every rank.
            train_state: everything else, as plain JSON data (rank 0's is saved).
            weights_only: leave the optimizer out.
            export_dtype: "float32", "float16" or "bfloat16" for the weights of a weights-only checkpoint.
            fetch: gives a tensor when it is written, so that ``tensors`` may be on the meta device.

        Returns:
            The folder ``step-N``.

        Raises:
            SaveError: it could not be written, on whichever rank; raised on all ranks, earlier checkpoints intact.
            TypeError: ``train_state`` holds something that JSON would lose or change.
        """
        self._clean()
        staged = self.ranks.together(lambda: self._stage(step, tensors, train_state, weights_only, export_dtype))
        try:
            manifest = self._write(staged, fetch)
            self._publish(manifest)
        except (RuntimeError, OSError, UserError) as error:
            self._discard(step)
            raise SaveError(f"checkpoint of step {step} was not saved in {self.folder}: {error}") from error
        return folders.step_folder(self.folder, step)

    def find_step(self, load_step: int = -1) -> int | None:
        """The step to resume from, verified: ``load_step`` itself, or the newest complete one for -1.

        Broken checkpoints that are passed over are logged with the reason. None when there is no checkpoint at all.

        Raises:
            UserError: that step is not there or broken; or checkpoints are there and all are broken.
        """
        self._clean()
        listing = self.ranks.on_main(lambda: folders.list_steps(self.folder))
        while (step := folders.choose_step(self.folder, load_step, listing)) is not None:
            reason = self._find_damage(listing.complete[step])
            if reason is None:
                break
            listing.broken[step] = reason
            del listing.complete[step]
        if self.ranks.is_main and step is not None:
            self._report_newer(step, load_step, listing)
        return step

    def latest(self) -> int | None:
        """The newest complete step, None when there is none."""
        return self.find_step(-1)

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        return sorted(self.ranks.on_main(lambda: folders.list_steps(self.folder)).complete)

    def contents(self, step: int) -> tuple[str, ...]:
        """What a checkpoint holds, of "model", "optimizer" and "train_state".

        Raises:
            UserError: there is no complete checkpoint of that step.
        """
        return self._manifest(step).contents

    def load(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        strict: bool = True,
        exclude: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Load a checkpoint into tensors of any layout, in place.

        A checkpoint without optimizer (weights only, converted, a seed) loads the model and leaves the optimizer's
        tensors as they are, with a line in the log.

        Args:
            step: one that ``find_step`` or ``steps`` gave.
            tensors: what to load into, by checkpoint name.
            strict: refuse missing and unexpected names.
            exclude: ``checkpoint.exclude_from_loading``: tensors and keys of the train state to leave out.

        Returns:
            The train state without excluded keys; empty when the checkpoint has none or "train_state" is excluded.

        Raises:
            UserError: no such step, names or shapes that do not match.
        """
        manifest = self._manifest(step)
        self._loaded_step = step
        folder = folders.step_folder(self.folder, step)
        with reading(folder):
            metadata = self.ranks.together(lambda: read_metadata(folder))
            sizes = {name: entry.size for name, entry in tensor_metadata(metadata).items()}
            names = match_names(sizes_of(tensors), sizes, str(folder), exclude, strict)
            matched = {name: tensors[name] for name in names}
            if self.ranks.is_main and _any_under(tensors, OPTIMIZER) and not _any_under(matched, OPTIMIZER):
                logger.warning("no optimizer state is taken from %s: the optimizer starts fresh", folder)
            read_tensors(folder, matched, metadata, self.ranks.group)
            return self.ranks.on_main(lambda: read_train_state(folder, manifest, exclude))

    def _manifest(self, step: int) -> Manifest:
        listing = self.ranks.on_main(lambda: folders.list_steps(self.folder))
        folders.choose_step(self.folder, step, listing)
        return listing.complete[step]

    def _clean(self) -> None:
        """Once per run, at its first use of the folder: remove what a killed run left."""
        if not self._cleaned:
            self.ranks.on_main(lambda: folders.clean(self.folder))
            self._cleaned = True

    def _report_newer(self, step: int, load_step: int, listing: folders.Listing) -> None:
        """Name the checkpoints after the chosen one: broken and passed over, or left behind by the user's choice."""
        for broken in sorted(number for number in listing.broken if number > step):
            logger.warning("passed over %s/step-%d: %s", self.folder, broken, listing.broken[broken])
        newer = sorted(number for number in listing.complete if number > step)
        if newer and load_step != -1:
            logger.warning(
                "checkpoint.load_step = %d leaves newer checkpoints in %s (%s); the next save sets them aside",
                load_step,
                self.folder,
                ", ".join(map(str, newer)),
            )

    def _stage(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        train_state: Mapping[str, Any],
        weights_only: bool,
        export_dtype: str | None,
    ) -> Staged:
        """Fix what is saved; a background save would copy it to host memory here."""
        dtype = export_dtype if weights_only else None
        chosen = {name: t for name, t in tensors.items() if name.startswith(MODEL) or not weights_only}
        if dtype is not None:
            chosen = {name: t.to(EXPORT_DTYPES[dtype]) if t.is_floating_point() else t for name, t in chosen.items()}
        state = dict(train_state)
        check_plain(state, "train_state")
        return Staged(step, chosen, state, dtype)

    def _write(self, staged: Staged, fetch: Callable[[str], torch.Tensor] | None) -> Manifest:
        """Write everything but the manifest into the hidden folder, every file synced."""
        folder = self.ranks.on_main(lambda: folders.start_writing(self.folder, staged.step))
        self.ranks.together(lambda: _check_shared(folder, self.folder))
        write_tensors(folder, staged.tensors, self.ranks.group, fetch=fetch)
        self.ranks.on_main(lambda: write_json(folder / TRAIN_STATE, staged.train_state))
        return Manifest(
            step=staged.step,
            world_size=self.ranks.size,
            contents=_contents(staged),
            files=self._describe_files(folder),
            dtype=staged.dtype,
        )

    def _describe_files(self, folder: Path) -> dict[str, FileEntry]:
        """Sizes and checksums of the files of a folder; each rank reads those that it wrote."""
        sizes = self.ranks.on_main(lambda: {path.name: path.stat().st_size for path in sorted(folder.iterdir())})
        wanted = self.verify == "full" or sum(sizes.values()) < CHECKSUM_LIMIT
        mine = _share(list(sizes), self.ranks) if wanted else []
        sums: dict[str, str] = {}
        for part in self.ranks.gather(self.ranks.together(lambda: {name: sha256(folder / name) for name in mine})):
            sums |= part
        return {name: FileEntry(size, sums.get(name)) for name, size in sizes.items()}

    def _publish(self, manifest: Manifest) -> None:
        """Complete the hidden folder, give it its name, and only then remove older checkpoints."""

        def publish() -> None:
            folder = self.folder / f".step-{manifest.step}.tmp"
            write_manifest(folder, manifest)
            sync_folder(folder)
            self._set_aside()
            folders.publish(self.folder, manifest.step)

        self.ranks.on_main(publish)
        if self.ranks.is_main:
            self._purge(manifest.step)

    def _set_aside(self) -> None:
        """At the first save after a load: later steps than the loaded one are of a course that this run has left."""
        if self._loaded_step is None:
            return
        left = folders.set_aside(self.folder, self._loaded_step)
        if left:
            names = ", ".join(f"step-{step}" for step in left)
            logger.warning("%s: %s set aside as step-N.replaced, since this run went on from step %d",
                           self.folder, names, self._loaded_step)  # fmt: skip
        self._loaded_step = None

    def _purge(self, step: int) -> None:
        try:
            folders.purge(self.folder, self.keep_latest_k, protect=[step])
        except OSError as error:  # the new checkpoint stands; an old one that stays is no reason to stop
            logger.warning("could not remove old checkpoints in %s: %s", self.folder, error)

    def _discard(self, step: int) -> None:
        """Give back the space of a save that failed; the folder may be unreadable by now, which is no second fault."""
        if self.ranks.is_main:
            folders.discard(self.folder, step)

    def _find_damage(self, manifest: Manifest) -> str | None:
        """Compare checksums, each rank a share of the files; the reason when a file is damaged."""
        if self.verify == "size" or (self.verify == "auto" and manifest.num_bytes >= CHECKSUM_LIMIT):
            return None
        folder = folders.step_folder(self.folder, manifest.step)
        mine = {name: manifest.files[name] for name in _share(sorted(manifest.files), self.ranks)}
        reasons = self.ranks.gather(self.ranks.together(lambda: _reason(folder, mine)))
        return next((reason for reason in reasons if reason is not None), None)


def check_plain(value: Any, where: str) -> None:
    """Refuse data that would come back from JSON missing or changed.

    Raises:
        TypeError: a value is no dict with text keys, list, text, number, bool or None; names the place.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: JSON keys are text")
            check_plain(item, f"{where}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_plain(item, f"{where}[{i}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"{where} is a {type(value).__name__}: the train state is plain JSON data")


def _contents(staged: Staged) -> tuple[str, ...]:
    parts = [p for p, prefix in (("model", MODEL), ("optimizer", OPTIMIZER)) if _any_under(staged.tensors, prefix)]
    return (*parts, *(["train_state"] if staged.train_state else []))


def _any_under(names: Mapping[str, Any], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _share(names: list[str], ranks: Ranks) -> list[str]:
    return names[ranks.rank :: ranks.size]


def _reason(folder: Path, files: dict[str, FileEntry]) -> str | None:
    try:
        check_contents(folder, files)
    except BrokenCheckpoint as error:
        return str(error)
    return None


def _check_shared(folder: Path, root: Path) -> None:
    if not folder.is_dir():
        raise SaveError(f"{root} is not shared between the nodes: what rank 0 makes there is not seen here")


def read_train_state(folder: Path, manifest: Manifest, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """The train state of a checkpoint without the keys in ``exclude``; empty when there is none."""
    if "train_state" not in manifest.contents or "train_state" in exclude:
        return {}
    state = json.loads((folder / TRAIN_STATE).read_bytes())
    return {key: value for key, value in state.items() if key not in exclude}
