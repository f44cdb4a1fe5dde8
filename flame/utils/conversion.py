"""What the two conversion commands share: a progress bar, readable errors, exit codes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from flame.errors import EXIT_USER_ERROR, UserError

OnBytes = Callable[[int, int], None]


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bar, errors only")


def run_conversion(convert: Callable[[OnBytes], Path], quiet: bool) -> int:
    """Set up the model classes, convert under a progress bar, and print the folder written to.

    Returns:
        0, or 2 with one message on stderr when the user must change something.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from flame.models.backend import setup_backend

    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, format="%(message)s", stream=sys.stderr)
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        setup_backend("auto", "cpu")
        with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as progress:
            bar = progress.add_task("converting", total=None)
            folder = convert(lambda done, total: progress.update(bar, completed=done, total=total))
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    print(folder)
    return 0
