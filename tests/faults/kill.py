"""``kill -9`` again and again: the run that survives it must be the one that was never disturbed.

    python -m tests.faults.kill --kills 50                 two ranks; every number equal bit for bit
    python -m tests.faults.kill --kills 16 --worlds 1,2,4  another number of ranks at each restart

Moments are drawn over steps, not over time, most of which is start-up: half of them within a save or a purge. The
killer is another process; what it hit is read from a board that the ranks write to.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flame.checkpoint.folders import list_steps
from tests.faults.forked import PHASES, SAVING, Group, preload
from tests.runs.harness import Job

INTERVAL = 4
# Of a rank's numbers; the others are times.
EXACT = ("step", "loss", "max_loss", "grad_norm", "lr", "tokens", "skipped_steps", "data_hash")
OTHERS_SECONDS = 30.0
# Eight held-out sequences behind every third step.
VALIDATED = {"validation.dataset": "builtin:stdlib", "validation.interval": "3", "validation.num_tokens": "512"}
NEW_LAYOUT_STEPS = 10


@dataclass
class Kill:
    """One kill: what was planned, and what was hit."""

    step: int
    in_save: bool
    victims: list[int]
    hit: list[str] = field(default_factory=list)
    at_step: int = 0
    survivors: list[int | None] = field(default_factory=list)


@dataclass
class Result:
    """What the kills did, and whether the run is what it would have been."""

    kills: list[Kill]
    faults: list[str]
    seconds: float
    largest_change: float = 0.0

    def histogram(self) -> dict[str, int]:
        """How many kills hit a rank in each phase; of several victims the first counts."""
        counts = Counter(kill.hit[0] for kill in self.kills)
        return {phase: counts[phase] for phase in PHASES if counts[phase]}

    @property
    def num_in_save(self) -> int:
        return sum(any(phase in SAVING for phase in kill.hit) for kill in self.kills)


class Killer:
    """Trains one job through many kills.

    Args:
        root: folder for the runs.
        steps: steps of the whole run.
        worlds: number of ranks of each attempt in turn.
        seed: of the moments.
        options: more of the job's.
    """

    def __init__(self, root: Path, steps: int, worlds: list[int], seed: int, options: dict[str, str]):
        self.root, self.steps, self.worlds, self.options = root, steps, worlds, options
        self.random = random.Random(seed)
        self.save_seconds = 0.05
        self.log = root / "log.txt"
        self.attempts = 0

    def run(self, num_kills: int) -> Result:
        """Kill ``num_kills`` times, let the rest of the run pass, and compare."""
        started = time.monotonic()
        whole, killed = self.root / "undisturbed", self.root / "killed"
        faults = self._finish(whole, self.worlds[0])
        done: list[Kill] = []
        largest = 0.0
        for number, kill in enumerate(self.plan(num_kills)):
            world = self.worlds[number % len(self.worlds)]
            before = self.worlds[(number - 1) % len(self.worlds)]
            start = newest_step(killed)
            reference = self._continued(killed, start, before) if start and before != world else []
            faults += self._attempt(killed, world, kill)
            done.append(kill)
            change, fault = compare_layouts(reference, rows_of(killed))
            largest, faults = max(largest, change), faults + fault
            show(number, kill, world, start)
        faults += self._finish(killed, self.worlds[num_kills % len(self.worlds)])
        exact = len(set(self.worlds)) == 1
        faults += compare_runs(rows_of(whole), rows_of(killed), self.steps, exact)
        held_out = (rows_of(folder, "val_loss") for folder in (whole, killed))
        faults += compare_validations(*held_out, exact)
        return Result(done, faults, time.monotonic() - started, largest)

    def plan(self, num_kills: int) -> list[Kill]:
        """Moments over the steps, in order; every other one in the save that is due at the step or after it."""
        if len(set(self.worlds)) > 1:  # leave each layout the steps that are compared
            room = self.steps // num_kills - NEW_LAYOUT_STEPS - INTERVAL
            assert room > 0, "more kills than the steps have room for"
            at = [n * (self.steps // num_kills) - self.random.randrange(room) for n in range(1, num_kills + 1)]
        else:
            # The last save is in reach of the last kill.
            at = sorted(self.random.randint(1, self.steps - INTERVAL - 1) for _ in range(num_kills))
        return [Kill(step, in_save=number % 2 == 1, victims=[]) for number, step in enumerate(at)]

    def _attempt(self, folder: Path, world: int, kill: Kill) -> list[str]:
        """Train until the moment has come, kill one rank or all, and see that the others end by themselves."""
        group = self._start(folder, world)
        part = self.random.choice((*SAVING, "write")) if kill.in_save else ""
        victim = 0 if part == "purge" else self.random.randrange(world)  # the others have nothing to remove
        kill.victims = list(range(world)) if self.random.random() < 0.3 else [victim]
        reached = group.wait_until(self._reaches(group, victim, kill.step), 300)
        if reached and kill.in_save and group.wait_until(lambda: group.board.phase(victim) == part, 60):
            time.sleep(self.random.random() * self.save_seconds if part == "write" else 0.0)
        elif reached:
            self._wait_within_step(group, victim)
        kill.hit = [group.board.phase(rank) for rank in kill.victims]
        kill.at_step = group.board.step(victim)
        group.kill(kill.victims)
        group.stop_rest(kill.victims)
        codes = group.wait(OTHERS_SECONDS)
        kill.survivors = [code for rank, code in enumerate(codes) if rank not in kill.victims]
        faults = [] if reached else [f"step {kill.step}: the run ended before it was killed, with {codes}"]
        return faults + [f"step {kill.step}: a rank went on without the others"] * (None in kill.survivors)

    def _reaches(self, group: Group, rank: int, step: int) -> Callable[[], bool]:
        """Whether a rank is at a step; meanwhile the time is taken that a save needs."""
        began: float | None = None

        def reaches() -> bool:
            nonlocal began
            if group.board.is_saving(rank):
                began = began or time.monotonic()
            elif began is not None:
                self.save_seconds, began = time.monotonic() - began, None
            return group.board.step(rank) >= step

        return reaches

    def _wait_within_step(self, group: Group, victim: int) -> None:
        """Wait for a part of a step, as long as the step before this one took."""
        began, step = time.monotonic(), group.board.step(victim)
        group.wait_until(lambda: group.board.step(victim) > step, 60)
        took, part = time.monotonic() - began, self.random.random()
        deadline = time.monotonic() + part * took
        group.wait_until(lambda: time.monotonic() > deadline, 60)

    def _continued(self, folder: Path, start: int, world: int) -> list[dict]:
        """The steps behind a checkpoint as the layout that wrote it would have trained them."""
        side = self.root / "continued"
        shutil.rmtree(side, ignore_errors=True)
        shutil.copytree(folder, side, ignore=shutil.ignore_patterns(".lock", ".step-*"))
        codes = self._start(side, world, steps=min(start + NEW_LAYOUT_STEPS, self.steps)).wait(300)
        assert codes == [0] * world, f"the old layout did not go on: {codes}, see {self.log}"
        return [row for row in rows_of(side) if row["step"] > start]

    def _finish(self, folder: Path, world: int) -> list[str]:
        codes = self._start(folder, world).wait(900)
        return [] if codes == [0] * world else [f"{folder.name} ended with {codes}, see {self.log}"]

    def _start(self, folder: Path, world: int, steps: int | None = None) -> Group:
        """An attempt; every other one saves in the background, and every other two have a data worker for each rank."""
        self.attempts += 1
        options = VALIDATED | {
            "training.steps": str(steps or self.steps),
            "training.gradient_accumulation_steps": str(max(self.worlds) // world),
            "training.log_data_hash": "true",
            "training.num_streams": "60",  # 4 ranks divide it
            "checkpoint.interval": str(INTERVAL),
            "checkpoint.keep_latest_k": "2",
            "checkpoint.async_mode": ("disabled", "async")[self.attempts % 2],
            "training.num_workers": str(self.attempts // 2 % 2),
        }
        return Group(Job(folder, options | self.options).argv, world, self.log)


def newest_step(folder: Path) -> int:
    """The newest complete checkpoint of a run, 0 when there is none."""
    return max(list_steps(folder / "checkpoint").complete, default=0)


def rows_of(folder: Path, key: str = "loss") -> list[dict]:
    """The whole rows of a run's metrics that hold the key: those of steps, or with ``val_loss`` of validations."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if key in row]


def compare_runs(whole: list[dict], killed: list[dict], steps: int, exact: bool) -> list[str]:
    """What is wrong with the rows of a run that was killed; without ``exact`` its layout has changed."""
    faults = []
    if [row["step"] for row in killed] != list(range(1, steps + 1)):
        faults.append(f"steps missing or doubled: {[row['step'] for row in killed]}")
    for left, right in zip(whole, killed, strict=False):
        keys = EXACT if exact else ("step", "tokens", "data_hash")
        faults += [f"step {left['step']}: {key} {left[key]} != {right[key]}" for key in keys if left[key] != right[key]]
    return faults


def compare_validations(whole: list[dict], killed: list[dict], exact: bool) -> list[str]:
    """What is wrong with the validations of a run that was killed; without ``exact`` its layout has changed."""
    steps = [[row["step"] for row in rows] for rows in (whole, killed)]
    if steps[0] != steps[1]:
        return [f"validations missing or doubled: {steps[1]}, not {steps[0]}"]
    pairs = ((left["step"], left["val_loss"], right["val_loss"]) for left, right in zip(whole, killed, strict=True))
    return [f"step {step}: val_loss {left} != {right}" for step, left, right in pairs if exact and left != right]


def compare_layouts(continued: list[dict], rows: list[dict]) -> tuple[float, list[str]]:
    """The largest difference of a loss between two layouts over the same steps, and what is above 1e-4."""
    losses = {row["step"]: row["loss"] for row in rows}
    changes = {row["step"]: abs(row["loss"] - losses[row["step"]]) for row in continued if row["step"] in losses}
    faults = [f"step {step}: the losses of the layouts differ by {c:.1e}" for step, c in changes.items() if c > 1e-4]
    return max(changes.values(), default=0.0), faults


def show(number: int, kill: Kill, world: int, start: int) -> None:
    where = " and ".join(f"rank {rank} in {phase}" for rank, phase in zip(kill.victims, kill.hit, strict=True))
    print(f"kill {number + 1}: {world} ranks from step {start}, at step {kill.at_step}: {where}", flush=True)


def main(argv: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Kill as the arguments say; 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--worlds", default="2", help="number of ranks of each attempt in turn, with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="keep the runs here; a temporary folder otherwise")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the job")
    arguments = parser.parse_args(argv)
    options = dict(each.split("=", 1) for each in arguments.set)
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        worlds = [int(world) for world in arguments.worlds.split(",")]
        result = Killer(folder, arguments.steps, worlds, arguments.seed, options).run(arguments.kills)
    report(f"{len(result.kills)} kills in {result.seconds:.0f} s, {result.num_in_save} of them in a save or a purge")
    for phase, count in result.histogram().items():
        report(f"  {phase:22}{count:4} {'#' * count}")
    if len(set(worlds)) > 1:
        report(
            f"largest difference of a loss within {NEW_LAYOUT_STEPS} steps of a restart: {result.largest_change:.1e}"
        )
    report("\n".join(result.faults) or "nothing lost: all steps there once, every number as in the undisturbed run")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
