"""Profiler traces and GPU memory snapshots of single steps, as ``[profiling]`` asks for them."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from flame.config import Profiling
from flame.errors import UserError

logger = logging.getLogger(__name__)

MAX_WARMUP_STEPS = 3  # traced and thrown away, so that the profiler's own start is not in the trace
MAX_SNAPSHOT_ENTRIES = 100_000  # allocations and frees that a snapshot looks back on


def check_profiling(profiling: Profiling, device: torch.device) -> None:
    """Refuse what the device cannot do, before anything else of the run is built.

    Raises:
        UserError: a memory snapshot is wanted of a device that is not a GPU.
    """
    if profiling.enable_memory_snapshot and device.type != "cuda":
        raise UserError(
            f"profiling.enable_memory_snapshot: needs a CUDA device, this run is on {device.type}; turn it off"
        )


class Profiler:
    """A context around the training loop, with ``step()`` to be called at each step's end; does nothing when off.

    Every ``profile_freq`` steps a trace of that step is written to
    ``{dump_folder}/{save_traces_folder}/iteration_N/rankR_trace.json.gz`` (open it in https://ui.perfetto.dev), and the
    memory history up to it to ``{dump_folder}/{save_memory_snapshot_folder}/iteration_N/rankR_memory_snapshot.pickle``
    (open it in https://pytorch.org/memory_viz); the latter also when memory runs out, to ``iteration_N_oom``. A traced
    step begins on a device that has nothing left to do, unlike the steps of a run, whose host is ahead.

    Args:
        profiling: the section of the job config.
        dump_folder: the run folder.
        device: what is trained on.
        rank: of this process among all.
        last_step: the step of the loaded checkpoint, so that N counts the run's steps.
    """

    def __init__(
        self, profiling: Profiling, dump_folder: str | Path, device: torch.device, rank: int = 0, last_step: int = 0
    ):
        dump_folder = Path(dump_folder)
        self._parts: list[TraceProfiler | MemorySnapshots] = []
        if profiling.enable_profiling:
            folder = dump_folder / profiling.save_traces_folder
            self._parts.append(TraceProfiler(folder, profiling.profile_freq, device, rank, last_step))
        if profiling.enable_memory_snapshot:
            folder = dump_folder / profiling.save_memory_snapshot_folder
            self._parts.append(MemorySnapshots(folder, profiling.profile_freq, rank, last_step))
        self._stack = ExitStack()

    def __enter__(self) -> Profiler:
        for part in self._parts:
            self._stack.enter_context(part)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(*exc)

    def step(self) -> None:
        for part in self._parts:
            part.step()


class TraceProfiler:
    """Trace one step in ``every`` with ``torch.profiler``; arguments as in ``Profiler``."""

    def __init__(self, folder: Path, every: int, device: torch.device, rank: int = 0, last_step: int = 0):
        self.folder, self.device, self.rank, self.last_step = folder, device, rank, last_step
        warmup = min(MAX_WARMUP_STEPS, every - 1)
        self._schedule = schedule(wait=every - 1 - warmup, warmup=warmup, active=1)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = profile(
            activities=activities, schedule=self._action, on_trace_ready=self._write, record_shapes=True
        )

    def __enter__(self) -> TraceProfiler:
        self._profile.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._profile.__exit__(*exc)

    def step(self) -> None:
        begins = self._action(self._profile.step_num + 1) is ProfilerAction.RECORD_AND_SAVE
        if begins and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or the end of the step before would be in the trace
        self._profile.step()

    def _action(self, num_steps: int) -> ProfilerAction:
        return self._schedule(num_steps + self.last_step)

    def _write(self, finished: profile) -> None:
        step = finished.step_num + self.last_step
        path = step_folder(self.folder, f"iteration_{step}") / f"rank{self.rank}_trace.json.gz"
        start = time.perf_counter()
        finished.export_chrome_trace(str(path))
        logger.info("trace of step %d written to %s in %.1f s", step, path, time.perf_counter() - start)


class MemorySnapshots:
    """Record the history of a GPU's allocations and write it down; arguments as in ``Profiler``.

    torch documents the functions for this under names with an underscore and has no others (2.11 to 2.13):
    https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """

    def __init__(self, folder: Path, every: int, rank: int = 0, last_step: int = 0):
        self.folder, self.every, self.rank, self._step = folder, every, rank, last_step

    def __enter__(self) -> MemorySnapshots:
        torch.cuda.memory._record_memory_history(max_entries=MAX_SNAPSHOT_ENTRIES)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None and issubclass(exc_type, torch.OutOfMemoryError):
            self._write(f"iteration_{self._step + 1}_oom")
        torch.cuda.memory._record_memory_history(enabled=None)

    def step(self) -> None:
        self._step += 1
        if self._step % self.every == 0:
            self._write(f"iteration_{self._step}")

    def _write(self, name: str) -> None:
        path = step_folder(self.folder, name) / f"rank{self.rank}_memory_snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info("memory snapshot written to %s", path)


def step_folder(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    return path
