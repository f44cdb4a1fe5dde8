"""``python -m flame.utils.warmup --job.config_file …``: have a job's kernels compiled and tuned before it starts.

One step of the job is trained, by the launcher and with the training step of every run, on made-up tokens: nothing is
read but the model config and the tokenizer, and nothing is kept but the caches.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from flame.cli.parse import parse_args, to_toml
from flame.config import JobConfig, Training, Validation
from flame.dry_run.command import is_dry
from flame.errors import EXIT_USER_ERROR, UserError
from flame.launch.caches import inductor_cache, set_up_caches, triton_cache

DESCRIPTION = """\
Compile and tune the kernels of a job ahead of it, with NGPU processes like the job itself.
It takes the options of the job (--section.name, see `bash train.sh -h`); job.cache_dir says where the results go."""
NUM_ROWS = 64
LONGEST_ROW = 4096  # tokens; that a job's documents are longer changes no kernel


def main(argv: list[str] | None = None) -> int:
    """Warm up as the arguments say; the exit code is 0, 2 when the user must change something, or that of the run."""
    _, job_argv = build_parser().parse_known_args(argv)
    try:
        config = parse_args(job_argv)
        if is_dry(config):
            raise UserError(
                "job.dry_run and memory_estimation.enabled train nothing; a warm-up trains a step: leave them out"
            )
        set_up_caches(config.job.cache_dir, os.environ)
        before, start = read_caches(), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="flame_warmup_") as folder:
            code = train_one_step(config, Path(folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    if code == 0:
        print("\n".join(report(before, read_caches(), time.monotonic() - start)), flush=True)
    return code


def build_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="python -m flame.utils.warmup", description=DESCRIPTION, allow_abbrev=False)


def train_one_step(config: JobConfig, folder: Path) -> int:
    """Train a step of the job on rows of random tokens in ``folder``; the launcher's exit code."""
    from flame.launch.launcher import main as launch

    write_rows(folder / "rows.jsonl", min(config.training.context_len, LONGEST_ROW))
    shorten(config, folder)
    job = folder / "job.toml"
    job.write_text(to_toml(config), encoding="utf-8")
    return launch(["--job.config_file", str(job)])


def shorten(config: JobConfig, folder: Path) -> None:
    """Make it one step on the rows, in place, that saves and shows nothing."""
    defaults = Training()
    for name in ("dataset_name", "dataset_split", "data_dir", "data_files", "data_probs", "streaming", "text_column"):
        setattr(config.training, name, getattr(defaults, name))
    config.training.dataset = [str(folder / "rows.jsonl")]
    config.validation = Validation()
    config.training.steps, config.training.max_epochs, config.training.num_workers = 1, 0, 0
    config.lr_scheduler.warmup_steps = 0
    config.job.dump_folder = str(folder / "run")
    config.job.sample_prompt, config.job.description, config.job.print_args = "", "", False
    config.checkpoint.enable_checkpoint = config.checkpoint.export_hf = False
    config.checkpoint.create_seed_checkpoint, config.checkpoint.initial_load_path = False, ""
    config.checkpoint.load_step = -1
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.profiling.enable_profiling = config.profiling.enable_memory_snapshot = False


def write_rows(path: Path, longest: int) -> None:
    """Documents of all lengths up to about ``longest`` tokens, of random words."""
    draw = random.Random(0)
    lengths = [longest * number // NUM_ROWS + 1 for number in range(1, NUM_ROWS + 1)]
    with open(path, "w", encoding="utf-8") as file:
        for length in lengths:
            words = (f"{draw.randrange(10**4)}" for _ in range(length))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


@dataclass(frozen=True)
class Caches:
    """What is in the caches: files of compiled kernels, of tuning results and of compiled graphs."""

    kernels: frozenset[Path]
    results: frozenset[Path]
    graphs: frozenset[Path]


def read_caches() -> Caches:
    """The caches that the environment names, or where the libraries keep them."""
    triton = triton_cache(os.environ)
    return Caches(
        frozenset(triton.glob("*/*.cubin")),
        frozenset(triton.glob("*/*.autotune.json")),
        frozenset(inductor_cache(os.environ).glob("fxgraph/*/*/*")),
    )


def report(before: Caches, after: Caches, seconds: float) -> list[str]:
    """What was added to the caches, in words, with the chosen candidate of each kernel that was tuned."""
    kernels, results = after.kernels - before.kernels, after.results - before.results
    graphs = after.graphs - before.graphs
    if not kernels | results | graphs:
        return [f"nothing to do: what this job needs is there already ({seconds:.0f} s)"]
    lines = [
        f"{len(kernels)} kernels compiled, {len(results)} tuned, {len(graphs)} graphs compiled in {seconds:.0f} s",
        *(f"  {line}" for line in sorted(map(describe, results))),
    ]
    return [*lines, *(f"  {name}: {number} compiled" for name, number in _untuned(kernels, results))]


def describe(path: Path) -> str:
    """A tuning result in words: the kernel, the key, the candidate chosen and its time."""
    result = json.loads(path.read_text())
    config, times = min(result["configs_timings"], key=lambda entry: entry[1])
    options = {**config["kwargs"], "num_warps": config["num_warps"], "num_stages": config["num_stages"]}
    chosen = ", ".join(f"{name} {value}" for name, value in options.items())
    name = path.name.removesuffix(".autotune.json")
    return f"{name}: {chosen}: {times[0]:.3f} ms, of {len(result['configs_timings'])} candidates"


def _untuned(kernels: frozenset[Path], results: frozenset[Path]) -> list[tuple[str, int]]:
    tuned = {path.name.removesuffix(".autotune.json") for path in results}
    return sorted(Counter(path.stem for path in kernels if path.stem not in tuned).items())


if __name__ == "__main__":
    sys.exit(main())
