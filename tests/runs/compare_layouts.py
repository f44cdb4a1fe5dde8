"""Compare layouts over two devices with one device, from a trained checkpoint: losses, gradient norms, speed, memory.

    python -m tests.runs.compare_layouts --config configs/transformer_340M.json --folder exp/layouts

A checkpoint is trained first, on one device: from random weights even a context parallelism without any exchange moves
the loss by less than 0.01 and would pass. Then every layout trains on from it, optimizer state included, on the same
global batches at a constant learning rate. A layout passes with every loss within ``MAX_LOSS_DISTANCE`` of one device's
and every gradient norm within ``MAX_NORM_DISTANCE``.

Pipelines and context parallelism train short rows too, as they are and with a fault put in, which must be seen: of a
long row so few tokens lie near the border between two ranks that what they lose hardly moves the mean.

``--long`` also trains documents that fill a row of twice the length over two devices, and of the length on one.
Needs no network. The phases can be run one by one (``--phases``), so that several configs share two devices; runs that
are done are not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
from pathlib import Path

from tests.runs.harness import Job, train_all
from tests.runs.test_layouts import CP2, PP2, TP2

MAX_LOSS_DISTANCE, MAX_NORM_DISTANCE = 1e-2, 1e-2
FAULT_FACTOR = 5  # a fault moves the losses at least so many times further than a layout may
FIRST_TIMED = 5  # steps before it find kernels and fill caches
TWO = {"training.gradient_accumulation_steps": "2"}
SHORT = {
    "training.seq_len": "512",
    "training.context_len": "128",
    "training.gradient_accumulation_steps": "8",
    "training.steps": "10",
}
LAYOUTS = {"FSDP2": {}, "TP2": TP2 | TWO, "PP2": PP2 | TWO, "CP2": CP2 | TWO}
SHORT_LAYOUTS = {
    "PP2, short rows": (PP2, ""),
    "PP2, short rows, no boundaries": (PP2, "no_boundaries"),
    "CP2, short rows": (CP2, ""),
    "CP2, short rows, no exchange": (CP2, "no_exchange"),
}


class Comparison:
    """The jobs of one model config."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.folder = options.folder / options.config.stem

    def job(self, name: str, settings: dict[str, str], fault: str = "") -> Job:
        """A job of the comparison's model and text; ``name`` is that of its folder."""
        options = self.options
        common = {
            "model.config": str(options.config.resolve()),
            "optimizer.lr": str(options.lr),
            "optimizer.eps": "1e-8",
            "training.batch_size": "1",
            "training.seq_len": str(options.seq_len),
            "training.context_len": str(options.context_len),
            "training.steps": str(options.steps),
            "training.max_norm": "1.0",
            "training.mixed_precision_param": "auto",
            "training.num_workers": "2",
            "training.skip_nan_inf": "true",
            "checkpoint.enable_checkpoint": "false",
        }
        return Job(self.folder / name.replace(", ", "-").replace(" ", "_"), common | settings, fault)

    def checkpoint(self) -> None:
        """Train what the others start from, on rows of half the length."""
        steps, seq_len = self.options.checkpoint_steps, self.options.seq_len // 2
        settings = {
            "training.steps": str(steps),
            "training.seq_len": str(seq_len),
            "training.context_len": str(min(seq_len, self.options.context_len)),
            "lr_scheduler.warmup_steps": str(steps // 10),
            "checkpoint.enable_checkpoint": "true",
            "metrics.log_freq": "10",
        }
        self.train([self.job("checkpoint", settings)])

    def from_checkpoint(self) -> dict[str, str]:
        step = self.folder / "checkpoint" / "checkpoint" / f"step-{self.options.checkpoint_steps}"
        return {"checkpoint.initial_load_path": str(step), "checkpoint.initial_load_model_weights_only": "false"}

    def one(self) -> None:
        """One device: the batches of the layouts, half of them, which is what each of two devices has, short rows."""
        runs = {"one": TWO, "half": {}, "one, short rows": SHORT}
        self.train([self.job(name, self.from_checkpoint() | settings) for name, settings in runs.items()])

    def layouts(self) -> None:
        """Every layout over two devices, or those of ``--only``."""
        start = self.from_checkpoint()
        jobs = {name: self.job(name, start | settings) for name, settings in LAYOUTS.items()}
        for name, (how, fault) in SHORT_LAYOUTS.items():
            jobs[name] = self.job(name, start | SHORT | how, fault)
        chosen = [name.strip() for name in self.options.only.split(";") if name.strip()] or list(jobs)
        unknown = set(chosen) - set(jobs)
        if unknown:
            raise SystemExit(f"--only {'; '.join(sorted(unknown))}: not among {'; '.join(jobs)}")
        self.train([jobs[name] for name in chosen], world_size=2)

    def long_one(self) -> None:
        """One device with a document of the length."""
        self.train([self._long("long_one", self.options.seq_len, {})])

    def long_two(self) -> None:
        """Two devices that share a document of twice the length."""
        self.train([self._long("long_two", 2 * self.options.seq_len, CP2)], world_size=2)

    def train(self, jobs: list[Job], world_size: int = 1) -> None:
        """Run jobs, each in processes of its own; one that fails is reported, one that was done before is left out.

        NCCL has been seen to crash when a process sets up its groups a second time.
        """
        for job in jobs:
            if (job.folder / "done").exists():
                continue
            try:
                train_all([job], world_size, self.options.timeout)
                (job.folder / "done").touch()
            except AssertionError as failure:
                print(f"{job.folder.name} FAILED: {failure}", flush=True)

    def _long(self, name: str, length: int, more: dict[str, str]) -> Job:
        text = self.folder / "long.jsonl"
        if not text.exists():
            write_long_documents(text)
        data = {"training.dataset": str(text), "training.seq_len": str(length), "training.context_len": str(length)}
        return self.job(name, data | {"training.steps": "8"} | more)


def write_long_documents(path: Path, num_documents: int = 4) -> None:
    """Write rows of text that each hold Python's standard library once, from another file on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as rows:
        for index in range(num_documents):
            start = index * len(files) // num_documents
            text = "\n".join(file.read_text(encoding="utf-8") for file in files[start:] + files[:start])
            rows.write(json.dumps({"text": text}) + "\n")


def figures(job: Job, reference: Job | None) -> dict:
    """Speed and memory of a run, and its greatest distances from another's steps."""
    late = job.rows()[FIRST_TIMED:] or job.rows()
    result = {
        "tps": statistics.median(row["tps"] for row in late),
        "memory_gib": max(row["memory_gib"] for row in late),
        "losses": job.series("loss"),
        "grad_norms": job.series("grad_norm"),
    }
    if reference is not None:
        losses = zip(job.series("loss"), reference.series("loss"), strict=True)
        norms = zip(job.series("grad_norm"), reference.series("grad_norm"), strict=True)
        result["loss_distance"] = max(abs(a - b) for a, b in losses)
        result["norm_distance"] = max(abs(a / b - 1) for a, b in norms)
    return result


def collect(comparison: Comparison) -> dict[str, dict]:
    """The figures of all runs that there are, by name; a ``verdict`` where one is due."""
    references = dict.fromkeys(LAYOUTS, "one") | dict.fromkeys(SHORT_LAYOUTS, "one, short rows")
    results = {}
    for name in ("one", "half", "one, short rows", *references, "long_one", "long_two"):
        job = comparison.job(name, {})
        if not (job.folder / "done").exists():
            continue
        reference = references.get(name)
        results[name] = figures(job, comparison.job(reference, {}) if reference else None)
        if reference:
            results[name]["verdict"] = verdict(results[name], SHORT_LAYOUTS.get(name, ({}, ""))[1])
    return results


def verdict(result: dict, fault: str) -> str:
    """``passed`` or ``FAILED``: a layout agrees with one device, a fault is seen."""
    if fault:
        return "passed" if result["loss_distance"] >= FAULT_FACTOR * MAX_LOSS_DISTANCE else "FAILED"
    within = result["loss_distance"] <= MAX_LOSS_DISTANCE and result["norm_distance"] <= MAX_NORM_DISTANCE
    return "passed" if within else "FAILED"


def markdown(model: str, results: dict[str, dict]) -> str:
    """The table of a model; tok/s and memory are those of one device."""
    lines = [
        f"| {model} | largest loss distance | largest gradient norm distance | tok/s per GPU | peak memory | |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        distances = " | | "
        if "verdict" in result:
            distances = f" | {result['loss_distance']:.5f} | {result['norm_distance']:.2%} | "
        speed = f"{result['tps']:,.0f} | {result['memory_gib']:.1f} GiB"
        lines.append(f"| {name}{distances}{speed} | {result.get('verdict', '')} |")
    return "\n".join(lines)


PHASES = {
    "checkpoint": Comparison.checkpoint,
    "one": Comparison.one,
    "layouts": Comparison.layouts,
    "long_one": Comparison.long_one,
    "long_two": Comparison.long_two,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="a model config")
    parser.add_argument("--folder", type=Path, required=True, help="where the runs go, and figures.json of the model")
    parser.add_argument("--phases", default="", help=f"some of {','.join(PHASES)}; the first three when not given")
    parser.add_argument("--only", default="", help="layouts to run, with semicolons (default: all)")
    parser.add_argument("--long", action="store_true", help="the long documents too")
    parser.add_argument("--seq_len", type=int, default=65536)
    parser.add_argument("--context_len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint_steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run; kernels may need tuning first")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    os.environ.setdefault("FLA_CACHE_RESULTS", "1")  # what one phase has tuned, the next need not
    comparison = Comparison(options)
    names = options.phases or ",".join(list(PHASES)[: 5 if options.long else 3])
    for name in names.split(","):
        PHASES[name](comparison)
    results = collect(comparison)
    (comparison.folder / "figures.json").write_text(json.dumps(results, indent=1))
    print(markdown(options.config.stem, results))


if __name__ == "__main__":
    main()
