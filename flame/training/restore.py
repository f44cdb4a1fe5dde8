"""Where a run begins: at a checkpoint of its own, at other weights, or at the start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flame.checkpoint.folders import Listing, choose_step, list_steps, step_folder
from flame.checkpoint.initial import load_initial
from flame.checkpoint.manager import CheckpointManager, read_train_state
from flame.checkpoint.names import create_optimizer_state, model_tensors, optimizer_tensors, tied_names
from flame.config import Checkpoint, JobConfig
from flame.data.prefetch import DevicePrefetcher
from flame.errors import UserError
from flame.parallel.distributed import Distributed
from flame.training.lengths import tokens_per_step

logger = logging.getLogger(__name__)

TOKENS_PER_STEP = "tokens per step"
_KEEPS_TOKENS = "; training.batch_size and gradient_accumulation_steps, which count for each rank, can keep it"


def restore(
    config: JobConfig,
    step: int | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: DevicePrefetcher,
    checkpoints: CheckpointManager | None,
    dist: Distributed,
) -> tuple[int, dict[str, Any]]:
    """Load what the run goes on from, in place; the weights must be initialised or about to be overwritten.

    A checkpoint of the run itself goes before ``checkpoint.initial_load_path``, so that a restarted job resumes.

    Args:
        step: the step to resume from, None where the run has no checkpoint.

    Returns:
        The steps done, and the checkpoint's train state (empty for a new run).
    """
    section = config.checkpoint
    if step is not None:
        state = _resume(section, step, model, optimizer, checkpoints)
    elif section.initial_load_path:
        step, state = _start_from(section, model, optimizer, dist)
    else:
        return 0, {}
    if "dataloader" in state:
        data.load_state_dict(state["dataloader"])
    log_changes(state.get("hyperparameters", {}), hyperparameters(config, dist.data_size))
    return step, state


def _resume(
    section: Checkpoint,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoints: CheckpointManager,
) -> dict[str, Any]:
    create_optimizer_state(optimizer)  # what is not loaded stays zero, as in a fresh optimizer
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    state = checkpoints.load(step, tensors, exclude=section.exclude_from_loading)
    logger.info("resumed from step %d", step)
    return state


def _start_from(
    section: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Distributed
) -> tuple[int, dict[str, Any]]:
    """Begin at step 0 with other weights, and with the optimizer's state too when asked for.

    The data starts anew: this is how a run is annealed on new data.
    """
    weights_only = section.initial_load_model_weights_only
    tensors = model_tensors(model)
    if not weights_only:
        create_optimizer_state(optimizer)
        tensors |= optimizer_tensors(model, optimizer)
    exclude, tied = section.exclude_from_loading, tied_names(model)
    load_initial(section.initial_load_path, tensors, weights_only, exclude, tied, dist.slow_group)
    logger.info("starting from %s (%s)", section.initial_load_path, "weights" if weights_only else "weights, optimizer")
    return 0, {}


def recorded_batch_size(config: JobConfig, data_size: int) -> int | None:
    """The batch size with which a step has as many tokens as in the checkpoint that the run will go on from.

    Reads the checkpoint's state alone, without a process group and before the checkpoint is verified.

    Returns:
        Sequences of a micro-batch; None when no step has been trained.

    Raises:
        UserError: there is no such checkpoint, or ranks and micro-batches do not divide its tokens.
    """
    section, training = config.checkpoint, config.training
    root = Path(config.job.dump_folder) / section.folder
    listing = list_steps(root) if section.enable_checkpoint else Listing()
    step = choose_step(root, section.load_step, listing)
    if not step:  # step 0 is a seed, whose weights any number of ranks may begin with
        return None
    state = read_train_state(step_folder(root, step), listing.complete[step])
    tokens = state.get("hyperparameters", {}).get(TOKENS_PER_STEP)
    if tokens is None:
        return None
    batch_size, rest = divmod(tokens, tokens_per_step(config, data_size, batch_size=1))
    if rest:
        raise UserError(
            f"training.batch_size = auto keeps the {tokens:,} tokens a step of the checkpoint of step {step}, which do "
            f"not divide by {data_size} data-parallel ranks x gradient_accumulation_steps = "
            f"{training.gradient_accumulation_steps} x seq_len = {training.seq_len}; give training.batch_size a number"
        )
    return batch_size


def hyperparameters(config: JobConfig, data_size: int) -> dict[str, Any]:
    """The settings whose change between a checkpoint and its resume is worth a line in the log.

    batch_size and gradient_accumulation_steps are per rank, so that it is their product over all ranks that counts.
    """
    optimizer, schedule, training = config.optimizer, config.lr_scheduler, config.training
    return {
        "optimizer.name": optimizer.name,
        "optimizer.lr": optimizer.lr,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.beta1": optimizer.beta1,
        "optimizer.beta2": optimizer.beta2,
        "optimizer.eps": optimizer.eps,
        "lr_scheduler.warmup_steps": schedule.warmup_steps,
        "lr_scheduler.decay_ratio": schedule.decay_ratio,
        "lr_scheduler.decay_type": schedule.decay_type,
        "lr_scheduler.lr_min": schedule.lr_min,
        "training.steps": training.steps,
        TOKENS_PER_STEP: tokens_per_step(config, data_size),
        "training.max_norm": training.max_norm,
    }


def log_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Log each setting that differs from the checkpoint's; the new value is the one that counts."""
    for name, value in now.items():
        if name in before and before[name] != value:
            hint = _KEEPS_TOKENS if name == TOKENS_PER_STEP else ""
            logger.warning("%s changed since the checkpoint: %s, was %s%s", name, value, before[name], hint)
