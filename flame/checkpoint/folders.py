"""The steps of a checkpoint folder: listing, publication by one rename, retention, clean-up. Runs on one process.

A checkpoint is written in ``.step-N.tmp`` and renamed to ``step-N`` when complete. One that goes is renamed to
``.step-N.del`` first, and one that is written anew to ``.step-N.old``, so a name ``step-N`` never stands for a half.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flame.checkpoint.manifest import (
    BrokenCheckpoint,
    Manifest,
    check_complete,
    is_being_read,
    read_manifest,
    sync_folder,
)
from flame.errors import UserError

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(0|[1-9]\d*)")
LEFTOVER = re.compile(r"\.step-(\d+)\.(tmp|old|del)")


@dataclass
class Listing:
    """What a checkpoint folder holds: complete checkpoints by step, and the broken ones with the reason."""

    complete: dict[int, Manifest] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)

    def describe(self) -> str:
        """One line for messages: the steps there are, then the broken ones."""
        steps = ", ".join(map(str, sorted(self.complete))) or "none"
        broken = "; ".join(f"step-{step}: {reason}" for step, reason in sorted(self.broken.items()))
        return f"steps there are: {steps}" + (f" (broken: {broken})" if broken else "")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def list_steps(root: Path) -> Listing:
    """Look through a checkpoint folder; one that does not exist holds nothing."""
    listing = Listing()
    for path in root.iterdir() if root.is_dir() else ():
        match = STEP.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        step = int(match[1])
        try:
            listing.complete[step] = read_complete(path)
        except BrokenCheckpoint as error:
            listing.broken[step] = str(error)
    return listing


def read_complete(folder: Path) -> Manifest:
    """Read a step folder's manifest and check that all its files are there.

    Raises:
        BrokenCheckpoint: the folder is not complete.
    """
    manifest = read_manifest(folder)
    check_complete(folder, manifest)
    if (match := STEP.fullmatch(folder.name)) and int(match[1]) != manifest.step:
        raise BrokenCheckpoint(f"the folder is called {folder.name}, its manifest says step {manifest.step}")
    return manifest


def choose_step(root: Path, load_step: int, listing: Listing) -> int | None:
    """The step that ``checkpoint.load_step`` asks for: the newest complete one for -1, None when there is none.

    Raises:
        UserError: that step is not there or broken, or all there are are broken.
    """
    if load_step != -1:
        if load_step in listing.complete:
            return load_step
        if load_step in listing.broken:
            raise UserError(f"{step_folder(root, load_step)} is broken: {listing.broken[load_step]}")
        raise UserError(f"--checkpoint.load_step = {load_step}: no such step in {root}; {listing.describe()}")
    if listing.complete:
        return max(listing.complete)
    if listing.broken:
        raise UserError(
            f"no checkpoint in {root} is complete; {listing.describe()}; "
            "to start from the beginning, move these folders away"
        )
    return None


def start_writing(root: Path, step: int) -> Path:
    """Make the empty folder in which a checkpoint is written."""
    folder = root / f".step-{step}.tmp"
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def publish(root: Path, step: int) -> None:
    """Make a checkpoint that is complete and on the disk visible under its name, in place of an older one."""
    target = step_folder(root, step)
    old = root / f".step-{step}.old"
    if target.exists():
        target.rename(old)
    (root / f".step-{step}.tmp").rename(target)
    sync_folder(root)
    shutil.rmtree(old, ignore_errors=True)


def discard(root: Path, step: int) -> None:
    """Remove a checkpoint that could not be written to its end."""
    shutil.rmtree(root / f".step-{step}.tmp", ignore_errors=True)


def set_aside(root: Path, after: int) -> list[int]:
    """Take the checkpoints of steps later than ``after`` out of the list, as ``step-N.replaced``; the steps that went.

    They belong to a course of training that was left for another one from step ``after``. Nothing is removed.
    """
    steps = [step for step in sorted(list_steps(root).complete) if step > after]
    for step in steps:
        aside = root / f"step-{step}.replaced"
        shutil.rmtree(aside, ignore_errors=True)
        step_folder(root, step).rename(aside)
    if steps:
        sync_folder(root)
    return steps


def purge(root: Path, keep: int, protect: Iterable[int] = ()) -> list[int]:
    """Remove all complete checkpoints but the newest ``keep`` (0: all stay); the steps that went.

    Steps in ``protect`` and those that some process reads stay. Broken and unknown folders are left alone.
    """
    if keep <= 0:
        return []
    complete = sorted(list_steps(root).complete)
    removed = []
    for step in complete[:-keep]:
        if step in set(protect) or is_being_read(step_folder(root, step)):
            continue
        doomed = root / f".step-{step}.del"
        step_folder(root, step).rename(doomed)
        sync_folder(root)
        shutil.rmtree(doomed)
        removed.append(step)
    return removed


def clean(root: Path) -> list[str]:
    """Remove what a killed run left half written or half removed; the names that went.

    A checkpoint that was being replaced when the run died is put back if its successor was not published.
    """
    leftovers = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        target = step_folder(root, int(match[1]))
        if match[2] == "old" and not target.exists():
            path.rename(target)
            continue
        shutil.rmtree(path)
        leftovers.append(path.name)
    if leftovers:
        logger.info("removed what an interrupted run left in %s: %s", root, ", ".join(leftovers))
    return leftovers
