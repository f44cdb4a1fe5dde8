"""``python -m flame.utils.describe --model.config … [--lengths 2048,65536] [--json]``: a model on paper.

Nothing is allocated: the model is built on the meta device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flame.cli.parse import parse_args
from flame.errors import UserError
from flame.utils.commands import run_command

if TYPE_CHECKING:
    from flame.models.summary import Summary

DESCRIPTION = """\
Print a model's layers, parameters by part, training FLOPs per token at given document lengths, and memory.
Besides the options below it takes those of the model (--model.config and others, see `bash train.sh -h`)."""
_PART_NAMES = {"mixers": "token mixers", "mlp": "MLP"}


def main(argv: list[str] | None = None) -> int:
    """Print as the arguments say; the exit code is 0, or 2 when the user must change something."""
    arguments, job_argv = build_parser().parse_known_args(argv)

    def command() -> str:
        summary = load_summary(job_argv, read_lengths(arguments.lengths))
        return json.dumps(summary.as_dict(), indent=2) if arguments.json else "\n".join(lines_of(summary))

    return run_command(command, {})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flame.utils.describe", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--lengths", default="2048,65536", help="document lengths in tokens, comma-separated (default: 2048,65536)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def read_lengths(text: str) -> list[int]:
    """Lengths from ``2048,65536``; raises UserError for what is no positive number."""
    try:
        lengths = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(f"--lengths {text}: must be positive whole numbers, comma-separated, such as 2048,65536")
    return lengths


def load_summary(job_argv: list[str], lengths: list[int]) -> Summary:
    """The summary of the model that a job's options name.

    Raises:
        UserError: the options, the config or the tokenizer cannot be used.
    """
    job = parse_args(job_argv, check=False)  # a model needs no dataset

    from flame.models import build_model, load_model_config
    from flame.models.backend import setup_backend
    from flame.models.custom import load_custom_models
    from flame.models.summary import summarise

    setup_backend("reference", "cpu")
    load_custom_models(job)
    tokenizer = None
    if job.model.tokenizer_path:
        from flame.data.tokenize import load_tokenizer

        tokenizer = load_tokenizer(job.model.tokenizer_path, job.model.trust_remote_code)
    config = load_model_config(job.model, tokenizer)
    return summarise(build_model(config, job.model.trust_remote_code).model, lengths)


def lines_of(summary: Summary) -> Iterator[str]:
    """The text to print."""
    blocks = ", ".join(f"{count} {name}" for name, count in summary.blocks.items())
    yield f"{summary.model_type} ({summary.architecture}): {blocks}, hidden size {summary.hidden_size:,}"
    yield ""
    yield from _parameters(summary)
    yield ""
    yield from _mixers(summary)
    yield ""
    yield from _flops(summary)
    yield ""
    yield from _memory(summary)


def _parameters(summary: Summary) -> Iterator[str]:
    yield "parameters"
    for part, count in summary.parts.items():
        if count or part == "head":
            note = "   tied to the embedding" if part == "head" and not count else ""
            yield f"  {_PART_NAMES.get(part, part):<20}{count:>16,}{count / summary.total:>8.1%}{note}"
    yield f"  {'total':<20}{summary.total:>16,}"
    yield f"  {'without embedding':<20}{summary.without_embedding:>16,}"


def _mixers(summary: Summary) -> Iterator[str]:
    yield "token mixers (forward FLOPs per token beside their projections, and where the formula is from)"
    for kind in summary.mixers:
        window = f", window {kind.window:,}" if kind.window else ""
        yield f"  {kind.count} {kind.name}, {kind.parameters:,} parameters each{window}"
        yield f"    {kind.formula}"
        yield f"    {kind.source}"
    if summary.uncounted:
        yield f"  no formula for {', '.join(summary.uncounted)}: the numbers below leave their mixers out"


def _flops(summary: Summary) -> Iterator[str]:
    yield "training FLOPs per token (forward and backward, no recomputation)"
    yield f"  {'document length':<20}{'linear layers':>16}{'mixers':>16}{'total':>16}"
    # One unit for the whole table, small enough for a debug model.
    scale, unit = (1e9, "G") if summary.lengths[-1].linear_flops >= 1e8 else (1e6, "M")
    for row in summary.lengths:
        columns = (row.linear_flops, row.mixer_flops, row.linear_flops + row.mixer_flops)
        yield f"  {row.length:<20,}" + "".join(f"{value / scale:>14.3f} {unit}" for value in columns)


def _memory(summary: Summary) -> Iterator[str]:
    from flame.models.summary import BYTES_PER_PARAMETER

    each = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in BYTES_PER_PARAMETER.items())
    yield "memory"
    yield f"  bytes per parameter in training (AdamW): {each}"
    yield f"  weights, gradients and optimizer: {_size(summary.training_bytes)}, divided by the devices that shard them"
    yield (
        f"  activations per token, at least: {_size(summary.linear_input_bytes)} of inputs to linear layers, "
        f"{_size(summary.block_input_bytes)} of inputs to blocks"
    )
    yield (
        f"  decoding one sequence: state {_size(summary.state_bytes)}, "
        f"and {_size(summary.cache_bytes)} of keys and values per token"
    )
    for row in summary.lengths:
        yield f"    after {row.length:,} tokens: {_size(row.decode_bytes)}"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
