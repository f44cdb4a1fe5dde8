"""Build a run from its config: devices, data, model, optimizer, checkpoints, metrics, in the order they depend on."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from flame.checkpoint.manager import CheckpointManager
from flame.config import JobConfig
from flame.data.batch import Batch
from flame.data.held_out import build_held_out
from flame.data.loader import build_dataloader
from flame.data.loading import local_leader_first
from flame.data.prefetch import DevicePrefetcher
from flame.errors import UserError
from flame.metrics.console import setup_logging
from flame.metrics.jsonl import FILE_NAME, last_validation
from flame.metrics.logger import MetricLogger
from flame.metrics.meter import StepMeter
from flame.models import build_model, check_positions
from flame.models.flops import FlopCounter
from flame.parallel.degrees import resolve_degrees
from flame.parallel.distributed import Distributed, init_distributed, new_slow_group
from flame.parallel.float8 import keep_scales
from flame.parallel.pipeline_cut import data_config
from flame.training.announce import describe_job, write_run_folder
from flame.training.attention_backend import settle_attention
from flame.training.auto import agree, propose
from flame.training.bad_steps import BadSteps
from flame.training.hang import StackDump
from flame.training.lengths import document_len, document_option
from flame.training.lock import RunFolderLock
from flame.training.model_source import read_model
from flame.training.optimizer import build_optimizer
from flame.training.placement import place_model
from flame.training.preemption import StopRequest
from flame.training.profiling import Profiler, check_profiling
from flame.training.restore import restore
from flame.training.run import Run
from flame.training.runtime import GarbageCollector, set_determinism
from flame.training.saving import Saves


def build_run(config: JobConfig, stop_request: StopRequest) -> Run:
    """Start the process, read what the job names, build it on the devices, and load what it goes on from.

    Args:
        stop_request: what the run is to ask whether it should stop.

    Raises:
        UserError: the job cannot run as configured; the message says what to change.
    """
    dist = start_process(config)
    with ExitStack() as on_failure:
        lock = dist.on_main(lambda: RunFolderLock(config.job.dump_folder))
        if lock is not None:
            on_failure.callback(lock.release)

        # Read: what cannot be is refused before anything large is made.
        checkpoints = build_checkpoints(config, dist)
        resume_step = None if checkpoints is None else checkpoints.find_step(config.checkpoint.load_step)
        check_seed(config, resume_step)
        tokenizer, backend, model_config, context = dist.together(
            lambda: read_model(config, dist, dist.device.type, resume_step)
        )

        # Build.
        settle_attention(config, model_config, dist)
        data = build_data(config, tokenizer, dist)
        held_out = read_held_out(config, tokenizer, dist)
        built = build_model(model_config, config.model.trust_remote_code)
        check_positions(built.model, document_len(config), document_option(config))
        flops = FlopCounter(built.model)  # of the whole model, before it is cut and shared
        model, pipeline = place_model(config, built, dist, context)
        optimizer = build_optimizer(model, config.optimizer, built.no_decay)
        if config.float8.precompute_float8_dynamic_scale_for_fsdp:
            keep_scales(model, optimizer)

        # Load, and only then write: a job that does not fit the folder's checkpoints must not overwrite what explains
        # them.
        step, state = restore(config, resume_step, model, optimizer, data, checkpoints, dist)
        if dist.is_main:
            write_run_folder(config, model_config, tokenizer, dist.world_size)
            describe_job(config, built, model, backend, dist, step)
        metrics = MetricLogger(config, config.job.dump_folder, rank=dist.rank, last_step=step)
        saves = None
        if checkpoints is not None:
            saves = Saves(checkpoints, config.checkpoint, dist, metrics.sync, saved_step=step if state else -1)
            stop_request.last_checkpoint = saves.describe_last
        run = Run(
            config=config,
            dist=dist,
            tokenizer=tokenizer,
            model_config=model_config,
            model=model,
            pipeline=pipeline,
            context=context,
            optimizer=optimizer,
            data=data,
            held_out=held_out,
            flops=flops,
            saves=saves,
            metrics=metrics,
            meter=StepMeter(dist.device, dist.world_size, **state.get("meter", {})),
            bad_steps=BadSteps(config.training, dist.device, **state.get("bad_steps", {})),
            profiler=Profiler(config.profiling, config.job.dump_folder, dist.device, dist.rank, last_step=step),
            gc=GarbageCollector(config.training.gc_freq),
            stacks=StackDump(Path(config.job.dump_folder) / "logs", dist.rank),
            stop_request=stop_request,
            lock=lock,
            step=step,
            validated_step=find_validation(config, dist) if held_out else -1,
        )
        on_failure.pop_all()  # the run gives the folder free when it closes
    return run


def start_process(config: JobConfig) -> Distributed:
    """Join the other ranks, and set what holds for the whole process: logging, determinism.

    Raises:
        UserError: degrees that do not fit the ranks, or a profile that the device cannot make.
    """
    degrees = resolve_degrees(config, int(os.environ.get("WORLD_SIZE", "1")))
    proposal = propose(config, degrees)
    dist = init_distributed(config.comm, config.job.dump_folder, degrees)
    setup_logging(dist.rank, dist.local_rank, color=not config.metrics.disable_color_printing)
    if proposal is not None:
        agree(config, proposal, dist)
    set_determinism(config.training.deterministic)
    check_profiling(config.profiling, dist.device)
    return dist


def check_seed(config: JobConfig, resume_step: int | None) -> None:
    """Refuse a seed checkpoint in the folder of a run that has trained: its weights are no initial ones.

    Raises:
        UserError: names the folder and its newest step.
    """
    if config.checkpoint.create_seed_checkpoint and resume_step:
        raise UserError(
            f"checkpoint.create_seed_checkpoint: {config.job.dump_folder} holds a run at step {resume_step}, and a "
            "seed is the step 0 of a new one; give another job.dump_folder"
        )


def build_data(config: JobConfig, tokenizer: PreTrainedTokenizerBase, dist: Distributed) -> DevicePrefetcher:
    """This rank's batches; the first rank of each node prepares what is downloaded or converted.

    Raises:
        UserError: data that cannot be read, or does not divide among the ranks.
    """
    prepare = local_leader_first(dist.is_local_main, dist.long_barrier)  # which every rank passes, whatever it finds
    loader = dist.together(
        lambda: build_dataloader(data_config(config), tokenizer, dist.data_rank, dist.data_size, prepare, dist.gather)
    )
    return DevicePrefetcher(loader, dist.device)


def read_held_out(config: JobConfig, tokenizer: PreTrainedTokenizerBase, dist: Distributed) -> list[list[Batch]]:
    """This rank's batches of a validation, prepared as ``build_data`` does.

    Raises:
        UserError: data that cannot be read, or more of it on some ranks than on others, which would wait for them.
    """
    if not any(config.validation.dataset):
        return []
    prepare = local_leader_first(dist.is_local_main, dist.long_barrier)
    held_out = dist.together(
        lambda: build_held_out(data_config(config), tokenizer, dist.data_rank, dist.data_size, prepare)
    )
    num_steps = dist.gather(len(held_out))
    if len(set(num_steps)) > 1:
        raise UserError(
            f"--validation.dataset {', '.join(config.validation.dataset)}: the ranks read different data, "
            f"{min(num_steps)} to {max(num_steps)} steps of a validation; give every node the same files"
        )
    return held_out


def find_validation(config: JobConfig, dist: Distributed) -> int:
    """The step of the last validation that the run's metrics hold, -1 when there is none; the same on every rank."""
    return dist.broadcast(last_validation(Path(config.job.dump_folder) / FILE_NAME) if dist.is_main else None)


def build_checkpoints(config: JobConfig, dist: Distributed) -> CheckpointManager | None:
    """The run's checkpoint folder, or None with checkpoints turned off."""
    section = config.checkpoint
    if not section.enable_checkpoint:
        return None
    folder = Path(config.job.dump_folder) / section.folder
    return CheckpointManager(
        folder,
        section.keep_latest_k,
        verify=section.verify,
        group=dist.slow_group,
        async_mode=section.async_mode,
        background_group=new_slow_group() if section.async_mode != "disabled" else None,
    )
