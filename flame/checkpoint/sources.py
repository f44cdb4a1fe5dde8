"""Where weights come from: a run folder, a checkpoint folder, one step of it, or a Hugging Face folder."""

from __future__ import annotations

import logging
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from flame.checkpoint import folders
from flame.checkpoint.dcp import METADATA, read_metadata
from flame.checkpoint.hf_weights import is_hf_folder
from flame.checkpoint.manifest import CHECKSUM_LIMIT, MANIFEST, BrokenCheckpoint, Manifest, check_contents
from flame.errors import UserError

logger = logging.getLogger(__name__)

MODEL_CONFIG = "model_config.json"
TOKENIZER = "tokenizer"
JOB_CONFIG = "config.toml"


@dataclass(frozen=True)
class StepSource:
    """One checkpoint to read: its folder, what tensors it holds, its manifest (None when another program wrote it)."""

    folder: Path
    metadata: Metadata
    manifest: Manifest | None

    @property
    def run(self) -> Path:
        """The run folder that the checkpoint belongs to: above it, the nearest that keeps a config.

        ``{run}/checkpoint/step-N`` is the rule, but ``checkpoint.folder`` may have several parts.
        """
        kept = (MODEL_CONFIG, JOB_CONFIG)
        above = list(self.folder.parents)[:4]
        return next((p for p in above if any((p / name).is_file() for name in kept)), self.folder.parent.parent)


def find_source(path: str | Path) -> StepSource | Path:
    """What ``checkpoint.initial_load_path`` names: a checkpoint, or the path itself when it is a Hugging Face folder.

    A run folder stands for its newest complete checkpoint, and for the exported model only when it has none left.

    Raises:
        UserError: the path is neither, or its checkpoint is broken.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise UserError(f"{path} is no folder; give a run folder, a checkpoint (step-N) or a Hugging Face model folder")
    if _checkpoint_root(path) is None and not (path / METADATA).exists() and is_hf_folder(path):
        return path
    return find_step(path)


def find_step(path: str | Path, step: int = -1) -> StepSource:
    """Find a checkpoint by a run folder, its checkpoint folder or a step folder.

    Args:
        path: one of these folders.
        step: the step, or -1 for the newest complete one; a step folder may leave it at -1.

    Raises:
        UserError: it is not there, or broken: "N of M shard files found".
    """
    path = Path(path).expanduser()
    if (path / METADATA).exists() or (path / MANIFEST).exists() or folders.STEP.fullmatch(path.name):
        if step != -1 and path.name != f"step-{step}":
            raise UserError(f"{path} is one checkpoint and not step {step}; give its run folder or leave the step out")
        return open_step(path.absolute())
    root = _checkpoint_root(path)
    if root is None:
        raise UserError(f"{path} holds no checkpoint: it has no {_folder_name(path)}/step-N and is no step folder")
    listing = folders.list_steps(root)
    if step not in (-1, *listing.complete) and folders.step_folder(root, step).is_dir():
        return open_step(folders.step_folder(root, step).absolute())
    chosen = folders.choose_step(root, step, listing)
    for broken in sorted(listing.broken):
        if step == -1 and (chosen is None or broken > chosen):
            logger.warning("passed over %s/step-%d: %s", root, broken, listing.broken[broken])
    if chosen is None:
        raise UserError(f"{root} holds no checkpoint")
    return open_step(folders.step_folder(root, chosen).absolute())


def open_step(folder: Path) -> StepSource:
    """Open one step folder; without a manifest (another program's checkpoint) what DCP itself says is checked.

    Raises:
        UserError: the folder is not complete, or asks for what a checkpoint has no business with.
    """
    try:
        manifest = folders.read_complete(folder) if (folder / MANIFEST).exists() else None
        metadata = read_metadata(folder)
    except BrokenCheckpoint as error:
        raise UserError(f"{folder} is broken: {error}") from error
    if manifest is None:
        logger.warning("%s has no %s: sizes and checksums could not be checked", folder, MANIFEST)
    return StepSource(folder, metadata, manifest)


def check_source(source: StepSource) -> None:
    """Compare a step folder's checksums, unless it is so large that reading it twice would take minutes.

    Raises:
        UserError: a file is damaged.
    """
    if source.manifest is None or source.manifest.num_bytes >= CHECKSUM_LIMIT:
        return
    try:
        check_contents(source.folder, source.manifest.files)
    except BrokenCheckpoint as error:
        raise UserError(f"{source.folder} is broken: {error}") from error


def read_job_config(run: Path) -> dict[str, Any]:
    """The resolved job config that a run folder keeps, by section; empty when there is none."""
    path = run / JOB_CONFIG
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _checkpoint_root(path: Path) -> Path | None:
    """The folder with the ``step-N`` folders, given it or its run folder."""
    for root in (path / _folder_name(path), path):
        if root.is_dir() and any(folders.STEP.fullmatch(child.name) for child in root.iterdir()):
            return root
    return None


def _folder_name(run: Path) -> str:
    return read_job_config(run).get("checkpoint", {}).get("folder", "checkpoint")
