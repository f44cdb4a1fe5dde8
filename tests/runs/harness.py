"""Whole runs for the tests: many jobs one after the other in one group of processes.

Starting a process that trains costs ten seconds and more, so jobs that only differ in their options share a group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from flame.launch.layout import free_port

ROOT = Path(__file__).resolve().parents[2]

JOB_SECONDS = 600

# The demo, cut down: short sequences, constant learning rate, clipping active, every step logged, nothing exported.
# AdamW's update of a weight whose gradient is about zero has the sign of rounding. With eps 1e-6 such weights stay
# where they are: ten steps of gla on TP2xCP2 differ by 3e-6 from one process, not by 1e-4.
BASE = {
    "job.config_file": "configs/debug.toml",
    "job.sample_prompt": "",
    "model.config": "configs/debug/gated_deltanet.json",
    "optimizer.lr": "1e-3",
    "optimizer.eps": "1e-6",
    "lr_scheduler.warmup_steps": "0",
    "lr_scheduler.decay_ratio": "0",
    "training.seq_len": "64",
    "training.context_len": "48",
    "training.steps": "10",
    "training.max_norm": "0.5",
    "training.num_workers": "0",
    "training.skip_nan_inf": "false",
    "metrics.log_freq": "1",
    "metrics.enable_tensorboard": "false",
    "checkpoint.export_hf": "false",
    "checkpoint.interval": "1000",
}


@dataclass
class Job:
    """One run: a folder, what it sets besides ``BASE``, and the fault put into it (``tests.runs.faults``)."""

    folder: Path
    options: dict[str, str] = field(default_factory=dict)
    fault: str = ""

    @property
    def argv(self) -> list[str]:
        options = BASE | {"job.dump_folder": str(self.folder)} | self.options
        return [f"--{name}={value}" for name, value in options.items()]

    def rows(self) -> list[dict]:
        """The rows of the run's metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def series(self, key: str) -> list[float]:
        """A number of every logged step, or of every validation where its name begins with ``val_``."""
        return [row[key] for row in self.rows() if ("val_loss" in row) == key.startswith("val_")]


def run_jobs(jobs: list[Job], world_size: int = 1, timeout: float = JOB_SECONDS) -> list[int]:
    """Run jobs one after the other in one group of ``world_size`` processes.

    Returns:
        Rank 0's exit code of each job.

    Raises:
        AssertionError: a process died or was not done in time; the message holds what it printed.
    """
    return run_ranks(jobs, world_size, timeout)[0][0]


def run_ranks(jobs: list[Job], world_size: int, timeout: float = JOB_SECONDS) -> tuple[list[list[int]], list[str]]:
    """Each rank's exit codes of the jobs, and all that it printed.

    Gloo has been seen, once in some thousand times, to connect processes never: they sat in ``init_process_group``
    until they were ended. The jobs that are left then go to new processes, with a warning.

    Args:
        timeout: seconds that a job may take; the first one also starts the processes.

    Raises:
        AssertionError: a process died; the message holds what it printed.
    """
    codes: list[list[int]] = [[] for _ in range(world_size)]
    outputs = [""] * world_size
    lost = None
    while len(codes[0]) < len(jobs):
        group = _run_group(jobs[len(codes[0]) :], world_size, timeout)
        for rank in range(world_size):
            codes[rank] += group.codes[rank]
            outputs[rank] += group.outputs[rank]
        if group.ends == [0] * world_size:
            break
        ends = "\n".join(
            f"rank {rank} ended with {code}:\n{group.outputs[rank][-6000:]}" for rank, code in enumerate(group.ends)
        )
        assert group.never_met and lost != len(codes[0]), ends
        lost = len(codes[0])
        warnings.warn(f"{jobs[lost].folder.name}: gloo did not connect the processes; started again", stacklevel=2)
    return codes, outputs


def train_all(jobs: list[Job], world_size: int = 1, timeout: float = JOB_SECONDS) -> None:
    """``run_jobs`` with jobs that must all succeed.

    Raises:
        AssertionError: one did not; the message holds what the processes printed last.
    """
    codes, outputs = run_ranks(jobs, world_size, timeout)
    failed = [job.folder.name for job, code in zip(jobs, codes[0], strict=True) if code]
    assert not failed, f"{failed} failed:\n" + "\n".join(output[-6000:] for output in outputs)


@dataclass
class _Group:
    """Processes that have ended.

    Attributes:
        codes: each rank's exit codes of the jobs that it finished.
        ends: each process's own exit code.
        outputs: what each printed.
        is_late: they were ended because a job took too long.
    """

    codes: list[list[int]]
    ends: list[int]
    outputs: list[str]
    is_late: bool

    @property
    def never_met(self) -> bool:
        """All of them were waiting to be connected at the start of the same job."""
        is_waiting = all("in _new_process_group_helper" in output[-6000:] for output in self.outputs)
        return self.is_late and is_waiting and len({len(codes) for codes in self.codes}) == 1


def _run_group(jobs: list[Job], world_size: int, timeout: float) -> _Group:
    arguments = [json.dumps([(job.argv, job.fault, free_port()) for job in jobs])]
    with ExitStack() as stack:
        # Files, not pipes: a rank that nobody reads from would block, and its group with it.
        logs = [stack.enter_context(tempfile.NamedTemporaryFile("w+")) for _ in range(world_size)]
        codes = [stack.enter_context(tempfile.NamedTemporaryFile("w+")) for _ in range(world_size)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runs.worker", *arguments, str(rank), str(world_size), codes[rank].name],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},  # says where a signal ended it
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            is_late = _wait_for(processes, codes, timeout)
            ends = [process.wait(30) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return _Group([list(map(int, _read(file).split())) for file in codes], ends, list(map(_read, logs)), is_late)


def _wait_for(processes: list[subprocess.Popen], codes: list[IO[str]], timeout: float) -> bool:
    """Wait for the processes to end; True when a job took longer than ``timeout``.

    Those still running then are ended by a signal at which Python prints where they were.
    """
    finished, deadline = "", time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        if (now := _read(codes[0])) != finished:
            finished, deadline = now, time.monotonic() + timeout
        if time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGABRT)
            return True
    return False


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def user_environment(**variables: str) -> dict[str, str]:
    """The environment of a user whose python is the one that runs the tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables


def launch(*arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """``bash train.sh`` with arguments, as a user types it, in the environment that runs the tests."""
    return subprocess.run(
        ["bash", str(ROOT / "train.sh"), *arguments],
        cwd=ROOT,
        env=user_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
