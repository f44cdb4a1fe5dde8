"""A disk that is full for a while: the run goes on, the last checkpoint stands, and later ones are written again.

    python -m tests.faults.full_disk --mode disabled    (as root: it mounts a file system of 50 MB)

The disk is filled at the moment when the second checkpoint is being written, and is emptied some steps later.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flame.checkpoint.folders import list_steps
from tests.faults.forked import Group, preload
from tests.faults.kill import compare_runs, newest_step, rows_of
from tests.runs.harness import Job

STEPS, INTERVAL, FREED_AT = 24, 4, 14
MEGABYTES = 50


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 50 MB at ``folder``.

    Raises:
        OSError: this process may not mount one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise OSError("there is no mount command") from error
    if done.returncode:
        raise OSError(done.stderr.strip() or "mount failed")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run(root: Path, mode: str, report: Callable[[str], None]) -> list[str]:
    """Train on a small disk through its being full; what went wrong."""
    log = root / "log.txt"
    undisturbed, disk = root / "undisturbed", root / "disk"
    assert Group(job(undisturbed, mode).argv, 2, log).wait(300) == [0, 0], log.read_text()[-3000:]
    with small_disk(disk):
        group = Group(job(disk / "run", mode).argv, 2, log)
        group.wait_until(lambda: newest_step(disk / "run") > 0, 200)
        group.wait_until(lambda: group.board.is_saving(0), 200)
        num_bytes = fill(disk / "filler")
        at_step = group.board.step(0)
        group.wait_until(lambda: group.board.step(0) >= FREED_AT, 200)
        kept = sorted(list_steps(disk / "run" / "checkpoint").complete)
        (disk / "filler").unlink()
        codes = group.wait(300)
        steps = sorted(list_steps(disk / "run" / "checkpoint").complete)
        faults = compare_runs(rows_of(undisturbed), rows_of(disk / "run"), STEPS, exact=True)
        left = [path.name for path in (disk / "run" / "checkpoint").glob(".step-*")]
    text = log.read_text()
    faults += [f"the run ended with {codes}"] * (codes != [0, 0]) + [f"left behind: {left}"] * bool(left)
    faults += ["the last checkpoint was lost"] * (not kept) + [f"steps at the end: {steps}"] * (steps[-1:] != [STEPS])
    faults += ["the full disk was not reported"] * ("No space left on device. Training goes on" not in text)
    report(f"{mode}: {num_bytes / 1e6:.0f} MB filled the disk at step {at_step}, in a save; kept steps {kept}; "
           f"{text.count('was not saved')} saves failed on it; steps at the end {steps}")  # fmt: skip
    return faults


def job(folder: Path, mode: str) -> Job:
    options = {
        "training.steps": str(STEPS),
        "training.log_data_hash": "true",
        "checkpoint.interval": str(INTERVAL),
        "checkpoint.keep_latest_k": "1",  # a checkpoint has 20 MB, and there is the next one beside it
        "checkpoint.async_mode": mode,
    }
    return Job(folder, options)


def fill(path: Path) -> int:
    """Write until nothing more fits; the bytes written."""
    block = b"\0" * (1 << 16)
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(block) == len(block):
                pass
        except OSError:
            pass
    return path.stat().st_size


def main(argv: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Fill the disk in each mode; 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="disabled,async", help="checkpoint.async_mode, with commas")
    arguments = parser.parse_args(argv)
    preload()
    faults: list[str] = []
    for mode in arguments.mode.split(","):
        with tempfile.TemporaryDirectory() as folder:
            faults += run(Path(folder), mode, report)
    report("\n".join(faults) or "nothing lost: all steps there once, every number as on a large disk")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
