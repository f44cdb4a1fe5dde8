"""Run the measurements of a plan on the devices of one machine, side by side where they need not share one.

    python utils/measure.py utils/measurements/layouts.toml --output exp/figures --seconds 570

A plan is a TOML file with a table for each measurement::

    [gla]
    command = "python utils/benchmark.py --config configs/gla_340M.json --json {output}/gla.json"
    gpus = 1              # devices it has for itself; 0 for one that computes on the host
    after = ["warm"]      # measurements that must have ended, well or not
    seconds = 200         # its time limit

They start in the plan's order, each as soon as it has its devices. A command runs by bash in the checkout, with
``{output}`` for the folder of all figures; what it prints goes to ``{name}.log`` there. When ``--seconds`` are over,
all that runs is ended. ``summary.json`` says how each ended and how long it took; measurements that it holds as done
are left out when the command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1
KILL_SECONDS = 5.0  # from the signal that asks a measurement to end to the one that makes it


@dataclass
class Measurement:
    """One table of a plan."""

    name: str
    command: str
    gpus: int = 1
    after: list[str] = field(default_factory=list)
    seconds: float = 600


@dataclass
class Running:
    """A measurement under way."""

    measurement: Measurement
    process: subprocess.Popen
    devices: list[int]
    start: float


def read_plan(path: Path) -> list[Measurement]:
    """The measurements of a plan.

    Raises:
        SystemExit: names what is wrong with the plan.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot be read as TOML: {error}") from error
    known = set(Measurement.__dataclass_fields__) - {"name"}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SystemExit(f"{path}: {name} stands outside a table; a plan has tables only")
        wrong = sorted(set(table) - known) + ["command"] * ("command" not in table)
        wrong += [f"after {other}" for other in table.get("after", []) if other not in tables]
        if wrong:
            raise SystemExit(f"{path}: [{name}]: unknown or missing: {', '.join(wrong)}; it takes {sorted(known)}")
    plan = [Measurement(name, **table) for name, table in tables.items()]
    for one in plan:
        if type(one.gpus) is not int or one.gpus < 0 or type(one.seconds) not in (int, float) or not one.seconds > 0:
            raise SystemExit(f"{path}: [{one.name}]: gpus is a whole number from 0 on, seconds a number above 0")
    _check_order(path, plan)
    return plan


def _check_order(path: Path, plan: list[Measurement]) -> None:
    try:
        TopologicalSorter({one.name: one.after for one in plan}).prepare()
    except CycleError as error:
        raise SystemExit(f"{path}: none of these could start: {' after '.join(reversed(error.args[1]))}") from error


class Measuring:
    """The course of a plan.

    Args:
        output: folder for figures, logs and the summary.
        devices: numbers of the devices.
        deadline: by ``time.monotonic()``.
    """

    def __init__(self, output: Path, devices: list[int], deadline: float):
        self.output, self.free, self.deadline = output, list(devices), deadline
        self.running: list[Running] = []
        self.summary_file = output / "summary.json"
        self.summary: dict[str, dict] = {}
        if self.summary_file.exists():
            try:
                before = json.loads(self.summary_file.read_text(encoding="utf-8"))
                self.summary = {name: end for name, end in before.items() if end["result"] == "done"}
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise SystemExit(f"{self.summary_file}: is damaged; remove it to measure all again") from error

    def run(self, plan: list[Measurement]) -> None:
        """Run what is not done yet; returns when all have ended or the time is over."""
        waiting = [measurement for measurement in plan if measurement.name not in self.summary]
        try:
            while (waiting or self.running) and time.monotonic() < self.deadline:
                for measurement in list(waiting):
                    if self._can_start(measurement, waiting):
                        waiting.remove(measurement)
                        self._start(measurement)
                self._collect()
                time.sleep(POLL_SECONDS)
        finally:
            for one in list(self.running):
                self._stop(one, "out of time")
            for measurement in waiting:
                self._note(measurement.name, "not started", 0.0)

    def _can_start(self, measurement: Measurement, waiting: list[Measurement]) -> bool:
        open_names = {one.name for one in waiting} | {one.measurement.name for one in self.running}
        return measurement.gpus <= len(self.free) and not open_names.intersection(measurement.after)

    def _start(self, measurement: Measurement) -> None:
        devices = [self.free.pop(0) for _ in range(measurement.gpus)]
        with (self.output / f"{measurement.name}.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", measurement.command.replace("{output}", str(self.output))],
                cwd=ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children end with it
            )
        self.running.append(Running(measurement, process, devices, time.monotonic()))

    def _collect(self) -> None:
        for one in list(self.running):
            code = one.process.poll()
            if code is not None:
                self._end(one, "done" if code == 0 else f"exit code {code}")
            elif time.monotonic() - one.start > one.measurement.seconds:
                self._stop(one, f"longer than {one.measurement.seconds:g} s")

    def _stop(self, one: Running, result: str) -> None:
        """End a measurement and all its processes: they are asked to, and made to when they do not."""
        _signal_group(one.process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(KILL_SECONDS)
        self._end(one, result)

    def _end(self, one: Running, result: str) -> None:
        _signal_group(one.process, signal.SIGKILL)
        one.process.wait()
        self.running.remove(one)
        self.free = sorted(self.free + one.devices)
        self._note(one.measurement.name, result, time.monotonic() - one.start)

    def _note(self, name: str, result: str, seconds: float) -> None:
        self.summary[name] = {"result": result, "seconds": round(seconds, 1)}
        self.summary_file.write_text(json.dumps(self.summary, indent=1), encoding="utf-8")
        print(f"{name}: {result}, {seconds:.0f} s", flush=True)


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def python_path() -> str:
    """Where commands find flame without its being installed."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def count_gpus() -> int:
    """GPUs of this machine; asked in a process of its own, so that this one holds none."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="a TOML file")
    parser.add_argument("--output", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--seconds", type=float, default=86_400, help="time limit of all together (default: a day)")
    parser.add_argument("--only", default="", help="some of the measurements, with commas (default: all)")
    parser.add_argument("--gpus", type=int, help="number of devices (default: all of the machine)")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    plan = read_plan(options.plan)
    chosen = [name for name in options.only.split(",") if name] or [measurement.name for measurement in plan]
    unknown = set(chosen) - {measurement.name for measurement in plan}
    if unknown:
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: not in {options.plan}")
    num_gpus = count_gpus() if options.gpus is None else options.gpus
    plan = [measurement for measurement in plan if measurement.name in chosen]
    for measurement in plan:
        if measurement.gpus > num_gpus:
            print(f"{measurement.name}: left out, wants {measurement.gpus} of {num_gpus} devices", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    measuring = Measuring(options.output.resolve(), list(range(num_gpus)), deadline)
    measuring.run([measurement for measurement in plan if measurement.gpus <= num_gpus])
    return 0 if all(end["result"] == "done" for end in measuring.summary.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
