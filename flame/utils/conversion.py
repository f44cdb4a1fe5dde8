"""What the two conversion commands share: a progress bar, readable errors, exit codes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from flame.errors import EXIT_USER_ERROR, UserError
from flame.utils.commands import translate_flags

OnBytes = Callable[[int, int], None]


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--custom_models",
        default="",
        help="custom models to import, comma-separated, as in a job's model.custom_models (default: those that the "
        "run's config.toml names)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar, errors only")


def run_conversion(convert: Callable[[OnBytes], Path], quiet: bool, custom_models: str = "") -> int:
    """Set up the model classes, convert under a progress bar, and print the folder written to.

    Args:
        custom_models: entries to import, with commas, as in a job's ``model.custom_models``.

    Returns:
        0, or 2 with one message on stderr when the user must change something.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from flame.models.backend import setup_backend
    from flame.models.custom import load_entry

    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, format="%(message)s", stream=sys.stderr)
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        setup_backend("auto", "cpu")
        for entry in filter(None, custom_models.split(",")):
            load_entry(entry, f"--custom_models {entry}")
        console = Console(stderr=True)
        # Without a terminal a bar that removes itself would leave an empty line.
        with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
            bar = progress.add_task("converting", total=None)
            folder = convert(lambda done, total: progress.update(bar, completed=done, total=total))
    except UserError as error:
        print(translate_flags(str(error), {"checkpoint.load_step": "step"}), file=sys.stderr)
        return EXIT_USER_ERROR
    print(folder)
    return 0
