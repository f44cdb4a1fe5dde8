"""What scripts share that train a config for some steps: the options of such a job, and where it ran."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def job_options(config: Path, folder: Path, *, seq_len: int, context_len: int, steps: int) -> dict[str, Any]:
    """Options of a job that needs no network and saves nothing: packed text of Python's library, every step logged."""
    return {
        "job.dump_folder": str(folder),
        "model.config": str(config.resolve()),
        "model.tokenizer_path": str(ROOT / "configs" / "tokenizer"),
        "optimizer.lr": 1e-3,
        "lr_scheduler.decay_ratio": 0,
        "training.dataset": "builtin:stdlib",
        "training.varlen": True,
        "training.seq_len": seq_len,
        "training.context_len": context_len,
        "training.steps": steps,
        "metrics.log_freq": 1,
        "checkpoint.enable_checkpoint": False,
        "checkpoint.export_hf": False,
    }


def ending_with_us(number: int) -> Callable[[], None]:
    """For Popen's preexec_fn: the kernel sends the child, and it alone, this signal when we end in whatever way.

    Linux only; elsewhere nothing happens. "We" is the thread that starts the child, which must wait for it.
    """
    libc, set_parent_death_signal, parent = ctypes.CDLL(None), 1, os.getpid()  # PR_SET_PDEATHSIG of prctl(2)

    def ask() -> None:
        if sys.platform == "linux":
            libc.prctl(set_parent_death_signal, int(number))
            if os.getppid() != parent:  # it ended in between
                os.kill(os.getpid(), number)

    return ask


def card() -> str:
    """The device's name."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def commit() -> str:
    """The checkout's commit, short; empty where there is no repository."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
