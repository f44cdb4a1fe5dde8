"""Compiling a job's kernels beside its start: a process of the launcher's compiles, the trainers wait for it.

``python -m flame.launch.ahead WORLD_SIZE options…`` is that process. It holds a lock on a file for as long as it
lives, however it ends; the file takes what it has to say. Standard library only where the launcher needs it.
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
from dataclasses import asdict
from pathlib import Path

from flame.cli.parse import parse_args
from flame.config import JobConfig, auto_options
from flame.launch.caches import triton_cache
from flame.launch.layout import count_gpus
from flame.launch.versions import installed_version
from flame.paths import find_resource

FILE = "FLAME_COMPILING_AHEAD"  # the environment's name for the file
LONGEST_WAIT_S = 600.0
NICENESS = 10  # what starts a run has the cores first
_SECTIONS = ("model", "training", "activation_checkpoint", "activation_offload", "experimental", "float8")
_PACKAGES = ("torch", "triton", "flash-linear-attention", "transformers")


def start_if_worthwhile(
    config: JobConfig, argv: list[str], world_size: int, environ: MutableMapping[str, str]
) -> subprocess.Popen | None:
    """``start``, for a job that has kernels to compile; one on a machine that does not let it goes on without."""
    if config.job.compile_ahead and auto_options(config):
        print("flame: no kernels are compiled ahead: auto decides their shapes once the run has started", flush=True)
    try:
        return start(argv, world_size, environ) if is_worthwhile(config, environ) else None
    except (OSError, subprocess.SubprocessError) as error:
        print(f"flame: no kernels are compiled ahead: {error}", flush=True)
        return None


def is_worthwhile(config: JobConfig, environ: MutableMapping[str, str]) -> bool:
    """Whether there are kernels to compile which no earlier run with the same cache has compiled."""
    if not config.job.compile_ahead or config.model.backend == "reference" or config.checkpoint.create_seed_checkpoint:
        return False
    if auto_options(config):
        return False  # what shapes its kernels have is found by the run itself
    return not os.path.exists(stamp_of(config, environ)) and count_gpus(environ) > 0


def stamp_of(config: JobConfig, environ: MutableMapping[str, str]) -> Path:
    """The file in Triton's cache that says that the kernels of jobs like this one are there."""
    sections = {name: asdict(getattr(config, name)) for name in _SECTIONS}
    model = find_resource(config.model.config)
    text = model.read_bytes() if model.is_file() else b""
    versions = [installed_version(name) or "" for name in _PACKAGES]
    digest = hashlib.sha256(repr((sections, text, versions)).encode()).hexdigest()
    return triton_cache(environ) / f"flame_{digest[:32]}"


def start(argv: list[str], world_size: int, environ: MutableMapping[str, str]) -> subprocess.Popen:
    """Start compiling the kernels of a job; trainers that inherit ``environ`` can wait for it.

    Returns:
        The process, which ends when this object is gone.

    Raises:
        OSError: the folder of temporary files is full, or on a disk without locks.
    """
    number, path = tempfile.mkstemp(prefix="flame_ahead_")
    atexit.register(_remove, path)
    fcntl.flock(number, fcntl.LOCK_EX)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(number), str(world_size), *argv],
        stdin=subprocess.PIPE,  # closed when the launcher ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[number],
    )
    os.close(number)  # the lock is the other process's from now on
    environ[FILE] = path
    return process


def longest_wait(environ: Mapping[str, str], init_timeout_s: float) -> float:
    """Seconds that a trainer waits at most: those of other nodes, which may have less to compile, wait for it then.

    Args:
        init_timeout_s: ``comm.init_timeout_seconds``, after which they give up.
    """
    is_one_node = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    return LONGEST_WAIT_S if is_one_node else min(LONGEST_WAIT_S, init_timeout_s / 2)


def wait_until_compiled(environ: Mapping[str, str], longest_s: float = LONGEST_WAIT_S) -> str:
    """Wait for the process that compiles beside this start, if there is one; returns what it has to say."""
    path = environ.get(FILE)
    if path is None or not os.path.exists(path):
        return ""
    end = time.monotonic() + longest_s
    with open(path, encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    return f"kernels are still being compiled after {longest_s:.0f} s; not waiting any longer"
                time.sleep(0.05)
            else:
                return file.read()


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def main(number: str, world_size: str, *argv: str) -> None:
    """Compile, and write what was done to the open file ``number``."""
    end_with_the_launcher()
    os.nice(NICENESS)
    with open(int(number), "w", encoding="utf-8") as file:
        try:
            from flame.dry_run.kernels import compile_kernels  # slow to import

            config = parse_args(list(argv))
            told = compile_kernels(config, int(world_size))
            stamp = stamp_of(config, os.environ)
            stamp.parent.mkdir(parents=True, exist_ok=True)  # not there yet when there was nothing to compile
            stamp.touch()
        except Exception as error:
            told = f"no kernels were compiled ahead, each is when it is needed: {type(error).__name__}: {error}"
        file.write(told.splitlines()[0])


def end_with_the_launcher() -> None:
    """End this process when its input is closed."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
