"""Whole runs for the tests: many jobs one after the other in one group of processes.

Starting a process that trains costs ten seconds and more, so jobs that only differ in their options share a group.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from flame.launch.layout import free_port

ROOT = Path(__file__).resolve().parents[2]

# The demo, cut down: short sequences, constant learning rate, clipping active, every step logged, nothing exported.
BASE = {
    "job.config_file": "configs/debug.toml",
    "job.sample_prompt": "",
    "model.config": "configs/debug/gated_deltanet.json",
    "optimizer.lr": "1e-3",
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
        return [row[key] for row in self.rows()]


def run_jobs(jobs: list[Job], world_size: int = 1, timeout: float = 600) -> list[int]:
    """Run jobs one after the other in one group of ``world_size`` processes.

    Returns:
        Rank 0's exit code of each job.

    Raises:
        AssertionError: a process died; the message holds what it printed.
    """
    return run_ranks(jobs, world_size, timeout)[0][0]


def run_ranks(jobs: list[Job], world_size: int, timeout: float) -> tuple[list[list[int]], list[str]]:
    """Each rank's exit codes of the jobs, and all that it printed.

    Raises:
        AssertionError: a process died; the message holds what it printed.
    """
    arguments = [json.dumps([(job.argv, job.fault, free_port()) for job in jobs])]
    with ExitStack() as stack:
        # Files, not pipes: a rank that nobody reads from would block, and its group with it.
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runs.worker", *arguments, str(rank), str(world_size)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        outputs = [_read(log) for log in logs]
    assert codes == [0] * world_size, "\n".join(outputs)[-6000:]
    return [json.loads(output.splitlines()[-1]) for output in outputs], outputs


def train_all(jobs: list[Job], world_size: int = 1, timeout: float = 1200) -> None:
    """``run_jobs`` with jobs that must all succeed.

    Raises:
        AssertionError: one did not; the message holds what the processes printed last.
    """
    codes, outputs = run_ranks(jobs, world_size, timeout)
    failed = [job.folder.name for job, code in zip(jobs, codes[0], strict=True) if code]
    assert not failed, f"{failed} failed:\n" + "\n".join(output[-6000:] for output in outputs)


def _read(log) -> str:
    log.seek(0)
    return log.read()


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
