"""Train a model config for some steps, with the training step that every run has, and print how fast it goes.

    python utils/benchmark.py --config configs/transformer_340M.json
    python utils/benchmark.py --config configs/gla_340M.json --cold --profile --json gla.json -- --training.compile

What stands after ``--`` are options of the job. Needs no network: the text is Python's own library, the tokenizer the
shipped one; ``--data random`` trains on made-up tokens instead, in documents as long as --context_len.

``--cold`` empties nothing of yours: it gives the run cache folders of its own, and runs a second time to see the first
step with them full. Speeds are medians over the steps from ``--skip`` on. ``--profile`` trains once more, a few steps
only, and lists the kernels of one of them and its longest idle gaps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, flame need not be installed

from flame.launch.caches import FOLDERS
from utils.arguments import count, output_file, positive
from utils.short_job import ROOT, card, commit, ending_with_us, job_options

FIRST_STEP = re.compile(r"first step done ([\d.]+) s after")
PROFILED_STEP = 10
NUM_KERNELS, NUM_GAPS = 25, 10
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # a profiler's categories
PACKAGES = ("torch", "triton", "flash-linear-attention", "transformers", "torchtitan", "torchao")


def job_arguments(options: argparse.Namespace, folder: Path, data: dict[str, Any], steps: int) -> list[str]:
    """The command line of a run: every step logged, nothing saved; the user's own options go before those of a file."""
    lengths = {"seq_len": options.seq_len, "context_len": options.context_len}
    job = job_options(options.config, folder, **lengths, steps=steps) | {
        "job.print_args": False,
        "lr_scheduler.warmup_steps": 10,
        "training.batch_size": options.batch_size,
        "training.num_workers": options.num_workers,
        "training.num_streams": 60,
        "metrics.enable_tensorboard": False,
    }
    file = folder.with_suffix(".toml")  # JSON's texts, numbers and booleans are TOML's
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in (job | data).items()))
    return ["--job.config_file", str(file), *options.job]


def train(arguments: list[str], environment: dict[str, str]) -> str:
    """Run one job through the launcher; its output.

    Raises:
        SystemExit: the job failed; shows the end of what it printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "flame.launch", *arguments],
        cwd=ROOT,
        env=os.environ | {"NGPU": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=ending_with_us(signal.SIGTERM),  # the launcher ends its ranks
    )
    if done.returncode:
        raise SystemExit(f"the job failed with exit code {done.returncode}:\n" + done.stdout[-3000:])
    return done.stdout


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The logged steps of a run, without its validations.

    Raises:
        SystemExit: there are none.
    """
    if not (folder / "metrics.jsonl").exists():
        raise SystemExit("the job trained nothing here: after -- leave job.dump_folder and job.dry_run out")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def summarise(rows: list[dict[str, Any]], skip: int, flops_ratio: float) -> dict[str, Any]:
    """The figures of a run.

    Args:
        rows: its metrics, one for each step.
        skip: how many steps at the beginning do not count.
        flops_ratio: FLOPs by torchtitan's convention ÷ the true ones.
    """
    late = rows[skip:]
    times = sorted(row["step_time_s"] for row in late)

    def median(key: str) -> float | None:
        values = [row[key] for row in late if row[key] is not None]
        return statistics.median(values) if values else None

    mfu = median("mfu")
    return {
        "steps": len(rows),
        "tokens_per_second": median("tps"),
        "step_time_s": statistics.median(times),
        "step_time_p95_s": times[min(int(0.95 * len(times)), len(times) - 1)],
        "mfu": mfu,
        "mfu_torchtitan": None if mfu is None else mfu * flops_ratio,
        "memory_gib": max(row["memory_gib"] or 0 for row in late),
        "data_time_pct": median("data_time_pct"),
        "first_loss": rows[0]["loss"],
        "last_loss": statistics.fmean(row["loss"] for row in rows[-5:]),
        "losses": [row["loss"] for row in rows],
    }


def torchtitan_ratio(config: Path, context_len: int) -> float:
    """FLOPs a token by torchtitan's convention ÷ those that flame counts, on documents of ``context_len`` tokens.

    Torchtitan counts 6 for every weight that is multiplied with, and every pair of tokens in attention, later ones too
    (``get_nparams_and_flops`` of its 0.2.2); what a recurrence computes besides has no place in it.
    """
    from flame.models import build_model, load_model_config
    from flame.models.backend import setup_backend
    from flame.models.flops import FlopCounter, flops_per_token

    setup_backend("reference", "cpu", "auto")
    section = SimpleNamespace(config=str(config), norm_type="", trust_remote_code=False)
    model = build_model(load_model_config(section), False).model
    counter = FlopCounter(model)
    per_pair = sum(mixer.per_pair for mixer in counter.mixers)
    return 3 * (counter.linear + per_pair * context_len) / flops_per_token(model, context_len)


def write_random_rows(folder: Path, context_len: int, num_rows: int = 512) -> None:
    """Rows of token ids, drawn evenly, each a document."""
    import numpy
    from datasets import Dataset

    draw = numpy.random.default_rng(0).integers
    Dataset.from_dict({"input_ids": [draw(4096, size=context_len).tolist() for _ in range(num_rows)]}).save_to_disk(
        str(folder)
    )


def kernels_of(trace: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of a profiler's trace by total time, those of one name together: name, calls, milliseconds."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in trace:
        if event.get("cat") == "kernel":
            times[event["name"]].append(event["dur"] / 1000)
    rows = [{"name": name, "calls": len(each), "ms": sum(each)} for name, each in times.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def idle_gaps_of(trace: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gaps between two operations in which the device was idle, the longest first: milliseconds, and the names."""
    events = sorted((event["ts"], event["dur"], event["name"]) for event in trace if event.get("cat") in ON_DEVICE)
    idle, end, last = [], 0.0, ""
    for start, duration, name in events:
        if last and start > end:
            idle.append({"ms": (start - end) / 1000, "after": last, "before": name})
        if start + duration > end:
            end, last = start + duration, name
    return sorted(idle, key=lambda row: -row["ms"])


def profile(options: argparse.Namespace, folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The kernels of one step, and the gaps between them in which the device was idle."""
    more = {"profiling.enable_profiling": True, "profiling.profile_freq": PROFILED_STEP}
    train(job_arguments(options, folder, data | more, PROFILED_STEP), {})
    (path,) = folder.glob("profile_traces/*/rank0_trace.json.gz")
    with gzip.open(path, "rt") as file:
        trace = json.load(file)["traceEvents"]
    return {"kernels": kernels_of(trace), "idle": idle_gaps_of(trace)}


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All that the options ask for."""
    data: dict[str, Any] = {}
    if options.data == "random":
        write_random_rows(scratch / "rows", options.context_len)
        data = {"training.dataset": str(scratch / "rows")}
    environment = {"FLA_CACHE_RESULTS": "1"}
    if options.cold:
        caches = scratch / "caches"
        data |= {"job.cache_dir": str(caches)}  # where the choice of an attention is remembered, too
        environment |= {name: str(caches / folder) for name, folder in FOLDERS.items()}  # the user's would go before it
    output = train(job_arguments(options, scratch / "run", data, options.steps), environment)
    rows = read_rows(scratch / "run")
    result = summarise(rows, min(options.skip, len(rows) - 1), torchtitan_ratio(options.config, options.context_len))
    seconds = float(FIRST_STEP.search(output)[1])
    result["first_step_cold_s" if options.cold else "first_step_s"] = seconds
    if options.cold:
        output = train(job_arguments(options, scratch / "warm", data, 2), environment)
        result["first_step_warm_s"] = float(FIRST_STEP.search(output)[1])
    if options.profile:
        result |= profile(options, scratch / "profiled", data)
    return result


def report(result: dict[str, Any]) -> str:
    """The figures as text, and the kernels as a table."""
    lines = [f"{name:20} {value:,.4g}" for name, value in result.items() if isinstance(value, int | float)]
    kernels = result.get("kernels", [])
    if kernels:
        total = sum(row["ms"] for row in kernels)
        lines += ["", f"kernels of one step, {total:.1f} ms in all", f"{'ms':>9} {'calls':>6}  name"]
        lines += [f"{row['ms']:9.2f} {row['calls']:6}  {row['name'][:100]}" for row in kernels[:NUM_KERNELS]]
        idle = result["idle"]
        total = sum(row["ms"] for row in idle)
        lines += [
            "",
            f"idle {total:.1f} ms in {len(idle)} gaps (the profiler slows the host down); the longest:",
        ]
        lines += [f"{row['ms']:9.2f}  {row['after'][:50]} -> {row['before'][:50]}" for row in idle[:NUM_GAPS]]
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="a model config")
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--skip", type=count, default=20, help="steps at the beginning that do not count")
    parser.add_argument("--batch_size", type=positive, default=1)
    parser.add_argument("--seq_len", type=positive, default=65_536, help="tokens of a packed row")
    parser.add_argument("--context_len", type=positive, default=4096, help="tokens of a document at most")
    parser.add_argument("--num_workers", type=count, default=2)
    parser.add_argument("--data", choices=("stdlib", "random"), default="stdlib")
    parser.add_argument(
        "--cold", action="store_true", help="time the first step with empty caches, then with full ones"
    )
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step, and its idle gaps")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    return parser


def main(arguments: list[str]) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = build_parser().parse_args(arguments[:at])
    options.job = arguments[at + 1 :]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = measure(options, scratch)
    origin = {
        "config": options.config.stem,
        "job": options.job,
        "card": card(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in PACKAGES},
    }
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(origin | result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
