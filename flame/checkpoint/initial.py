"""Starting a run from other weights: a Hugging Face folder, or another run with or without its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flame.checkpoint.dcp import read_tensors, tensor_metadata
from flame.checkpoint.hf_weights import HFWeights, load_hf_tensors, read_vocab_size
from flame.checkpoint.manager import read_train_state
from flame.checkpoint.manifest import reading
from flame.checkpoint.matching import match_names, sizes_of
from flame.checkpoint.names import MODEL, OPTIMIZER
from flame.checkpoint.ranks import Ranks
from flame.checkpoint.sources import MODEL_CONFIG, StepSource, check_source, find_source

logger = logging.getLogger(__name__)


def load_initial(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    weights_only: bool = True,
    exclude: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load ``checkpoint.initial_load_path`` into a run's tensors, in place. Collective.

    Rows that the run's vocabulary has beyond the source's keep their initial values. A source without optimizer state
    leaves the optimizer as it is.

    Args:
        path: a Hugging Face folder (safetensors, or torch files), a run folder, a checkpoint folder or a step folder.
        tensors: the run's, by checkpoint name, plain or DTensor.
        weights_only: leave the optimizer's tensors alone.
        exclude: ``checkpoint.exclude_from_loading``.
        tied: names that the run's model leaves out because they are tied (``tied_names(model)``); a source may have
            them all the same.
        group: process group of the ranks.

    Returns:
        The train state of the source; empty when ``weights_only``, excluded or not there.

    Raises:
        UserError: nothing to load there, a broken checkpoint, names or shapes that do not fit.
    """
    ranks = Ranks(group)
    wanted = {name: t for name, t in tensors.items() if name.startswith(MODEL) or not weights_only}
    elsewhere = ranks.union([*wanted, *(tied or {})])
    source = ranks.together(lambda: find_source(path))
    if isinstance(source, StepSource):
        ranks.on_main(lambda: check_source(source))
        return _load_step(source, wanted, weights_only, exclude, elsewhere, ranks)
    _load_hf_folder(source, wanted, exclude, elsewhere, ranks)
    return {}


def _load_step(
    source: StepSource,
    wanted: dict[str, torch.Tensor],
    weights_only: bool,
    exclude: Sequence[str],
    elsewhere: Collection[str],
    ranks: Ranks,
) -> dict[str, Any]:
    sizes = {name: entry.size for name, entry in tensor_metadata(source.metadata).items()}
    vocab = read_vocab_size(source.run / MODEL_CONFIG)
    names = match_names(sizes_of(wanted), sizes, str(source.folder), exclude, stored_vocab=vocab, ignore=elsewhere)
    filled = {name: wanted[name] for name in names}
    _report(wanted, filled, sizes, ranks)
    if source.manifest is None:
        read_tensors(source.folder, filled, source.metadata, ranks.group)
        return {}
    with reading(source.folder):
        read_tensors(source.folder, filled, source.metadata, ranks.group)
        if weights_only:
            return {}
        return ranks.on_main(lambda: read_train_state(source.folder, source.manifest, exclude))


def _load_hf_folder(
    folder: Path,
    wanted: dict[str, torch.Tensor],
    exclude: Sequence[str],
    elsewhere: Collection[str],
    ranks: Ranks,
) -> None:
    weights = ranks.together(lambda: HFWeights(folder))
    sizes = {MODEL + name: size for name, size in weights.sizes.items()}
    vocab = weights.vocab_size()
    names = match_names(sizes_of(wanted), sizes, str(folder), exclude, stored_vocab=vocab, ignore=elsewhere)
    filled = {name: wanted[name] for name in names}
    _report(wanted, filled, sizes, ranks)
    ranks.together(lambda: load_hf_tensors(weights, filled, MODEL))


def _report(
    wanted: dict[str, torch.Tensor], filled: dict[str, torch.Tensor], sizes: dict[str, torch.Size], ranks: Ranks
) -> None:
    """Say what keeps its initial values."""
    if not ranks.is_main:
        return
    for name in (name for name, tensor in filled.items() if tensor.size() != sizes[name]):
        logger.info(
            "%s has %d rows, %d of them from the source; the others keep their initial values",
            name,
            filled[name].size(0),
            sizes[name][0],
        )
    if any(name.startswith(OPTIMIZER) for name in wanted) and not any(name.startswith(OPTIMIZER) for name in filled):
        logger.info("no optimizer state is taken: the optimizer starts fresh")
    left = [name for name in wanted if name.startswith(MODEL) and name not in filled]
    if left:
        logger.info("%d tensors are excluded and keep their initial values: %s", len(left), ", ".join(left[:8]))
