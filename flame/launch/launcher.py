"""Starts a run: checks the job, then trains in this process, or with torchrun in several, and returns the exit code.

Standard library only until the job is known to be right, so that its faults come within a moment.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flame.cli import parse as cli
from flame.config import JobConfig
from flame.dry_run.command import is_dry, planned_size
from flame.errors import UserError
from flame.launch import ahead, exit_codes, notes
from flame.launch.caches import set_up_caches
from flame.launch.layout import Layout, check_port, free_port, read_layout, threads_per_process
from flame.launch.stop_signals import SIGNALS, SignalWatcher, exit_when_asked
from flame.launch.versions import check_versions
from flame.parallel.degrees import resolve_degrees

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

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
        resolve_degrees(config, planned_size(config, layout.world_size))
        for note in set_up_caches(config.job.cache_dir, os.environ):
            print(f"flame: {note}", flush=True)
        if not is_dry(config):
            check_port(layout)
            if layout.world_size > 1:
                make_log_folder(config, layout)
    except UserError as error:
        print(error, file=sys.stderr)
        return exit_codes.USER_ERROR
    if is_dry(config):
        os.environ.update(RANK="0", WORLD_SIZE=str(layout.world_size))
        return import_module(trainer).main(argv)
    print(f"flame: starting {layout.world_size} process{'es' * (layout.world_size > 1)}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(layout)))
    # Kept for as long as the run goes on.
    compiling = ahead.start_if_worthwhile(config, argv, layout.world_size, os.environ)  # noqa: F841
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
    The code returned is that of the process that failed first. Of a run that a signal has stopped, this process ends
    with its code here.
    """
    torchrun = _import_torchrun()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(config.checkpoint.preempt_timeout_seconds)
    # torchrun hands SIGTERM on to its processes but dies of SIGUSR1, and leaves them behind.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))

    with tempfile.TemporaryDirectory(prefix="flame_") as folder:
        os.environ[notes.FOLDER] = folder
        log_folder = _log_folder(config, layout)
        # A second signal ends the processes at once; torchrun would wait for them a second time.
        watcher = SignalWatcher(lambda _: None, lambda _: notes.kill_rest(Path(folder)))
        try:
            with watcher:
                torchrun.main([*torchrun_options(log_folder, layout), "-m", "flame.launch.worker", trainer, *argv])
        except ChildFailedError as error:
            rank, failure = _first_failure(error.failures, Path(folder))
            code = _code_of(failure, Path(folder))
            if code != exit_codes.PREEMPTED:
                _report_failure(rank, failure.local_rank, code, log_folder, layout)
            return code
        except SignalException as error:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # one more request would cut the end short
            codes = [code for code, _ in notes.read_codes(Path(folder)).values()]
            stopped_code = max(codes, default=exit_codes.KILLED + error.sigval)
        else:
            return exit_codes.OK
        finally:
            notes.kill_rest(Path(folder))
            del os.environ[notes.FOLDER]
    # A second signal may have kept torchrun from stopping the threads that follow the logs; Python would wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(stopped_code)


def _import_torchrun() -> ModuleType:
    """torchrun, silenced: of a stopped or failed process the launcher itself says one line, with the place of its log.

    Imported late, as it imports torch.
    """
    level = os.environ.get("LOGLEVEL")
    os.environ["LOGLEVEL"] = "CRITICAL"  # which its loggers take when they are made; the processes must not
    torchrun = import_module("torch.distributed.run")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    del os.environ["LOGLEVEL"]
    if level is not None:
        os.environ["LOGLEVEL"] = level
    return torchrun


def make_log_folder(config: JobConfig, layout: Layout) -> None:
    """Make the folder that torchrun is to write to, which does not say what is wrong with one.

    Raises:
        UserError: it cannot be made or written to.
    """
    folder = _log_folder(config, layout)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        given = f"job.dump_folder = {config.job.dump_folder}"
        raise UserError(f"{given}: cannot be written to: {error.strerror}") from error


def _log_folder(config: JobConfig, layout: Layout) -> Path:
    """Where the logs of this launcher's processes go; launchers of several machines share the storage."""
    folder = Path(config.job.dump_folder) / "logs"
    return folder / f"{socket.gethostname()}_{os.getpid()}" if layout.num_nodes > 1 else folder


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


def _first_failure(failures: dict[int, ProcessFailure], folder: Path) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how; the others fail because of it, often within the same moment.

    A process killed by a signal of its own (torchrun ends the others with SIGTERM) leaves no exit code behind; of
    those that do, the oldest note counts.
    """
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return rank, failure
    left_at = {rank: when for rank, (_, when) in notes.read_codes(folder).items()}
    return min(failures.items(), key=lambda item: left_at.get(item[1].local_rank, float("inf")))


def _code_of(failure: ProcessFailure, folder: Path) -> int:
    """A rank's exit code: the one it noted, since torchrun may have killed it on its way out."""
    if noted := notes.read_codes(folder).get(failure.local_rank):
        return noted[0]
    return failure.exitcode if failure.exitcode > 0 else exit_codes.KILLED - failure.exitcode


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
    exit_when_asked()
    sys.exit(main(sys.argv[1:]))
