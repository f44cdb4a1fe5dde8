"""Types of command-line arguments that scripts share; argparse makes one line of what they refuse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """A whole number, at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text}: must be a whole number, at least 0")
    return int(text)


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def output_file(text: str) -> Path:
    """A file that can be written later on, when there are figures to lose."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"{text}: must be a file in a folder that exists")
    return path
