"""What a run folder keeps about its model besides weights: the effective model config and the tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flame.checkpoint.manifest import sync_folder
from flame.checkpoint.sources import MODEL_CONFIG, TOKENIZER

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def save_run_artifacts(
    dump_folder: str | Path, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write ``model_config.json`` and ``tokenizer/`` into a run folder. Call it on one rank.

    The config is written whole, defaults included, so that a later release's defaults change nothing. With the two,
    conversion needs no other file.
    """
    folder = Path(dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / MODEL_CONFIG, json.dumps(plain_config(model_config), indent=2) + "\n")
    if tokenizer is not None:
        aside = folder / f".{TOKENIZER}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
        aside.rename(folder / TOKENIZER)


def plain_config(model_config: PretrainedConfig) -> dict[str, Any]:
    """A model config as JSON data with every field, defaults too."""
    return json.loads(model_config.to_json_string(use_diff=False))


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file that is either the old or the new one after a crash."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)
