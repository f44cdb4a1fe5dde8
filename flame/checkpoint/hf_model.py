"""What a model class says about its weights (names, shapes, ties), learnt on the meta device, without memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import nn

from flame.checkpoint.matching import sizes_of
from flame.checkpoint.names import MODEL, model_tensors, tied_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelOutline:
    """A causal LM's config and weights, by checkpoint name.

    Attributes:
        config: its config.
        architecture: name of its class, as ``architectures`` in config.json states it.
        sizes: shape of each weight, tied ones once.
        tied: names left out because they are tied, each with the name that has the weight.
        ignored: patterns of names that its class passes over in a file.
    """

    config: PretrainedConfig
    architecture: str
    sizes: dict[str, torch.Size]
    tied: dict[str, str]
    ignored: tuple[str, ...] = ()


def load_config(path: str | Path) -> PretrainedConfig:
    """Read a model config from a JSON file or a folder with ``config.json``.

    Raises:
        UserError: it is not there, or no model config.
    """
    from flame.models.model_config import load_model_config

    return load_model_config(SimpleNamespace(config=str(path), norm_type="", trust_remote_code=False))


def outline(config: PretrainedConfig, stored: Mapping[str, torch.Size]) -> ModelOutline:
    """Build a config's model on the meta device, with as many embedding rows as the stored weights have.

    A run whose tokenizer has more ids than its model config trains with more rows; when conversion is given the
    original config, ``vocab_size`` follows the weights, with a line in the log.
    """
    from flame.models.build import build_model

    model = build_model(config).model
    rows = _embedding_rows(model, stored)
    text = config.get_text_config()
    if rows is not None and rows != text.vocab_size:
        logger.warning("vocab_size set to %d, as the stored embedding has; the config says %d", rows, text.vocab_size)
        text.vocab_size = rows
        model = build_model(config).model
    return ModelOutline(
        config=config,
        architecture=type(model).__name__,
        sizes=sizes_of(model_tensors(model)),
        tied=tied_names(model),
        ignored=tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )


def _embedding_rows(model: nn.Module, stored: Mapping[str, torch.Size]) -> int | None:
    weight = model.get_input_embeddings().weight
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    return stored[MODEL + name][0] if MODEL + name in stored else None
