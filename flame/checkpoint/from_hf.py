"""From a Hugging Face model folder to a checkpoint that training starts from, tensor by tensor."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import torch

from flame.checkpoint import folders
from flame.checkpoint.artifacts import save_run_artifacts
from flame.checkpoint.hf_model import ModelOutline, load_config, outline
from flame.checkpoint.hf_weights import HFWeights
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.matching import match_names
from flame.checkpoint.names import MODEL
from flame.checkpoint.sources import MODEL_CONFIG, read_job_config
from flame.errors import UserError
from flame.models.custom import load_recorded

logger = logging.getLogger(__name__)


def convert_hf_to_dcp(
    model: str | Path,
    checkpoint: str | Path,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a Hugging Face model's weights as a checkpoint without optimizer, in the dtypes that they have.

    Training of the run folder then begins from it, with a fresh optimizer. The model's config and tokenizer go into the
    run folder (two levels up) when it has none. Runs on one process; the backend must be set up
    (``flame.models.backend.setup_backend``).

    Args:
        model: folder with config.json and safetensors or torch files, sharded or not. If it is a run's, the custom
            models that its config.toml names are imported.
        checkpoint: the checkpoint to make, ``{run}/checkpoint/step-N``; one that is there is replaced.
        on_bytes: called with (bytes written, bytes in all) as the conversion goes on.

    Raises:
        UserError: no model there, a shard file missing, weights that do not fit their config, or a name that is no
            step folder's.
    """
    target = Path(checkpoint).expanduser().absolute()
    step = folders.STEP.fullmatch(target.name)
    if step is None:
        raise UserError(f"{checkpoint} must end in step-N, such as exp/run/checkpoint/step-0")
    if not Path(model).is_dir():
        raise UserError(f"{model} is no folder; give a Hugging Face model folder")
    load_recorded(read_job_config(Path(model)), Path(model))
    weights = HFWeights(model)
    stored = {MODEL + name: size for name, size in weights.sizes.items()}
    described = outline(load_config(model), stored)
    ignored = {*described.tied, *_passed_over(described, stored)}
    names = match_names(described.sizes, stored, str(model), ignore=ignored)

    tensors = {name: _placeholder(weights, name) for name in names}
    fetch = _Fetch(weights, sum(t.numel() * t.itemsize for t in tensors.values()), on_bytes)
    CheckpointManager(target.parent).save(int(step[1]), tensors, {}, weights_only=True, fetch=fetch)
    _keep_artifacts(Path(model), described, target.parent.parent)
    logger.info("%s written from %s", target, model)
    return target


class _Fetch:
    """Reads a tensor when it is written, and tells how far the conversion is."""

    def __init__(self, weights: HFWeights, total: int, on_bytes: Callable[[int, int], None] | None):
        self.weights = weights
        self.total = total
        self.on_bytes = on_bytes
        self.done = 0

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self.weights.read(name.removeprefix(MODEL))
        self.done += tensor.numel() * tensor.itemsize
        if self.on_bytes:
            self.on_bytes(self.done, self.total)
        return tensor


def _placeholder(weights: HFWeights, name: str) -> torch.Tensor:
    name = name.removeprefix(MODEL)
    return torch.empty(weights.sizes[name], dtype=weights.dtypes[name], device="meta")


def _passed_over(described: ModelOutline, stored: dict[str, torch.Size]) -> list[str]:
    patterns = [re.compile(pattern) for pattern in described.ignored]
    return [name for name in stored if any(pattern.search(name.removeprefix(MODEL)) for pattern in patterns)]


def _keep_artifacts(model: Path, described: ModelOutline, run: Path) -> None:
    """Give the run folder what conversion back and training need, unless it has its own."""
    from flame.data.tokenize import load_tokenizer

    if (run / MODEL_CONFIG).exists():
        return
    has_tokenizer = any((model / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    save_run_artifacts(run, described.config, load_tokenizer(str(model)) if has_tokenizer else None)
    logger.info("%s%s written to %s", MODEL_CONFIG, " and the tokenizer" if has_tokenizer else "", run)
