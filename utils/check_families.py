"""Train each of some model configs for a few steps on one device and note whether it learns, and how fast.

    python utils/check_families.py --output gpu.json                                    # the 340M class, on a GPU
    python utils/check_families.py --output gpu.json --configs configs/gla_340M.json,configs/samba_1B.json
    python utils/family_table.py --merge gpu.json                                       # into docs/models.md

Needs no network: the text is Python's own library, the tokenizer the shipped one. Every config has a process of its own
and a time limit; the output file is rewritten after each, so that nothing is lost when the machine goes away, and
configs that it holds as passed are left out when the command is given again. A config passes when the mean of its last
five losses is at least 1 below its first loss.

Kernels are compiled and tuned at first use, for minutes a family. ``--warm_jobs 8`` does that ahead for several configs
at once, in short runs that share the device; compiled kernels and tuning results stay in Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, flame need not be installed

from flame.launch.exit_codes import USER_ERROR
from flame.launch.layout import free_port
from utils.family_table import read, save
from utils.short_job import ROOT, card, commit, ending_with_us, job_options

REFUSED = USER_ERROR
NUM_LAST, MIN_DROP = 5, 1.0  # steps at the end whose mean loss counts, and how far below the first it must be
WARM_SEQ_LEN, WARM_STEPS = 8192, 2


def default_configs() -> list[Path]:
    """The shipped configs of the 340M class, and the smallest one of families that have none."""
    names = ROOT.glob("configs/*.json")
    return sorted(path for path in names if re.search(r"_(340|400)M$|samba_1B$", path.stem, re.IGNORECASE))


def job_arguments(config: Path, folder: Path, options: argparse.Namespace, seq_len: int, steps: int) -> list[str]:
    """The command line of one run: packed documents, a short warm-up, then a constant learning rate."""
    lengths = {"seq_len": seq_len, "context_len": min(options.context_len, seq_len)}
    job = job_options(config, folder, **lengths, steps=steps) | {
        "optimizer.lr": options.lr,
        "lr_scheduler.warmup_steps": min(5, steps // 4),
        "training.num_workers": 1,
        "training.num_streams": 30,
    }
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in job.items()]


def train(arguments: list[str], log: Path, limit: float) -> int | None:
    """Run one job in a process of its own; the exit code, or None when the time limit ended it."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    environment |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flame.train", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # data workers and compilers go with it
            preexec_fn=ending_with_us(signal.SIGKILL),  # a step may take it minutes here
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def judge(code: int | None, rows: list[dict[str, Any]], log: str, limit: float, steps: int) -> dict[str, Any]:
    """The result of a run from its exit code, its rows of metrics.jsonl and its output."""
    losses = [row["loss"] for row in rows if "loss" in row]
    result: dict[str, Any] = {"steps": len(losses)}
    if losses:
        settled = rows[NUM_LAST:] or rows
        result |= {
            "first_loss": losses[0],
            "last_loss": statistics.fmean(losses[-NUM_LAST:]),
            "tokens_per_second": statistics.median(row["tps"] for row in settled),
            "memory_gib": max(row["memory_gib"] or 0 for row in rows),
            "first_step_s": rows[0]["step_time_s"],
        }
    if code is None:
        return result | {"state": "failed", "why": f"not done after {limit:.0f} s, {len(losses)} of {steps} steps"}
    if code != 0:
        return result | {"state": "refused" if code == REFUSED else "failed", "why": last_words(log)}
    if len(losses) != steps or result["last_loss"] > losses[0] - MIN_DROP:
        return result | {"state": "failed", "why": f"{len(losses)} of {steps} steps, the loss falls by less than 1"}
    return result | {"state": "passed"}


def last_words(log: str) -> str:
    """The last line of a log that says something, without its time stamp and colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|ERROR|Error", line)]
    return (errors or lines or ["no output"])[-1][-300:]


def check(config: Path, options: argparse.Namespace, seq_len: int, steps: int, logs: Path) -> dict[str, Any]:
    """Train one config and judge the run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "run", logs / f"{config.stem}.log"
        code = train(job_arguments(config, folder, options, seq_len, steps), log, options.time_limit)
        metrics = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return judge(code, rows, log.read_text(errors="replace"), options.time_limit, steps)


def warm_up(configs: list[Path], options: argparse.Namespace, logs: Path) -> None:
    """Fill Triton's cache by short runs, several at a time; what goes wrong shows in the real runs."""
    seq_len = min(WARM_SEQ_LEN, options.seq_len)
    with ThreadPoolExecutor(options.warm_jobs) as pool:
        list(pool.map(lambda config: check(config, options, seq_len, WARM_STEPS, logs), configs))


def main(arguments: list[str] | None = None) -> int:
    """Check the configs that the arguments name; the exit code is 0 when every one passed, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="results, JSON; goes on from what it holds")
    parser.add_argument("--configs", default="", help="model configs, comma-separated; empty for the 340M class")
    parser.add_argument("--seq_len", type=int, default=65_536, help="tokens of a step, packed")
    parser.add_argument("--context_len", type=int, default=4096, help="tokens of a document at most")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--time_limit", type=float, default=420, help="seconds for one run")
    parser.add_argument(
        "--warm_jobs", type=int, default=0, help="short runs at a time that fill the kernel cache first"
    )
    parser.add_argument("--commit", default=commit(), help="what is being checked")
    options = parser.parse_args(arguments)
    configs = [Path(name) for name in options.configs.split(",") if name] or default_configs()

    results = read(options.output)
    todo = [config for config in configs if results["gpu"].get(config.stem, {}).get("state") != "passed"]
    logs = options.output.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    if options.warm_jobs:
        start = time.monotonic()
        warm_up(todo, options, logs)
        print(f"kernels compiled and tuned in {time.monotonic() - start:.0f} s", flush=True)
    origin = {"card": card(), "commit": options.commit, "seq_len": options.seq_len}
    for config in todo:
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        result = check(config, options, options.seq_len, options.steps, logs)
        results["gpu"][config.stem] = result | origin | {"date": date}
        save(options.output, results)
        print(config.stem, json.dumps(result), flush=True)
    return 0 if all(results["gpu"][config.stem]["state"] == "passed" for config in configs) else 1


if __name__ == "__main__":
    sys.exit(main())
