"""What a run says of itself before it trains: the files that explain its folder, and the log's first lines."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from flame.checkpoint.artifacts import save_run_artifacts, write_text_atomically
from flame.checkpoint.sources import JOB_CONFIG
from flame.cli.job_file import to_toml
from flame.config import JobConfig
from flame.metrics.console import log_to_file
from flame.metrics.env import write_env
from flame.models import BuiltModel
from flame.models.blocks import find_blocks
from flame.models.flops import num_parameters
from flame.parallel.distributed import Distributed
from flame.parallel.fsdp import num_sharded
from flame.parallel.precision import compute_dtype
from flame.training.lengths import tokens_per_step

logger = logging.getLogger(__name__)


def write_run_folder(
    config: JobConfig, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, world_size: int
) -> None:
    """Write what explains a run: the resolved job, the effective model config, the tokenizer, the environment."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    if world_size == 1:  # torchrun keeps the output of several ranks
        log_to_file(folder / "logs" / "train.log")
    write_text_atomically(folder / JOB_CONFIG, to_toml(config))
    save_run_artifacts(folder, model_config, tokenizer)
    write_env(folder, world_size)


def describe_job(
    config: JobConfig, built: BuiltModel, model: nn.Module, backend: str, dist: Distributed, step: int
) -> None:
    """Log what is about to be trained, so that a wrong job is seen before it costs anything."""
    training = config.training
    if config.job.description:
        logger.info("%s", config.job.description)
    if config.job.print_args:
        logger.info("options:\n%s", to_toml(config))
    logger.info(
        "%s: %.1fM parameters, %s operators, %s compute on %d x %s",
        built.model.config.model_type,
        num_parameters(built.model) / 1e6,
        backend,
        compute_dtype(training.mixed_precision_param, dist.device),
        dist.world_size,
        dist.device.type,
    )
    blocks = [block for _, block in find_blocks(model)]
    num_blocks, num_units = len(blocks), num_sharded(blocks)
    if dist.world_size > 1:
        logger.info("%d processes: %s", dist.world_size, dist.degrees.describe())
    logger.info("FSDP: %d blocks, sharded over %d", num_units, dist.degrees.fsdp)
    if num_units < num_blocks:
        logger.info("FSDP: %d more blocks share weights and stay gathered with the rest", num_blocks - num_units)
    tokens = tokens_per_step(config, dist.data_size)
    num_left = max(training.steps - step, 0)
    logger.info("%d steps to go, of %s tokens each: %s tokens", num_left, f"{tokens:,}", f"{num_left * tokens:,}")
    if config.lr_scheduler.warmup_steps > training.steps:
        logger.warning(
            "lr_scheduler.warmup_steps = %d is longer than the run: the learning rate rises over all %d steps",
            config.lr_scheduler.warmup_steps,
            training.steps,
        )
    logger.info("no weight decay on %d parameters: %s", len(built.no_decay), summarise(built.no_decay))


def summarise(names: frozenset[str]) -> str:
    """Parameter names with their block numbers folded: ``model.layers.*.attn_norm.weight``."""
    folded = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}
    return ", ".join(sorted(folded))
