"""SIGTERM and SIGUSR1 again and again, to the launcher, to torchrun and to a rank: no step lost, no process left.

    python -m tests.faults.signals --terms 20 --usr1s 10

Each attempt is a real one with two ranks and a data worker each; a fifth of the signals come while it starts.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flame.launch import exit_codes
from flame.launch.layout import free_port
from tests.faults.kill import VALIDATED, compare_runs, compare_validations, newest_step, rows_of
from tests.runs.harness import ROOT, Job, user_environment

TARGETS = ("bash train.sh", "torchrun", "a rank")
LIMIT_SECONDS = 30.0
RANKS = 2
# torchrun dies of SIGUSR1 unless told to hand it on.
TORCHRUN = ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", f"--nproc-per-node={RANKS}"]


@dataclass
class Attempt:
    """One signal: what it was sent to and when, and what became of the run."""

    number: signal.Signals
    target: str
    steps: int
    code: int
    seconds: float

    def __str__(self) -> str:
        when = f"after {self.steps} steps" if self.steps else "while it starts"
        return f"{self.number.name} to {self.target} {when}: exit code {self.code} after {self.seconds:.1f} s"


class Signaller:
    """Trains one job through many signals.

    Args:
        root: folder for the run.
        seed: of the moments.
    """

    def __init__(self, root: Path, seed: int):
        self.folder = root / "signalled"
        self.log = (root / "log.txt").open("ab")
        self.random = random.Random(seed)
        self.start_seconds = 10.0

    def run(self, numbers: list[signal.Signals], minutes: float, report: Callable[[str], None]) -> list[str]:
        """Send each signal to an attempt of its own, as many as begin within the time; what went wrong."""
        faults: list[str] = []
        deadline = time.monotonic() + 60 * minutes
        for count, number in enumerate(numbers):
            if time.monotonic() > deadline:
                report(f"{count} of {len(numbers)} signals sent, the time is over")
                break
            attempt, fault = self._attempt(number, TARGETS[count % len(TARGETS)], while_starting=count % 5 == 4)
            report(str(attempt))
            faults += [f"{attempt}: {each}" for each in fault]
        return faults

    def finish(self, steps: int) -> list[str]:
        """Train to ``steps``, and compare with a run of as many that was not disturbed."""
        undisturbed = self.folder.with_name("undisturbed")
        for folder in (self.folder, undisturbed):
            process = self._start(folder, "bash train.sh", steps)
            if process.wait(900) != exit_codes.OK:
                return [f"{folder.name} ended with {process.returncode}, see {self.log.name}"]
        faults = compare_runs(rows_of(undisturbed), rows_of(self.folder), steps, exact=True)
        held_out = (rows_of(folder, "val_loss") for folder in (undisturbed, self.folder))
        return faults + compare_validations(*held_out, exact=True)

    def _attempt(self, number: signal.Signals, target: str, while_starting: bool) -> tuple[Attempt, list[str]]:
        before = last_step(self.folder)
        began = time.monotonic()
        process = self._start(self.folder, target)
        if while_starting:
            time.sleep(self.random.random() * self.start_seconds)
        else:
            goal = before + self.random.randint(1, 6)
            wait_until(lambda: last_step(self.folder) >= goal or process.poll() is not None)
            self.start_seconds = time.monotonic() - began
            time.sleep(self.random.random() * 0.3)
        sent = time.monotonic()
        with suppress(ProcessLookupError):  # it has ended, with a code that is wrong
            os.kill(self._receiver(process, target), number)
        code = process.wait(LIMIT_SECONDS + 30)
        seconds = time.monotonic() - sent
        last = last_step(self.folder)
        attempt = Attempt(number, target, last - before, code, seconds)
        return attempt, self._faults(attempt, last)

    def _faults(self, attempt: Attempt, last: int) -> list[str]:
        # torchrun itself ends with 1, whatever the ranks return.
        allowed = {exit_codes.PREEMPTED, exit_codes.CRASH} if attempt.target == "torchrun" else {exit_codes.PREEMPTED}
        faults = [] if attempt.code in allowed else ["the exit code is wrong"]
        if attempt.seconds > LIMIT_SECONDS:
            faults.append("it took too long")
        if newest_step(self.folder) != last:
            faults.append(f"step {last} was trained, step {newest_step(self.folder)} is saved")
        if not wait_until(lambda: not processes_of(self.folder), 10):
            faults.append(f"processes are left: {processes_of(self.folder)}")
            for process in processes_of(self.folder):
                os.kill(process, signal.SIGKILL)
        return faults

    def _receiver(self, process: subprocess.Popen, target: str) -> int:
        """The process that a signal goes to; the launcher while there is no rank yet."""
        ranks = [each for each in processes_of(self.folder) if parent_of(each) == process.pid]
        return self.random.choice(ranks) if target == "a rank" and ranks else process.pid

    def _start(self, folder: Path, target: str, steps: int = 100_000) -> subprocess.Popen:
        options = VALIDATED | {
            "training.steps": str(steps),
            "training.num_workers": "1",
            "training.log_data_hash": "true",
            "checkpoint.interval": "3",
            "checkpoint.keep_latest_k": "2",
        }
        argv = Job(folder, options).argv
        if target == "torchrun":
            rendezvous = [f"--master-port={free_port()}"]
            command = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN, *rendezvous, "-m", "flame.train"]
        else:
            command = ["bash", str(ROOT / "train.sh")]
        environment = user_environment(NGPU=str(RANKS))
        return subprocess.Popen([*command, *argv], cwd=ROOT, env=environment, stdout=self.log, stderr=subprocess.STDOUT)


def last_step(folder: Path) -> int:
    """The newest step in a run's metrics, 0 before there is one."""
    rows = rows_of(folder)
    return rows[-1]["step"] if rows else 0


def processes_of(folder: Path) -> list[int]:
    """The processes that have the folder in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # A process that has ended and waits for its parent has an empty one.
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [process for process in found if process != os.getpid()]


def parent_of(process: int) -> int:
    """The parent of a process, 0 when it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def wait_until(condition: Callable[[], bool], timeout: float = 300.0) -> bool:
    """Wait for a condition; whether it came in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str] | None = None, report: Callable[[str], None] = say) -> int:
    """Send as many signals as the arguments say; 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("--usr1s", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="keep the runs here; a temporary folder otherwise")
    arguments = parser.parse_args(argv)
    numbers = [signal.SIGTERM] * arguments.terms + [signal.SIGUSR1] * arguments.usr1s
    random.Random(arguments.seed).shuffle(numbers)
    root = Path(arguments.folder or tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    signaller = Signaller(root, arguments.seed)
    faults = signaller.run(numbers, arguments.minutes, report)
    faults += signaller.finish(last_step(signaller.folder) + 3)
    report("\n".join(faults) or "no step lost, none doubled, every number as in an undisturbed run, no process left")
    if not arguments.folder and not faults:
        shutil.rmtree(root)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
