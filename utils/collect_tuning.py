"""Merge what Triton has tuned on this machine's GPU into the results that ship with flame (flame/models/tuned.py).

    python utils/collect_tuning.py --cache cache/triton

``--cache`` are folders that Triton has kept its results in: ``TRITON_CACHE_DIR`` of a run, or ``triton`` in its
``job.cache_dir``. A run takes shipped results before it tunes, so that to measure anew the run needs
``--job.no-shipped_tuning``. Results for the same arguments are replaced, others stay.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, flame need not be installed

from flame.errors import UserError  # noqa: E402
from flame.models.tuned import FOLDER, describe, key_text, read_results  # noqa: E402
from flame.utils.parts import write_whole  # noqa: E402

PACKAGES = ("triton", "flash-linear-attention")


def read_cache(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The results in a cache folder of Triton's: kernel -> its entries, oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("*.autotune.json"), key=lambda path: path.stat().st_mtime_ns):
        result = json.loads(path.read_text(encoding="utf-8"))
        timed = [(SimpleNamespace(**config), times[0]) for config, times in result["configs_timings"]]
        fastest, milliseconds = min(timed, key=lambda pair: pair[1], default=(None, math.inf))
        if not math.isfinite(milliseconds):  # no candidate could be launched
            continue
        entry = {"key": result["key"], "fastest": describe(fastest), "ms": round(milliseconds, 4), "of": len(timed)}
        found.setdefault(path.name.removesuffix(".autotune.json"), []).append(entry)
    return found


def merge(old: dict[str, list[dict]], new: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """The entries of both, the last one where the arguments are the same; in the order of the arguments."""
    merged = {}
    for name in sorted(old.keys() | new.keys()):
        entries = {key_text(entry["key"]): entry for entry in [*old.get(name, []), *new.get(name, [])]}
        merged[name] = [entries[key] for key in sorted(entries)]
    return merged


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each entry."""
    kernels = []
    for name, entries in content["kernels"].items():
        lines = ",\n  ".join(json.dumps(entry) for entry in entries)
        kernels.append(f" {json.dumps(name)}: [\n  {lines}\n ]")
    return f'{{"measured": {json.dumps(content["measured"])},\n"kernels": {{\n' + ",\n".join(kernels) + "\n}}\n"


def read_kernels(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The entries of a file that this program has written; none without it."""
    try:
        read_results(path)  # checks it
    except UserError as error:
        raise SystemExit(str(error).split("; restore")[0]) from error
    return json.loads(path.read_text(encoding="utf-8"))["kernels"] if path.exists() else {}


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process that calls this works in a folder, and keep others waiting meanwhile."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, nargs="+", required=True, help="folders that Triton keeps its results in")
    parser.add_argument("--arch", type=int, help="compute capability, such as 90 (default: that of the GPU here)")
    parser.add_argument("--card", help="its name (default: that of the GPU here)")
    parser.add_argument("--output", type=Path, help=f"the file to merge into (default: {FOLDER}/sm_ARCH.json)")
    options = parser.parse_args(arguments)
    missing = [str(folder) for folder in options.cache if not folder.is_dir()]
    if missing:
        raise SystemExit(f"--cache {' '.join(missing)}: no such folder")
    arch, card = options.arch, options.card
    if arch is None or card is None:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("there is no GPU here; say with --arch and --card which one tuned these kernels")
        major, minor = torch.cuda.get_device_capability()
        arch, card = arch or 10 * major + minor, card or torch.cuda.get_device_name()
    path = options.output or FOLDER / f"sm_{arch}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {"card": card, "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    measured |= {name: version(name) for name in PACKAGES}
    with alone_in(path.parent):
        old = read_kernels(path)
        kernels = old
        for folder in options.cache:
            kernels = merge(kernels, read_cache(folder))
        with write_whole(path) as unfinished:  # a run may be reading it
            unfinished.write_text(as_text({"measured": measured, "kernels": kernels}), encoding="utf-8")
    count = sum(map(len, kernels.values()))
    print(f"{path}: {count} results of {len(kernels)} kernels, {count - sum(map(len, old.values()))} more than before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
