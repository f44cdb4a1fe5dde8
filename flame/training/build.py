"""Build a run from its config: devices, data, model, optimizer, checkpoints, metrics, in the order they depend on."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from flame.checkpoint.artifacts import plain_config, save_run_artifacts
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.sources import MODEL_CONFIG
from flame.cli.job_file import to_toml
from flame.config import JobConfig
from flame.data.loader import build_dataloader
from flame.data.loading import local_leader_first
from flame.data.prefetch import DevicePrefetcher
from flame.data.tokenize import load_tokenizer
from flame.errors import UserError
from flame.metrics.console import log_to_file, setup_logging
from flame.metrics.env import write_env
from flame.metrics.logger import MetricLogger
from flame.metrics.meter import StepMeter
from flame.models import BuiltModel, build_model, check_positions, load_model_config
from flame.models.backend import setup_backend
from flame.models.blocks import find_blocks
from flame.models.custom import load_custom_models
from flame.models.flops import FlopCounter, num_parameters
from flame.models.supported import check_supported
from flame.parallel.degrees import resolve_degrees
from flame.parallel.distributed import Distributed, init_distributed
from flame.parallel.fsdp import num_sharded
from flame.training.finish import check_finish
from flame.training.lock import RunFolderLock
from flame.training.optimizer import build_optimizer
from flame.training.placement import compute_dtype, data_config, place_model, share_rows
from flame.training.preemption import StopRequest
from flame.training.profiling import Profiler, check_profiling
from flame.training.restore import restore, tokens_per_step
from flame.training.run import Run
from flame.training.runtime import GarbageCollector, set_determinism

logger = logging.getLogger(__name__)


def build_run(config: JobConfig) -> Run:
    """Set everything up and load what the run goes on from.

    Raises:
        UserError: the job cannot run as configured; the message says what to change.
    """
    degrees = resolve_degrees(config, int(os.environ.get("WORLD_SIZE", "1")))
    dist = init_distributed(config.comm, config.job.dump_folder, degrees)
    setup_logging(dist.rank, dist.local_rank, color=not config.metrics.disable_color_printing)
    set_determinism(config.training.deterministic)
    check_profiling(config.profiling, dist.device)
    lock = dist.on_main(lambda: RunFolderLock(config.job.dump_folder))
    try:
        return _build_locked(config, dist, lock)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _build_locked(config: JobConfig, dist: Distributed, lock: RunFolderLock | None) -> Run:
    checkpoints = build_checkpoints(config, dist)
    resume_step = None if checkpoints is None else checkpoints.find_step(config.checkpoint.load_step)

    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.trust_remote_code)
    backend = setup_backend(
        config.model.backend,
        dist.device.type,
        config.model.attention_backend,
        document_len(config),
    )
    load_custom_models(config)
    model_config = load_model_config(config.model, tokenizer)
    check_supported(model_config, backend)
    if resume_step is not None:
        check_same_model(Path(config.job.dump_folder), model_config)
    context = share_rows(config, model_config, dist)
    check_finish(config, model_config, tokenizer)
    prepare = local_leader_first(dist.is_local_main, dist.long_barrier)
    loader = build_dataloader(data_config(config), tokenizer, dist.data_rank, dist.data_size, prepare, dist.gather)
    data = DevicePrefetcher(loader, dist.device)
    built = build_model(model_config, config.model.trust_remote_code)
    check_positions(built.model, document_len(config))
    flops = FlopCounter(built.model)
    model, pipeline = place_model(config, built, dist)
    optimizer = build_optimizer(model, config.optimizer, built.no_decay)
    step, state = restore(config, resume_step, model, optimizer, data, checkpoints, dist)
    if dist.is_main:  # only now: a job that does not fit the folder's checkpoints must not overwrite what explains them
        write_run_folder(config, model_config, tokenizer, dist.world_size)
        describe_job(config, built, model, backend, dist, step)

    return Run(
        config=config,
        dist=dist,
        tokenizer=tokenizer,
        model_config=model_config,
        model=model,
        pipeline=pipeline,
        context=context,
        optimizer=optimizer,
        data=data,
        flops=flops,
        checkpoints=checkpoints,
        metrics=MetricLogger(config, config.job.dump_folder, rank=dist.rank, last_step=step),
        meter=StepMeter(dist.device, dist.world_size, **state.get("meter", {})),
        profiler=Profiler(config.profiling, config.job.dump_folder, dist.device, dist.rank, last_step=step),
        gc=GarbageCollector(config.training.gc_freq),
        stop_request=StopRequest(dist.max),
        lock=lock,
        step=step,
        saved_step=step if state else -1,
    )


def document_len(config: JobConfig) -> int:
    """Tokens of the longest stretch that the model sees as one."""
    return config.training.context_len if config.training.varlen else config.training.seq_len


def write_run_folder(config: JobConfig, model_config: PretrainedConfig, tokenizer, world_size: int) -> None:
    """Write what explains a run: the resolved job, the effective model config, the tokenizer, the environment."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    if world_size == 1:  # torchrun keeps the output of several ranks
        log_to_file(folder / "logs" / "train.log")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    save_run_artifacts(folder, model_config, tokenizer)
    write_env(folder, world_size)


def build_checkpoints(config: JobConfig, dist: Distributed) -> CheckpointManager | None:
    """The run's checkpoint folder, or None with checkpoints turned off."""
    section = config.checkpoint
    if not section.enable_checkpoint:
        return None
    folder = Path(config.job.dump_folder) / section.folder
    return CheckpointManager(folder, section.keep_latest_k, verify=section.verify, group=dist.slow_group)


# Keys of a model config that change how it is computed or kept, not what it computes.
FREE_KEYS = re.compile(r"fuse_.*|transformers_version|dtype|torch_dtype|_.*|use_cache|architectures")


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
    logger.info("FSDP: %d blocks, each a unit of its own, sharded over %d", num_units, dist.degrees.fsdp)
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
