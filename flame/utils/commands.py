"""What the data commands share: where the rows come from, a progress bar, readable errors, exit codes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flame.errors import EXIT_USER_ERROR, UserError, translate_flags

INTERRUPTED = 128 + 2  # what a shell gives for SIGINT

# The loader speaks of training's options; here the same things have shorter names.
FLAGS = {
    "training.dataset_name": "name",
    "training.dataset_split": "split",
    "training.data_dir": "data_dir",
    "training.data_files": "data_files",
    "training.text_column": "text_column",
    "training.on_bad_row": "on_bad_row",
    "training.add_bos": "add_bos",
    "training.add_eos": "add_eos",
}


def add_source(parser: argparse.ArgumentParser, flag: str) -> None:
    """Add the options that say where rows come from; ``flag`` names the dataset."""
    parser.add_argument(flag, required=True, help="hub name, folder, file, glob, save_to_disk folder or builtin:stdlib")
    parser.add_argument("--name", default="", help="the dataset's config")
    parser.add_argument("--split", default="train", help="split to read (default: train)")
    parser.add_argument("--data_dir", default="", help="folder inside the dataset")
    parser.add_argument("--data_files", default="", help="files or globs inside the dataset, comma-separated")


def source_spec(arguments: argparse.Namespace, attribute: str):
    """The ``flame.data.sources.SourceSpec`` that the options of ``add_source`` name."""
    from flame.data.sources import SourceSpec

    files = tuple(file for file in arguments.data_files.split(",") if file)
    dataset = getattr(arguments, attribute)
    return SourceSpec(dataset, arguments.name, arguments.split, arguments.data_dir, files)


@contextmanager
def progress_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr over ``total`` rows; gives the function that moves it on by a number of them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        bar = progress.add_task(label, total=total)
        yield lambda num_rows: progress.advance(bar, num_rows)


def run_command(
    command: Callable[[], str], flags: Mapping[str, str], interrupted: str = "the same command goes on from here"
) -> int:
    """Run a command and print what it returns.

    Args:
        flags: options of training that have another name here, besides ``FLAGS``.
        interrupted: what Ctrl-C leaves.

    Returns:
        0; 2 with one message on stderr when the user must change something; 130 when it was interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        print(command())
    except UserError as error:
        print(translate_flags(str(error), {**FLAGS, **flags}), file=sys.stderr)
        return EXIT_USER_ERROR
    except OSError as error:  # the disk is full, the output may not be written or lies in no folder
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        return INTERRUPTED
    return 0
