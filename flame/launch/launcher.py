"""Starts a run: checks the job, then trains in this process, or with torchrun in several, and returns the exit code.

Standard library only until the job is known to be right, so that its faults come within a moment.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from flame.cli import parse as cli
from flame.config import JobConfig
from flame.errors import UserError
from flame.launch import exit_codes
from flame.launch.layout import Layout, free_port, read_layout, threads_per_process
from flame.launch.versions import check_versions
from flame.parallel.degrees import resolve_degrees

DEMO = ["--job.config_file", "configs/debug.toml"]
TRAINER = "flame.train"


def main(argv: list[str], trainer: str = TRAINER) -> int:
    """Run a job and return its exit code (``flame.launch.exit_codes``).

    ``trainer`` is the module whose ``main(argv)`` trains and returns the code.
    """
    os.environ.setdefault("FLAME_START_TIME", str(time.time()))
    if cli.wants_help(argv):
        return cli.main(argv)
    if not argv:
        print(f"flame: no options given: this is the demo, {DEMO[1]}", flush=True)
        argv = DEMO
    try:
        config = cli.parse_args(argv)
        check_versions()
        layout = read_layout(os.environ)
        resolve_degrees(config, layout.world_size)
    except UserError as error:
        print(error, file=sys.stderr)
        return exit_codes.USER_ERROR
    print(f"flame: starting {layout.world_size} process{'es' * (layout.world_size > 1)}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(layout)))
    if layout.world_size == 1:
        return run_here(argv, layout, trainer)
    return run_with_torchrun(argv, config, layout, trainer)


def run_here(argv: list[str], layout: Layout, trainer: str = TRAINER) -> int:
    """Train in this process, as rank 0 of one: Python and torch start once."""
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(layout.master_port or free_port()),
    )
    return import_module(trainer).main(argv)


def run_with_torchrun(argv: list[str], config: JobConfig, layout: Layout, trainer: str = TRAINER) -> int:
    """Train in ``layout.processes_per_node`` processes of this machine, with a log of each in the run folder.

    SIGTERM, SIGINT and SIGUSR1 reach every process, which then has ``checkpoint.preempt_timeout_seconds`` to save.
    The code returned is that of the process that failed first.
    """
    # What torchrun says of a stopped or failed process is said below, in one line and with the place of its log. Its
    # loggers take their level from this variable when they are made; the processes must not.
    level = os.environ.pop("LOGLEVEL", None)
    os.environ["LOGLEVEL"] = "CRITICAL"
    # Imported late: it imports torch.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(config.checkpoint.preempt_timeout_seconds)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    del os.environ["LOGLEVEL"]
    if level is not None:
        os.environ["LOGLEVEL"] = level
    # torchrun hands SIGTERM on to its processes but dies of SIGUSR1, and leaves them behind.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))

    with tempfile.TemporaryDirectory(prefix="flame_") as exit_folder:
        log_folder = Path(config.job.dump_folder) / "logs"
        try:
            torchrun.main(
                [*torchrun_options(log_folder, layout), "-m", "flame.launch.worker", exit_folder, trainer, *argv]
            )
        except ChildFailedError as error:
            rank, failure = _first_failure(error.failures, Path(exit_folder))
            code = failure.exitcode if failure.exitcode > 0 else exit_codes.KILLED - failure.exitcode
            _report_failure(rank, failure.local_rank, code, log_folder, layout)
            return code
        except SignalException as error:
            codes = [int(path.read_text()) for path in Path(exit_folder).iterdir()]
            return max(codes, default=exit_codes.KILLED + error.sigval)
    return exit_codes.OK


def torchrun_options(log_folder: Path, layout: Layout) -> list[str]:
    """torchrun's own options: where the processes meet, and where their output goes."""
    return [
        f"--nnodes={layout.num_nodes}",
        f"--nproc-per-node={layout.processes_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={layout.master_addr}:{layout.master_port}",
        f"--rdzv-id={os.environ.get('SLURM_JOB_ID', 'flame')}",
        f"--log-dir={log_folder}",
        "--tee=3",
        f"--local-ranks-filter={layout.shown_ranks}",
    ]


def _first_failure(failures: dict, exit_folder: Path) -> tuple:
    """The rank that failed first, and how; the others fail because of it, often within the same moment.

    A process killed by a signal of its own (torchrun ends the others with SIGTERM) leaves no exit code behind; of
    those that do, the oldest note counts.
    """
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return rank, failure
    notes = {int(path.name): path.stat().st_mtime_ns for path in exit_folder.iterdir()}
    return min(failures.items(), key=lambda item: notes.get(item[1].local_rank, float("inf")))


def _report_failure(rank: int, local_rank: int, code: int, log_folder: Path, layout: Layout) -> None:
    """Say which rank failed and where its log is, with the log's end when the console has not shown that rank."""
    logs = max(log_folder.glob("*/attempt_*"), key=lambda folder: folder.stat().st_mtime)
    print(f"flame: rank {rank} ended with {describe(code)}; the logs of all ranks: {logs}", file=sys.stderr)
    if str(local_rank) not in layout.shown_ranks.split(","):
        outputs = [
            (logs / str(local_rank) / f"{name}.log").read_text(errors="replace") for name in ("stdout", "stderr")
        ]
        last_lines = [line for output in outputs for line in output.splitlines()[-30:]]
        print("".join(f"[rank {rank}] {line}\n" for line in last_lines), file=sys.stderr, end="")


def describe(code: int) -> str:
    """An exit code in words."""
    if code <= exit_codes.KILLED:
        return f"exit code {code}"
    name = signal.Signals(code - exit_codes.KILLED).name
    hint = ", which is also how a machine out of memory ends a process" if name == "SIGKILL" else ""
    return f"exit code {code} (killed by {name}{hint})"


def entry() -> None:
    """The ``flame-train`` command."""
    sys.exit(main(sys.argv[1:]))
