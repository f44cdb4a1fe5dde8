"""The dry run of a job: its plan, printed."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from flame.config import JobConfig, auto_options
from flame.metrics.console import setup_logging

if TYPE_CHECKING:
    from flame.dry_run.fit import Fit


def is_dry(config: JobConfig) -> bool:
    """Whether the job is to be planned and not run."""
    return config.job.dry_run or config.memory_estimation.enabled


def planned_size(config: JobConfig, num_processes: int) -> int:
    """Processes that the job is planned for, or has when it is run.

    Args:
        num_processes: what there are without ``job.world_size``.
    """
    return config.job.world_size or num_processes


def dry_run(config: JobConfig) -> None:
    """Print what the job would need; of processes that torchrun has started, the first does.

    Raises:
        UserError: the job could not run; the message says what to change.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    from flame.dry_run.plan import plan_job  # real runs have no use for them
    from flame.dry_run.report import auto_lines, lines_of, memory_lines, room_lines

    setup_logging(0, 0, color=not config.metrics.disable_color_printing)
    logging.getLogger("flame").setLevel(logging.WARNING)  # the plan says it all
    world_size = planned_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    limit, lines = config.job.device_memory_gib, []
    if auto_options(config):
        fit = fit_plan(config, world_size)
        lines += auto_lines(fit)
        fit.apply(config)
    plan = plan_job(config, world_size)
    lines += lines_of(plan) if config.job.dry_run else memory_lines(plan)
    lines += room_lines(plan, limit)
    print("\n".join(lines), flush=True)


def fit_plan(config: JobConfig, world_size: int) -> Fit:
    """What auto would choose on so many GPUs.

    Raises:
        UserError: as a run with auto would; or it is not known which GPUs.
    """
    from flame.dry_run.capacity import planned_capacity
    from flame.parallel.degrees import resolve_degrees
    from flame.training.auto import META, decide

    capacity = planned_capacity(config.job.device_memory_gib, auto_options(config)[0])
    return decide(config, resolve_degrees(config, world_size), capacity, META)
