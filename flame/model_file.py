"""What a model's config file says of softmax attention, without the libraries of its class, which take seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flame.paths import find_resource

# FLA's families whose every layer is its softmax attention; of others, the layers that ``attn`` in the config lists,
# which may be of several kinds.
SOFTMAX_FAMILIES = ("transformer", "bitnet")


def find_model_file(name: str) -> Path:
    """Where ``model.config`` is, if it is a JSON file or a folder with one; nowhere if it is on the hub."""
    path = find_resource(name)
    return path / "config.json" if os.path.isdir(path) else path


def read_model_file(name: str) -> dict[str, Any] | None:
    """The values of ``model.config``, a JSON file or a folder with one.

    None where there is no such file or it is damaged: the run finds out what that means.
    """
    try:
        values = json.loads(find_model_file(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def may_attend(name: str) -> bool:
    """Whether the model that ``model.config`` names may have softmax attention; one on the hub may."""
    values = read_model_file(name)
    if values is None:
        return not (name.endswith(".json") or os.path.exists(find_resource(name)))
    text = values.get("text_config")
    heads_of = text if isinstance(text, dict) else values  # of transformers' models
    return values.get("model_type") in SOFTMAX_FAMILIES or bool(values.get("attn")) or "num_attention_heads" in heads_of


def says_heads(values: Mapping[str, Any]) -> bool:
    """Whether a file leaves no number of the attention to its class: FLA's have the same for what these lack, none."""
    needed = {"hidden_size", "num_hidden_layers", "num_heads"}
    return values.get("model_type") in SOFTMAX_FAMILIES and needed <= values.keys()
