"""How many processes a run has on how many machines, from the environment and the visible GPUs, without torch."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from flame.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Processes of a run, and where they meet."""

    num_nodes: int
    processes_per_node: int
    master_addr: str
    master_port: int
    """0: any free port of this machine."""
    shown_ranks: str
    """Local ranks whose output goes to the console, with commas."""

    @property
    def world_size(self) -> int:
        """Processes on all machines."""
        return self.num_nodes * self.processes_per_node


def read_layout(environ: Mapping[str, str]) -> Layout:
    """The layout that NNODE, NGPU, MASTER_ADDR, MASTER_PORT and LOG_RANK ask for.

    NGPU defaults to one process per visible GPU and to 1 on a CPU. Raises UserError when a variable is wrong, or
    missing with several nodes.
    """
    num_nodes = _positive(environ, "NNODE", 1)
    processes = _positive(environ, "NGPU", None) or max(1, count_gpus(environ))
    port = _positive(environ, "MASTER_PORT", 0)
    if port >= 2**16:
        raise UserError(f"MASTER_PORT = {port}: must be a port, below {2**16}")
    address = environ.get("MASTER_ADDR", "")
    if num_nodes > 1 and not (address and port):
        raise UserError(
            f"NNODE = {num_nodes}: a run on several machines needs MASTER_ADDR and MASTER_PORT, "
            "the same on each: the address of one of them and a free port there"
        )
    if num_nodes > 1:
        _check_address(address)
    shown = environ.get("LOG_RANK") or "0"
    if not all(rank.strip().isdecimal() and int(rank) < processes for rank in shown.split(",")):
        raise UserError(f"LOG_RANK = {shown}: must be numbers from 0 to {processes - 1}, with commas")
    return Layout(num_nodes, processes, address or "127.0.0.1", port, shown)


def _check_address(address: str) -> None:
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise UserError(f"MASTER_ADDR = {address}: no machine is known by that name here ({error})") from error


def _positive(environ: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} = {text}: must be a whole number, at least 1")
    return int(text)


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that the installed torch could use; 0 without a driver or with a CPU build."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    present = sum(line.startswith("GPU ") for line in _listing().splitlines())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    # CUDA's own rule: the first entry that is no device ends the list.
    chosen = [entry.strip() for entry in visible.split(",")]
    return next((index for index, entry in enumerate(chosen) if entry in ("", "-1")), len(chosen))


def gpu_names() -> list[str]:
    """The kinds of GPU of this machine, each once."""
    found = (re.match(r"GPU \d+: (.*?) \(UUID", line) for line in _listing().splitlines())
    return sorted({match[1] for match in found if match})


@cache
def _listing() -> str:
    """What the driver's tool says of this machine; asked once, since it may take a second."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except FileNotFoundError:
        return ""


def free_port() -> int:
    """A TCP port that is free on this machine now.

    It lies below those that systems hand out by themselves (Linux: from 32768 on): the ranks' own connections, of which
    there are many, cannot take it before it is used.

    Raises:
        UserError: no such port is free.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_768), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError("no port between 20000 and 32767 is free on this machine; set MASTER_PORT to one that is")


def check_port(layout: Layout) -> None:
    """Refuse a port that is taken, where the processes of one machine would wait for each other for minutes.

    Raises:
        UserError: MASTER_PORT cannot be used here.
    """
    if layout.num_nodes > 1 or not layout.master_port:  # of several machines one alone has it
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an earlier run has just left is free
        try:
            probe.bind(("", layout.master_port))
        except OSError as error:
            raise UserError(
                f"MASTER_PORT = {layout.master_port}: {error.strerror} on this machine; leave it out or give a free one"
            ) from error


def threads_per_process(layout: Layout) -> int:
    """CPU threads for each process, so that all of them fit the cores this machine lets us use."""
    # Cores that the process may run on: a container or Slurm step often has fewer than the machine.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // layout.processes_per_node)
