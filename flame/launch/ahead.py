"""Compiling a job's kernels beside its start: processes of the launcher's compile, the trainers wait for them.

``python -m flame.launch.ahead LOCK WORK WORLD_SIZE options…`` is such a process, for one entry of
``flame.launch.works``. It holds a lock on a file for as long as it lives, however it ends; the file takes what it has
to say. Standard library only where the launcher needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from pathlib import Path

from flame.cli.parse import parse_args
from flame.config import JobConfig, auto_options
from flame.launch.gpu import find_gpu, hide_gpus
from flame.launch.layout import count_gpus, gpu_names
from flame.launch.versions import installed_version
from flame.launch.works import KERNELS, WORKS, Work
from flame.model_file import find_model_file

FILE = "FLAME_COMPILING_AHEAD"  # with the work's name, the environment's name for its file
LONGEST_WAIT_S = 600.0
NICENESS = 10  # what starts a run has the cores first


def start_if_worthwhile(
    config: JobConfig, argv: list[str], world_size: int, environ: MutableMapping[str, str]
) -> list[subprocess.Popen]:
    """``start``, for all that a job has to compile; one on a machine that does not let it goes on without."""
    if config.job.compile_ahead and auto_options(config):
        what = WORKS[KERNELS].what
        print(f"flame: {what} are not compiled ahead: auto decides their shapes once the run has started", flush=True)
    processes = []
    try:
        names = [name for name, work in WORKS.items() if is_worthwhile(work, config, environ)]
        if names and count_gpus(environ) > 0:
            for name in names:
                processes.append(start(name, argv, world_size, environ))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"flame: not all kernels are compiled ahead: {error}", flush=True)
    return processes


def is_worthwhile(work: Work, config: JobConfig, environ: Mapping[str, str]) -> bool:
    """Whether a job may need what no earlier run with the same cache has compiled."""
    return work.is_wanted(config, environ) and not os.path.exists(stamp_of(work, config, environ))


def stamp_of(work: Work, config: JobConfig, environ: Mapping[str, str]) -> Path:
    """The file in a cache that says that what jobs like this one need is there."""
    model = find_model_file(config.model.config)
    text = model.read_bytes() if os.path.isfile(model) else config.model.config
    versions = [installed_version(name) or "" for name in work.packages]
    known = work.function, work.options(config), text, versions, gpu_names()
    digest = hashlib.sha256(repr(known).encode()).hexdigest()
    return work.cache(environ) / f"flame_{digest[:32]}"


def start(name: str, argv: list[str], world_size: int, environ: MutableMapping[str, str]) -> subprocess.Popen:
    """Start a process for the entry ``name`` of ``WORKS``; trainers that inherit ``environ`` can wait for it.

    Returns:
        The process, which ends when this object is gone.

    Raises:
        OSError: the folder of temporary files is full, or on a disk without locks.
    """
    number, path = tempfile.mkstemp(prefix="flame_ahead_")
    atexit.register(_remove, path)
    fcntl.flock(number, fcntl.LOCK_EX)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(number), name, str(world_size), *argv],
        stdin=subprocess.PIPE,  # closed when the launcher ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[number],
    )
    os.close(number)  # the lock is the other process's from now on
    environ[_variable(name)] = path
    return process


def longest_wait(environ: Mapping[str, str], init_timeout_s: float) -> float:
    """Seconds that a trainer waits at most: those of other nodes, which may have less to compile, wait for it then.

    Args:
        init_timeout_s: ``comm.init_timeout_seconds``, after which they give up.
    """
    is_one_node = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    return LONGEST_WAIT_S if is_one_node else min(LONGEST_WAIT_S, init_timeout_s / 2)


def wait_until_compiled(name: str, environ: Mapping[str, str], longest_s: float = LONGEST_WAIT_S) -> str:
    """Wait for the process that does the work ``name`` beside this start, if there is one; returns what it says."""
    path = environ.get(_variable(name))
    if path is None or not os.path.exists(path):
        return ""
    end = time.monotonic() + longest_s
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > end:
                        what = WORKS[name].what
                        return f"{what}: still being compiled after {longest_s:.0f} s; not waiting any longer"
                    time.sleep(0.05)
                else:
                    return file.read()
    except OSError as error:  # the file has gone with its launcher, or its disk knows no locks
        return f"{WORKS[name].what}: not waited for: {error}"


def _variable(name: str) -> str:
    return f"{FILE}_{name.upper()}"


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def main(number: str, name: str, world_size: str, *argv: str) -> None:
    """Compile, and write what was done to the open file ``number``."""
    end_with_the_launcher()
    os.nice(NICENESS)
    with open(int(number), "w", encoding="utf-8") as file:
        try:
            told = compile_ahead(WORKS[name], parse_args(list(argv)), int(world_size))
        except Exception as error:
            told = f"{WORKS[name].what}: not compiled ahead, but when needed: {type(error).__name__}: {error}"
        file.write(told.splitlines()[0] if told else "")


def compile_ahead(work: Work, config: JobConfig, world_size: int) -> str:
    """Do a work in this process, and leave the stamp of it; returns what was done, in words."""
    start = time.monotonic()
    for name in WORKS:
        os.environ.pop(_variable(name), None)  # this process waits for no other
    if work.gpus is not None:
        gpu = find_gpu(os.environ)
        if gpu is None or gpu.major not in work.gpus:
            return ""
        hide_gpus(os.environ, gpu)
    module, function = work.function.split(":")
    done = getattr(import_module(module), function)(config, world_size)
    stamp = stamp_of(work, config, os.environ)
    stamp.parent.mkdir(parents=True, exist_ok=True)  # not there yet when there was nothing to compile
    stamp.touch()
    return done and f"{work.what}: {done} compiled ahead in {time.monotonic() - start:.1f} s"


def end_with_the_launcher() -> None:
    """End this process when its input is closed."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
