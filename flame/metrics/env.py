"""``env.json``: what a run ran on, so that its numbers can be made again."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

import flame
from flame.launch.versions import installed_version
from flame.paths import PACKAGE_ROOT

FILE_NAME = "env.json"
PACKAGES = (
    "torch",
    "triton",
    "torchtitan",
    "flash-linear-attention",
    "transformers",
    "datasets",
    "tokenizers",
    "torchao",
    "numpy",
)
# Environment variables that change what a run computes or how fast; nothing that may hold a secret.
VARIABLE_PREFIXES = ("CUBLAS_", "CUDA_", "FLA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")


def write_env(dump_folder: str | Path, world_size: int = 1) -> None:
    """Write ``{dump_folder}/env.json`` for the process at hand, in the place of an earlier start's."""
    path = Path(dump_folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(describe_environment(world_size), indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)


def describe_environment(world_size: int = 1) -> dict:
    """Versions, devices, hosts, command line and the environment variables that matter, as plain data."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "num_hosts": max(world_size // local_world_size, 1),
        "world_size": world_size,
        "devices": device_names(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {"flame": flame.__version__} | {name: installed_version(name) for name in PACKAGES},
        "git_commit": git_commit(PACKAGE_ROOT.parent),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLE_PREFIXES)},
    }


def device_names() -> list[str]:
    """One name per accelerator of this host, or the processor with its number of cores."""
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [f"{_cpu_model()} ({os.cpu_count()} cores)"]


def git_commit(checkout: Path) -> str | None:
    """The commit of ``checkout``, with ``-dirty`` for local changes; None where it is not a git checkout."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a checkout on a stalled file system
        return None
    return done.stdout.strip() or None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")  # Linux; platform.processor() is empty or just the architecture there
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
