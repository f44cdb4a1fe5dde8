"""The checkpoints of a run: save, list, choose, load."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flame.checkpoint import folders
from flame.checkpoint.background import BackgroundSaves, Save
from flame.checkpoint.dcp import read_metadata, read_tensors, tensor_metadata
from flame.checkpoint.manifest import (
    CHECKSUM_LIMIT,
    BrokenCheckpoint,
    FileEntry,
    Manifest,
    check_contents,
    reading,
)
from flame.checkpoint.matching import match_names, sizes_of
from flame.checkpoint.names import MODEL, OPTIMIZER
from flame.checkpoint.ranks import Ranks
from flame.checkpoint.writer import TRAIN_STATE, CheckpointWriter, Staged, any_under

logger = logging.getLogger(__name__)

ASYNC_MODES = ("async", "async_with_pinned_mem")
EXPORT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CheckpointManager:
    """Saves and loads the checkpoints of one run. Every method is collective: all ranks call it alike.

    Args:
        folder: where the ``step-N`` folders lie, shared by all ranks.
        keep_latest_k: complete checkpoints to keep; 0 keeps all.
        verify: "size" checks presence and sizes before loading, "full" checksums too, "auto" takes "full" below 10 GB.
            Checksums are taken at every save below 10 GB, and with "full" at every save.
        group: process group of the ranks; the default group when None. A single process needs none.
        async_mode: "async" or "async_with_pinned_mem" for ``start_save``, with a snapshot in ordinary or page-locked
            host memory.
        background_group: gloo group of the ranks for ``start_save``, which nothing else uses.
    """

    def __init__(
        self,
        folder: str | Path,
        keep_latest_k: int = 0,
        verify: str = "auto",
        group: dist.ProcessGroup | None = None,
        async_mode: str = "disabled",
        background_group: dist.ProcessGroup | None = None,
    ):
        self.folder = Path(folder)
        self.verify = verify
        self.ranks = Ranks(group)
        self.writer = CheckpointWriter(self.folder, keep_latest_k, verify == "full", self.ranks)
        self.background: BackgroundSaves | None = None
        if async_mode in ASYNC_MODES:
            writer = replace(self.writer, ranks=Ranks(background_group))
            self.background = BackgroundSaves(writer, pinned=async_mode == "async_with_pinned_mem")
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

        No save may be under way in the background: see ``finish_save``.

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
            UserError: the folder is not shared between the nodes; raised on all ranks.
            TypeError: ``train_state`` holds something that JSON would lose or change.
        """
        self._clean()
        dtype = export_dtype if weights_only else None
        chosen = {name: t for name, t in tensors.items() if name.startswith(MODEL) or not weights_only}
        if dtype is not None:
            chosen = {name: t.to(EXPORT_DTYPES[dtype]) if t.is_floating_point() else t for name, t in chosen.items()}
        staged = self.ranks.together(lambda: self._stage(step, chosen, train_state, dtype, fetch))
        folder = self.writer.write(staged)
        self._loaded_step = None
        return folder

    def start_save(self, step: int, tensors: Mapping[str, torch.Tensor], train_state: Mapping[str, Any]) -> None:
        """Begin to save in the background, as ``save`` does; no other save may be under way (``finish_save``).

        The tensors must not change before ``wait_for_snapshot`` has returned.

        Raises:
            UserError: there is no memory for the snapshot; raised on all ranks.
            TypeError: as with ``save``.
        """
        self._clean()
        staged = self.ranks.together(lambda: self._stage(step, tensors, train_state))
        self.prepare(tensors)
        self.background.start(staged)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the host memory that ``start_save`` needs, so that the first save does not have to."""
        if self.background is not None:
            self.ranks.together(lambda: self.background.prepare(tensors))

    def wait_for_snapshot(self) -> None:
        """Wait until the tensors of the save under way may change; to be called before each update."""
        if self.background is not None:
            self.background.wait_for_snapshot()

    def take_finished(self) -> Save | None:
        """The background save that ended since the last call, failed or not. Not collective: ranks may learn of it at
        different steps."""
        return self._outcome(self.background.take_finished()) if self.background is not None else None

    def finish_save(self, timeout: float | None = None) -> Save | None:
        """Wait for the background save under way, if there is one, and take it; ``timeout`` in seconds."""
        return self._outcome(self.background.wait(timeout)) if self.background is not None else None

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
            tensors: what this rank loads into, by checkpoint name.
            strict: refuse names that the checkpoint lacks, and those that no rank loads.
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
            elsewhere = self.ranks.union(tensors)
            names = match_names(sizes_of(tensors), sizes, str(folder), exclude, strict, ignore=elsewhere)
            matched = {name: tensors[name] for name in names}
            if self.ranks.is_main and any_under(tensors, OPTIMIZER) and not any_under(matched, OPTIMIZER):
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
        dtype: str | None = None,
        fetch: Callable[[str], torch.Tensor] | None = None,
    ) -> Staged:
        state = dict(train_state)
        check_plain(state, "train_state")
        return Staged(step, tensors, state, dtype, fetch, went_on_from=self._loaded_step)

    def _outcome(self, save: Save | None) -> Save | None:
        if save is not None and save.error is None:
            self._loaded_step = None  # what was left is set aside by now
        return save

    def _find_damage(self, manifest: Manifest) -> str | None:
        """Compare checksums, each rank a share of the files; the reason when a file is damaged."""
        if self.verify == "size" or (self.verify == "auto" and manifest.num_bytes >= CHECKSUM_LIMIT):
            return None
        folder = folders.step_folder(self.folder, manifest.step)
        mine = {name: manifest.files[name] for name in self.ranks.share(sorted(manifest.files))}
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


def _reason(folder: Path, files: dict[str, FileEntry]) -> str | None:
    try:
        check_contents(folder, files)
    except BrokenCheckpoint as error:
        return str(error)
    return None


def read_train_state(folder: Path, manifest: Manifest, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """The train state of a checkpoint without the keys in ``exclude``; empty when there is none."""
    if "train_state" not in manifest.contents or "train_state" in exclude:
        return {}
    state = json.loads((folder / TRAIN_STATE).read_bytes())
    return {key: value for key, value in state.items() if key not in exclude}
