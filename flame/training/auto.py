"""Options that a job leaves to auto: each rank decides by its own memory, then all take what the smallest allows."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from flame.config import AUTO, JobConfig, auto_options
from flame.dry_run.capacity import Capacity, run_capacity
from flame.errors import UserError
from flame.parallel.degrees import Degrees
from flame.parallel.distributed import Distributed, describe_faults, pick_device, shutdown
from flame.training.restore import recorded_batch_size

if TYPE_CHECKING:
    from flame.dry_run.fit import Fit
    from flame.dry_run.plan import JobPlan

logger = logging.getLogger(__name__)

META = torch.device("meta")  # stands for a GPU
TIGHT = "that is more than auto takes where there is a choice: the run may end for want of memory"


@dataclass(frozen=True)
class Proposal:
    """What one rank would choose.

    Attributes:
        fit: its choice; None with a fault.
        fault: why there is none.
        seconds: that it took.
    """

    fit: Fit | None
    fault: str | None
    seconds: float


def propose(config: JobConfig, degrees: Degrees) -> Proposal | None:
    """This rank's choice; None for a job that leaves nothing to auto.

    To be called before the process joins its group: plans are made in a world of their own, which takes its place.

    Raises:
        UserError: this process has no device.
    """
    if not auto_options(config):
        return None
    begin, fit, fault = time.monotonic(), None, None
    device = pick_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        capacity = run_capacity(config.job.device_memory_gib, device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        fit = decide(config, degrees, capacity, device)
    except UserError as error:
        fault = str(error)
    return Proposal(fit, fault, time.monotonic() - begin)


def decide(config: JobConfig, degrees: Degrees, capacity: Capacity | None, device: torch.device) -> Fit:
    """What auto comes to on devices with that memory; no process group may exist, and none does afterwards.

    Args:
        device: what the job runs on; ``META`` is a GPU that need not be there.

    Raises:
        UserError: the job cannot be planned, or fits in no way.
    """
    # Plans are made by the code that builds runs, which imports this.
    from flame.dry_run.fit import fit_job
    from flame.dry_run.plan import GPU, plan_job
    from flame.parallel.precision import compute_dtype

    kept = recorded_batch_size(config, degrees.data) if config.training.batch_size == AUTO else None
    is_cpu = device.type == "cpu"
    if is_cpu and config.training.batch_size == AUTO and kept is None and not config.job.device_memory_gib:
        raise UserError(
            "training.batch_size = auto: on a CPU larger batches are no faster, and would take the memory from all "
            "else; give a number, or job.device_memory_gib"
        )

    hook = sys.excepthook  # which torch lets name the rank, once more with each process group

    def plan(job: JobConfig) -> JobPlan:
        training = replace(
            job.training,
            mixed_precision_param=compute_dtype(job.training.mixed_precision_param, device),
            enable_cpu_offload=job.training.enable_cpu_offload and not is_cpu,
        )
        try:
            return plan_job(replace(job, training=training), degrees.world, "cpu" if is_cpu else GPU)
        finally:
            shutdown()
            sys.excepthook = hook

    return fit_job(config, capacity, plan, kept)


def agree(config: JobConfig, proposal: Proposal, dist: Distributed) -> None:
    """Write the choice of the rank with the least memory into every rank's config, and log it.

    Raises:
        UserError: a rank could not choose; raised on all.
    """
    proposals: list[Proposal] = dist.gather(proposal)
    faults = [each.fault for each in proposals]
    if any(fault is not None for fault in faults):
        raise UserError(describe_faults(faults))
    least = min(proposals, key=lambda each: each.fit.capacity.num_bytes if each.fit.capacity else 0)
    least.fit.apply(config)
    for line in least.fit.lines():
        logger.info("%s", line)
    if least.fit.is_tight:
        logger.warning("%s", TIGHT)
    logger.info("auto took %.1f s", max(each.seconds for each in proposals))
