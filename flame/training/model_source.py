"""What a job's model is, read before anything of it is built: tokenizer, operators, config, and that they fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from flame.checkpoint.artifacts import plain_config
from flame.checkpoint.sources import MODEL_CONFIG
from flame.config import JobConfig
from flame.data.tokenize import load_tokenizer
from flame.errors import UserError
from flame.models import load_model_config
from flame.models.attention import PLANNED_BACKEND
from flame.models.backend import setup_backend
from flame.models.custom import load_custom_models
from flame.models.supported import check_supported
from flame.parallel.context import ContextParallel
from flame.parallel.context_setup import share_rows
from flame.parallel.distributed import Distributed
from flame.training.attention_backend import check_attention
from flame.training.finish import check_finish
from flame.training.lengths import document_len

# Keys of a model config that change how it is computed or kept, not what it computes.
FREE_KEYS = re.compile(r"fuse_.*|transformers_version|dtype|torch_dtype|_.*|use_cache|architectures")


def read_model(
    config: JobConfig, dist: Distributed, device_type: str, resume_step: int | None = None
) -> tuple[PreTrainedTokenizerBase, str, PretrainedConfig, ContextParallel | None]:
    """The tokenizer, the kind of operators, the model's config and the ranks that share its rows.

    Args:
        device_type: that the operators are for.
        resume_step: of the checkpoint that the run goes on from, whose model must be the same.

    Raises:
        UserError: what the job names cannot be read, or does not go together.
    """
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.trust_remote_code)
    backend = setup_backend(
        config.model.backend,
        device_type,
        attention_for(config, dist, device_type),
        document_len(config),
        config.job.shipped_tuning,
    )
    load_custom_models(config)
    model_config = load_model_config(config.model, tokenizer)
    check_supported(model_config, backend)
    if resume_step is not None:
        check_same_model(Path(config.job.dump_folder), model_config)
    context = share_rows(config, model_config, dist)
    check_attention(config, dist)
    check_finish(config, model_config, tokenizer)
    return tokenizer, backend, model_config, context


def attention_for(config: JobConfig, dist: Distributed, device_type: str) -> str:
    """The attention backend to set up: a plan for GPUs takes one that needs none."""
    is_planned = dist.device.type == "meta" and device_type != "cpu"
    return PLANNED_BACKEND if is_planned else config.model.attention_backend


def check_same_model(dump_folder: Path, model_config: PretrainedConfig) -> None:
    """Refuse a model other than that of the run folder's checkpoints: equal shapes would load without a word.

    Raises:
        UserError: names each key of the config that differs.
    """
    path = dump_folder / MODEL_CONFIG
    if not path.is_file():
        return
    saved, now = json.loads(path.read_text()), plain_config(model_config)
    # Keys that only one side has come and go with releases of the libraries.
    changed = [key for key in sorted(saved.keys() & now.keys()) if saved[key] != now[key]]
    if "model_type" in changed:
        changed = ["model_type"]
    changes = [f"{key} = {now[key]!r}, was {saved[key]!r}" for key in changed if not FREE_KEYS.fullmatch(key)]
    if changes:
        raise UserError(
            f"model.config differs from that of the checkpoints in {dump_folder}: {'; '.join(changes)}. Give another "
            "job.dump_folder (checkpoint.initial_load_path starts it from these weights), or the config it began with"
        )
