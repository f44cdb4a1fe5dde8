"""The loss curve and a summary of one or several runs: ``python -m flame.metrics.report <run folder> …``.

Needs nothing but ``metrics.jsonl``, and nothing beyond the standard library, so that it also works on a run in progress
and on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from flame.errors import EXIT_USER_ERROR, UserError
from flame.metrics.chart import Series, line_chart, number
from flame.metrics.console import format_duration
from flame.metrics.jsonl import FILE_NAME, read_rows
from flame.metrics.keys import is_finite_number

PICTURE_NAME = "loss.svg"
COMPARISON_NAME = "comparison.svg"  # of several runs; each keeps its own picture
NUM_LAST = 20  # the final loss is the mean over so many last steps: a single one scatters
LOSS_LABEL = "loss (nats per token)"
SMOOTHING = 40  # the smoothed line averages over one part in so many of the run


@dataclass(frozen=True)
class RunMetrics:
    """What a run logged: the rows of training steps and those of validations, both in order."""

    name: str
    steps: list[dict]
    validations: list[dict]

    def values(self, key: str) -> list[float]:
        """The finite numbers logged under ``key``."""
        return [row[key] for row in self.steps if is_finite_number(row.get(key))]

    def total(self, key: str) -> float:
        """The sum over all steps of a mean per step, such as ``step_time_s``."""
        total, last_step = 0.0, 0
        for row in self.steps:
            value = row.get(key)
            total += (value if is_finite_number(value) else 0.0) * (row["step"] - last_step)
            last_step = row["step"]
        return total


def main(argv: list[str] | None = None) -> int:
    """Draw and print. Returns the exit code: 0, or 2 when a run has nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m flame.metrics.report", description="Loss curve and summary")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder (holds metrics.jsonl)")
    parser.add_argument(
        "--output",
        help=f"SVG file to write (default: in the first run folder, {PICTURE_NAME}, or {COMPARISON_NAME} for several)",
    )
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="horizontal axis (default: step)")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.runs, args.output, args.x))
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def write_report(runs: list[str | Path], output: str | Path | None = None, x_key: str = "step") -> str:
    """Write the picture of the runs' losses and return their summaries as text.

    Args:
        runs: run folders.
        output: SVG file; in the first run folder ``loss.svg``, or ``comparison.svg`` of several, when not given.
        x_key: ``"step"`` or ``"tokens"``.

    Raises:
        UserError: a folder has no ``metrics.jsonl`` or no logged loss in it, or the picture cannot be written.
    """
    metrics = [load_metrics(run) for run in runs]
    name = PICTURE_NAME if len(runs) == 1 else COMPARISON_NAME
    output = Path(runs[0]) / name if output is None else Path(output)
    picture = draw_losses(metrics, x_key)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(picture, encoding="utf-8")
    except OSError as error:  # no such place, no permission, no room
        raise UserError(f"{output}: the loss curve cannot be written there: {error.strerror}") from error
    return "\n".join([*(summarize(run) for run in metrics), f"loss curve: {output}"])


def load_metrics(run: str | Path) -> RunMetrics:
    """Read a run folder's metrics.

    Raises:
        UserError: there are none, a line is damaged, or no row holds a finite loss.
    """
    path = Path(run) / FILE_NAME
    if not path.is_file():
        raise UserError(f"{run}: no {FILE_NAME} in there; give the folder that job.dump_folder named")
    try:
        rows = list(read_rows(path))
    except ValueError as error:
        raise UserError(f"{error}; mend or remove the line") from error
    name = Path(run).resolve().name
    steps, validations = ([row for row in rows if key in row] for key in ("loss", "val_loss"))
    if not any(is_finite_number(row["loss"]) for row in steps):
        raise UserError(f"{path}: no step with a finite loss is logged yet")
    return RunMetrics(name, steps, validations)


def draw_losses(runs: list[RunMetrics], x_key: str = "step") -> str:
    """SVG text with one line per run; a single run's validation losses, which have no token count, are a second one."""
    series = []
    for run in runs:
        x, y = _points(run.steps, x_key, "loss")
        window = max(len(y) // SMOOTHING, 1)
        series.append(Series(run.name if len(runs) > 1 else "training", final_loss(run), x, y, window))
    if len(runs) > 1:
        return line_chart(series, "Training loss", f"{len(runs)} runs", x_key, LOSS_LABEL)
    x, y = _points(runs[0].validations, x_key, "val_loss")
    if y:
        series.append(Series("validation", y[-1], x, y))
    return line_chart(series, "Training loss", describe(runs[0]), x_key, LOSS_LABEL)


def describe(run: RunMetrics) -> str:
    """Name, length and final loss in one line."""
    last = run.steps[-1]
    tokens = f", {number(last['tokens'])} tokens" if is_finite_number(last.get("tokens")) else ""
    return f"{run.name}: {last['step']:,} step{'s' * (last['step'] != 1)}{tokens}, final loss {final_loss(run):.3f}"


def final_loss(run: RunMetrics) -> float:
    """Mean of the finite losses logged over the last ``NUM_LAST`` steps, at least of the last one."""
    losses = [(row["step"], row["loss"]) for row in run.steps if is_finite_number(row["loss"])]
    last_step = losses[-1][0]
    return fmean(loss for step, loss in losses if step > last_step - NUM_LAST)


def summarize(run: RunMetrics) -> str:
    """A few lines for people: length, losses, speed, memory, gradient norm."""
    losses = run.values("loss")
    lowest = min((row for row in run.steps if is_finite_number(row["loss"])), key=lambda row: row["loss"])
    num_last = min(NUM_LAST, run.steps[-1]["step"])
    lines = [
        f"{describe(run)}, {format_duration(run.total('step_time_s'))} of training",
        f"  loss     {losses[0]:.4f} -> {final_loss(run):.4f} (mean of the last {num_last} steps), "
        f"lowest {lowest['loss']:.4f} at step {lowest['step']}",
    ]
    validations = [row["val_loss"] for row in run.validations if is_finite_number(row["val_loss"])]
    if validations:
        lines.append(f"  val      {validations[0]:.4f} -> {validations[-1]:.4f}, lowest {min(validations):.4f}")
    for title, key, form in SUMMARY_LINES:
        if values := run.values(key):
            lines.append(f"  {title:<8} " + form.format(median=median(values), max=max(values), last=values[-1]))
    return "\n".join(lines)


SUMMARY_LINES = (
    ("speed", "tps", "{median:,.0f} tokens/s per device (median)"),
    ("mfu", "mfu", "{median:.1%} (median)"),
    ("memory", "memory_gib", "{max:.2f} GiB peak"),
    ("data", "data_time_pct", "{median:.1f}% of the time spent waiting (median)"),
    ("grads", "grad_norm", "norm {median:.3f} (median), {max:.3f} (max)"),
    ("skipped", "skipped_steps", "{last:.0f} steps"),
)


def _points(rows: list[dict], x_key: str, y_key: str) -> tuple[list[float], list[float]]:
    points = [(row[x_key], row[y_key]) for row in rows if is_finite_number(row.get(y_key)) and x_key in row]
    return [x for x, _ in points], [y for _, y in points]


if __name__ == "__main__":
    sys.exit(main())
