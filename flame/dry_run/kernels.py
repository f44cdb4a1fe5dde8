"""The Triton kernels of a job before it runs, found by the plan of it, and compiled ahead."""

from __future__ import annotations

from typing import Any

from flame.config import JobConfig
from flame.dry_run.capacity import available_memory
from flame.dry_run.plan import plan_job
from flame.metrics.device import GIB
from flame.models.tuning import Task, compile_ahead, num_compilers, tasks_of
from flame.models.without_kernels import observed_launches

PROCESS_BYTES = GIB  # of the host's memory, for a process that compiles


def planned_kernels(config: JobConfig, world_size: int) -> list[Task]:
    """What a step of the job has Triton compile, each once; those that many candidates compete for come first.

    Raises:
        UserError: the job could not run.
    """
    tasks: dict[tuple, Task] = {}

    def observe(kernel: Any, args: tuple, options: dict[str, Any]) -> None:
        for task in tasks_of(kernel, args, options):
            tasks.setdefault(task.key, task)

    with observed_launches(observe):
        plan_job(config, world_size)
    return sorted(tasks.values(), key=lambda task: not task.is_tuned)


def compile_kernels(config: JobConfig, world_size: int) -> str:
    """Compile the kernels of a job in all cores, or as many as the host's memory allows; what was done, in words.

    What is in the cache already takes no time.

    Raises:
        UserError: the job could not run.
    """
    tasks = planned_kernels(config, world_size)
    memory = available_memory()
    num_processes = num_compilers() if memory is None else min(num_compilers(), max(1, memory // PROCESS_BYTES))
    compile_ahead(tasks, num_processes)
    num_kernels = len({task.name for task in tasks})
    return f"{len(tasks)} forms of {num_kernels} kernels"
