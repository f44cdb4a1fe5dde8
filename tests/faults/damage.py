"""Every file of a checkpoint removed, cut short and with flipped bits: found, and the checkpoint before it is used.

python -m tests.faults.damage --flips 20
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from flame.checkpoint.manager import CheckpointManager
from tests.faults.forked import Group, preload
from tests.faults.kill import compare_runs, rows_of
from tests.runs.harness import Job

INTERVAL = 4


def damages(content: bytes, num_flips: int, choose: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Ways to damage a file: what is done, and the content then (None: no file)."""
    yield "removed", None
    for length in {0, 1, len(content) // 2, len(content) - 1}:
        yield "cut short", content[:length]
    yield "made longer", content + b"\0"
    for _ in range(num_flips):
        damaged, bit = bytearray(content), choose.randrange(8 * len(content))
        damaged[bit // 8] ^= 1 << bit % 8
        yield "one bit flipped", bytes(damaged)


def damage_each(root: Path, num_flips: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Damage each file of the newest checkpoint in turn; how often in which way, and what was not found."""
    choose, counts, missed = random.Random(seed), Counter(), []
    manager = CheckpointManager(root)
    *_, before, newest = manager.steps()
    for path in sorted((root / f"step-{newest}").iterdir()):
        content = path.read_bytes()
        for kind, damaged in damages(content, num_flips, choose):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            counts[kind] += 1
            if manager.latest() != before:
                missed.append(f"{path.name} {kind}: not found")
            path.write_bytes(content)
    assert manager.latest() == newest
    return counts, missed


def run(root: Path, num_flips: int, seed: int, report: Callable[[str], None]) -> list[str]:
    """Damage the checkpoints of a run of two ranks, and let it go on from the one before; what went wrong."""
    whole, damaged = root / "undisturbed", root / "damaged"
    train(whole, 3 * INTERVAL, root)
    train(damaged, 2 * INTERVAL, root)
    logging.disable(logging.WARNING)  # each damage is reported; those below are counted
    counts, faults = damage_each(damaged / "checkpoint", num_flips, seed)
    logging.disable(logging.NOTSET)
    report(f"{sum(counts.values())} damages to {len(list((damaged / 'checkpoint' / 'step-8').iterdir()))} files: "
           + ", ".join(f"{count} {kind}" for kind, count in counts.items()))  # fmt: skip
    shard = next((damaged / "checkpoint" / f"step-{2 * INTERVAL}").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    train(damaged, 3 * INTERVAL, root)
    if f"passed over {damaged}/checkpoint/step-8" not in (root / "log.txt").read_text():
        faults.append("the broken checkpoint was not named")
    return faults + compare_runs(rows_of(whole), rows_of(damaged), 3 * INTERVAL, exact=True)


def train(folder: Path, steps: int, root: Path) -> None:
    options = {
        "training.steps": str(steps),
        "training.log_data_hash": "true",
        "checkpoint.interval": str(INTERVAL),
    }
    codes = Group(Job(folder, options).argv, 2, root / "log.txt").wait(300)
    assert codes == [0, 0], (root / "log.txt").read_text()[-3000:]


def main(argv: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Damage as the arguments say; 0 when all was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=20, help="bits flipped in each file, one at a time")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    preload()
    with tempfile.TemporaryDirectory() as folder:
        faults = run(Path(folder), arguments.flips, arguments.seed, report)
    report("\n".join(faults) or "each was found, the checkpoint before it used, and the run went on from there exactly")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
